"""Pictures and sounds on a runner of a GPU, as far as that shows without a GPU: graphs replay what they were
made of."""

from __future__ import annotations

import json

import numpy as np
import pytest
from forked import run_script

SLOW = "qwen3-asr", "paligemma", "gemma3, torch", "qwen3-vl", "qwen3.5", "llava"


FAST = "gemma3", "qwen2.5-vl, graphs", "qwen2-audio"


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_gpu_answers_as_a_cpu(case: str) -> None:
    both = json.loads(run_script("interpreted_pictures.py", case)[-1])[case]
    cpu, gpu = both["cpu"], both["gpu"]
    assert cpu.keys() == gpu.keys()
    assert cpu["again"]["cached"] == gpu["again"]["cached"] >= 32
    for rid, expected in cpu.items():
        assert gpu[rid]["tokens"] == expected["tokens"]
        np.testing.assert_allclose(gpu[rid]["logprobs"], expected["logprobs"], atol=2e-5, rtol=1e-4)

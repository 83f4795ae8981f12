"""What runners of a GPU answer is what those of the CPU do, as far as that shows without a GPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from forked import run_script

KINDS = "logprobs", "vector", "states"


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """In a process of its own: see ``interpreted_gpu.py``."""
    found: dict[str, Any] = json.loads(run_script("interpreted_gpu.py")[-1])
    return found


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("windows, decode", set()),
        ("windows, prompts", set()),
        ("text", set(KINDS)),
        ("weights on the host", {"logprobs"}),
        ("toy family", {"logprobs"}),
        ("toy format", {"logprobs"}),
        ("experts in mxfp4", {"logprobs"}),
        ("layer norm", {"logprobs"}),
        ("states", {"logprobs"}),
        ("module", {"logprobs"}),
        ("module with windows", set()),
        ("module with wider keys", set()),
        ("convolutions", {"logprobs"}),
        ("delta of channels", {"logprobs"}),
        ("a scan beside attention", {"logprobs"}),
        ("one part in each layer", {"logprobs"}),
        ("scans alone", {"logprobs"}),
        ("last", {"vector"}),
        ("mean", {"vector"}),
        ("encoder", {"vector"}),
        ("rotary encoder", {"vector"}),
    ],
)
def test_a_gpu_answers_as_a_cpu(answers: dict[str, Any], case: str, kinds: set[str]) -> None:
    cpu, gpu = answers[case]["cpu"], answers[case]["gpu"]
    assert cpu.keys() == gpu.keys()
    assert {kind for found in gpu.values() for kind in KINDS if found[kind]} == kinds
    for rid, expected in cpu.items():
        assert gpu[rid]["tokens"] == expected["tokens"]
        for kind in KINDS:
            np.testing.assert_allclose(gpu[rid][kind], expected[kind], atol=2e-5, rtol=1e-4)


def test_an_encoder_in_bfloat16_is_near(answers: dict[str, Any]) -> None:
    both = answers["encoder in bfloat16"]
    for rid, expected in both["cpu"].items():
        a, b = np.array(expected["vector"]), np.array(both["gpu"][rid]["vector"])
        assert 0 < np.linalg.norm(a - b) < 0.03 * np.linalg.norm(a)

"""Vectors of texts and pictures on a GPU: those of the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from test_pictured_vectors import SHOWN, asked, clip, qwen3_vl, siglip
from test_pooling import vectors
from tiny import make_core, run, submit, tiny_config

from sgla.messages import Placed
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner


@pytest.mark.parametrize("make", [qwen3_vl, clip, siglip])
def test_equal_to_the_cpu(make: Any, tmp_path: Path) -> None:
    model = make(tmp_path)
    if make is qwen3_vl:
        requests, limits = asked(model), {}
    else:
        requests, limits = [submit("text", [5, 6, 310], 0, pool=[])], {"encoder": True, "prefix_cache": False}
        for i, shown in enumerate(SHOWN):
            made = [Placed(0, 1, model.prepared(shown))]
            requests.append(replace(submit(f"picture {i}", [0], 0, pool=[]), pictures=made))

    def answers(runner: Any) -> dict[str, Any]:
        return vectors(run(runner, requests, make_core(runner.facts, **limits)))

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        config = tiny_config(step_tokens=256, task="embed")
        expected = answers(cpu_runner(config, model.source, 0, 1, "", lambda progress: None))
        config = replace(config, device="cuda", kv_cache_bytes=64 << 20)
        found = answers(cuda_runner(config, model.source, 0, 1, "", lambda progress: None))
    for rid, values in expected.items():
        np.testing.assert_allclose(found[rid], values, atol=2e-3)

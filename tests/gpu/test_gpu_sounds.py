"""Sounds on a GPU: what the CPU answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from test_hearing import MAKERS, SOUNDS, TEXTS
from tiny import make_core, run, tiny_config

from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner


@pytest.mark.parametrize("name", MAKERS)
def test_equal_to_the_cpu(name: str, tmp_path: Path) -> None:
    """Together, and again with what the first time has left in the cache."""
    model = MAKERS[name](tmp_path)
    requests = [model.submit(str(count), text, SOUNDS[:count], 12) for count, text in TEXTS.items()]

    def made(make: Any, **settings: Any) -> Any:
        config = tiny_config(step_tokens=256, **settings)
        return make(config, model.source, 0, 1, "", lambda progress: None)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = run(made(cpu_runner), requests).tokens()
        runner = made(cuda_runner, device="cuda", kv_cache_bytes=64 << 20)
        assert runner.facts.media["audio"]
        core = make_core(runner.facts)
        assert run(runner, requests, core).tokens() == expected
        assert run(runner, requests, core).tokens() == expected

"""A model that writes blocks on the runner of a GPU (``interpreted_gpu.py``), beside that of the CPU: prints
what both write, as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreted_gpu  # first: it turns Triton's interpreter on
from test_diffusion import BLOCK, REQUESTS, save_model
from tiny import make_core, run, tiny_config

from sgla.hub.source import ModelSource
from sgla.worker import gpu_model
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner


def written(make: Callable[..., Any], source: ModelSource, **settings: Any) -> dict[str, Any]:
    """Together, and alone in small steps."""
    runner = make(tiny_config(**settings), source, 0, 1, "", lambda progress: None)
    assert runner.facts.canvas == BLOCK
    if settings:
        assert any("attention" in note and "triton" in note for note in runner.facts.notes), (
            runner.facts.notes
        )
    found = {"together": run(runner, REQUESTS, make_core(runner.facts)).tokens()}
    found["alone"] = {}
    for request in REQUESTS:
        limits = {"step_tokens": 2 * BLOCK, "prefix_cache": False}
        found["alone"] |= run(runner, [request], make_core(runner.facts, **limits)).tokens()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        _, source = save_model(Path(name))
        found = {"cpu": written(cpu_runner, source)}
        interpreted_gpu.become_gpu()
        gpu_model.rehearse = lambda *args: None
        found["gpu"] = written(cuda_runner, source, device="cuda")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

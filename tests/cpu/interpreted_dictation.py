"""A model that writes what it hears on the runner of a GPU (``interpreted_gpu.py``), beside that of the CPU:
prints what both write, as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreted_gpu  # first: it turns Triton's interpreter on
from hearing_models import whisper
from test_transcribing import Served, requests, reread, times
from tiny import make_core, run, tiny_config

from sgla.hub.source import ModelSource
from sgla.worker import gpu_model
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner


def written(make: Callable[..., Any], source: ModelSource, **settings: Any) -> dict[str, Any]:
    """Together, and alone in small steps."""
    runner = make(tiny_config(**settings), source, 0, 1, "", lambda progress: None)
    served = Served(source, runner)
    asked = requests(served)
    found = {"together": run(runner, asked, make_core(runner.facts)).tokens(), "alone": {}}
    for request in asked[1:4]:
        limits = {"step_tokens": 3, "prefix_cache": False}
        found["alone"] |= run(runner, [request], make_core(runner.facts, **limits)).tokens()
    again = [reread(request, found["together"][request.rid]) for request in asked[1:4]]
    found["times"] = times(run(runner, [*again, asked[0]], make_core(runner.facts)))
    limits = {"step_tokens": 3, "prefix_cache": False}
    found["times alone"] = times(run(runner, again[1:2], make_core(runner.facts, **limits)))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        source, _ = whisper(Path(name))
        found = {"cpu": written(cpu_runner, source)}
        interpreted_gpu.become_gpu()
        gpu_model.rehearse = lambda *args: None
        found["gpu"] = written(cuda_runner, source, device="cuda", attention_backend="torch")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

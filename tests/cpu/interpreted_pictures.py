"""Models that take pictures or sounds on runners of a GPU (``interpreted_gpu.py``), beside those of the CPU.

``python interpreted_pictures.py CASE ...``: prints for each case what both answer, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreted_gpu  # first: it turns Triton's interpreter on
from hearing_models import Heard
from msgspec.structs import replace
from test_hearing import MAKERS as HEARING
from test_hearing import SOUNDS
from test_vision import MAKERS, SHOWN
from tiny import make_core, run, tiny_config

from sgla.messages import Submit
from sgla.worker import gpu_model, gpu_setup
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner

TRITON = {"decode_attention_backend": "torch", "prefill_attention_backend": "triton"}
TORCH = {"attention_backend": "torch"}
GRAPHS = {"attention_backend": "triton"}
# Settings of the GPU alone.
CASES: dict[str, dict[str, Any]] = {
    "llava": TORCH,
    "paligemma": TRITON,
    "gemma3": TRITON,
    "gemma3, torch": TORCH,
    "qwen2.5-vl": TORCH,
    "qwen3-vl": TORCH,
    "qwen3.5": TORCH,
    "qwen2.5-vl, graphs": GRAPHS,
    **dict.fromkeys(HEARING, TORCH),
}


class Graph:
    """Of a step that runs again when it is replayed."""

    replayed = 0

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        Graph.replayed += 1
        self._body()


class Capture:
    def __call__(self, body: Callable[[], None]) -> Graph:
        return Graph(body)

    unrun = __call__


def requests(model: Any) -> list[Submit]:
    """With no picture, two, and one that a request before has, and one of them again."""
    place, shown = ("<sound>", SOUNDS) if isinstance(model, Heard) else ("<image>", SHOWN)
    made = [
        model.submit("none", "No picture.", [], 3),
        model.submit("two", f"{place}Look:{place}", shown[:2], 3),
        model.submit("one", f"Look: {place} and tell.", shown[:1], 3),
    ]
    made.append(replace(made[1], rid="again", arrival=made[1].arrival + 5))
    return [replace(one, sampling=replace(one.sampling, logprobs=1)) for one in made]


def answers(make: Callable[..., Any], model: Any, **settings: Any) -> dict[str, Any]:
    size = 72 if model.speller.vision.prefix else 40  # a prefix is in one step
    runner = make(tiny_config(step_tokens=size, **settings), model.source, 0, 1, "", lambda progress: None)
    assert runner.facts.media, runner.facts.notes
    before = Graph.replayed
    transcript = run(runner, requests(model), make_core(runner.facts))
    assert (Graph.replayed > before) is (settings.get("attention_backend") == "triton")
    cached = {rid: deltas[0].cached_tokens for rid, deltas in transcript.items()}
    return {rid: found | {"cached": cached[rid]} for rid, found in interpreted_gpu.shown(transcript).items()}


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        makers = MAKERS | HEARING
        models = {case: makers[case.partition(",")[0]](Path(name, case)) for case in sys.argv[1:]}
        for case, model in models.items():
            found[case] = {"cpu": answers(cpu_runner, model)}
        interpreted_gpu.become_gpu()
        gpu_setup.Capture = Capture  # type: ignore[misc, assignment]
        gpu_model.rehearse = lambda *args: None
        for case, model in models.items():
            found[case]["gpu"] = answers(cuda_runner, model, device="cuda", **CASES[case])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Rows that guess on a GPU, without one: see ``interpreted_gpu.py``. Here graphs run, too, each as what it was captured from.

``python interpreted_drafts.py``: prints for each case what a CPU's runner, which does not guess, and a GPU's answer, as JSON.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interpreted_gpu import DECODER, SMALL_STEPS, WINDOWS, become_gpu, source
from tiny import Transcript, make_core, run, submit, tiny_config

from sgla.kernels.triton import attention
from sgla.messages import StepPlan, StepResult, Submit
from sgla.sched.core import Core
from sgla.worker import cuda
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner

DRAFTS = 4


class Capture:
    def __call__(self, body: Callable[[], None]) -> Any:
        return Graph(body)

    unrun = __call__


class Graph(NamedTuple):
    replay: Callable[[], None]


class Launching:
    """An executor that launches a step when it is planned, and finishes it when it is drained."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.flights: deque[Any] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.flights.append(self.runner.launch(plan))

    def drain(self) -> list[StepResult]:
        return [self.runner.finish(self.flights.popleft())]


def requests() -> list[Submit]:
    """Outputs that have little choice, so that there is much to guess."""
    stem = [5, 9, 2, 7]
    return [
        submit("greedy", stem * 3, 8),
        submit("always", [5, 6, 7], 12, allowed=[9]),
        submit("drawn", [4, 4, 8], 9, allowed=[3, 4], temperature=1.0, seed=4, logprobs=1),
        submit("ruled", stem * 3, 9, allowed=stem, repetition=1.1, frequency=0.5, min_tokens=4, stop_ids=[2]),
        submit("stops", stem, 12, allowed=[3, 4], temperature=1.0, seed=2, stop_ids=[4]),
        submit("prompt", list(range(20)), 3, prompt_logprobs=1),
    ]


# model, settings, those of the GPU alone, limits of the scheduler
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "eager": (DECODER, {}, {"attention_backend": "torch"}, {"depth": 3, "step_tokens": 24}),
    "graphs": (DECODER, {}, {"attention_backend": "triton"}, {"depth": 2}),
    "windows": (
        WINDOWS,
        SMALL_STEPS | {"step_tokens": 16},
        {"decode_attention_backend": "triton", "prefill_attention_backend": "torch"},
        {"depth": 2},
    ),
}


def shown(transcript: Transcript) -> dict[str, Any]:
    entries = {
        rid: [[e.token, e.rank, round(e.logprob, 3)] for delta in deltas for e in delta.logprobs or []]
        for rid, deltas in transcript.items()
    }
    return {"tokens": transcript.tokens(), "finish": transcript.finish(), "logprobs": entries}


def guessed(runner: Any, case: str) -> dict[str, Any]:
    core: Core = make_core(runner.facts, drafts=DRAFTS, **CASES[case][3])
    found = shown(run(runner, requests(), core, executor=Launching(runner)))
    stats = core.stats()
    return found | {"verifies": stats.verifies, "guessed": stats.draft_tokens, "right": stats.right_at}


def main() -> None:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    settings = {"max_running_requests": 4}

    def make(maker: Any, case: str, **own: Any) -> Any:
        model, common, _, _ = CASES[case]
        config = tiny_config(**settings | common | own)
        return maker(config, source(Path("."), model, ""), 0, 1, "", lambda progress: None)

    for case in CASES:
        runner = make(cpu_runner, case)
        found[case] = {"cpu": shown(run(runner, requests(), depth=1))}
    become_gpu()
    cuda.rehearse, cuda.Capture = (lambda *args: None), Capture  # type: ignore[assignment, misc]
    attention.splits_for = lambda *args: 1
    guessing = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": DRAFTS}
    for case, (_, _, own, _) in CASES.items():
        runner = make(cuda_runner, case, device="cuda", **guessing | own)
        assert runner._captures == (case == "graphs")
        found[case]["gpu"] = guessed(runner, case)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

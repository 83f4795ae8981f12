"""Two models in one process, whose steps are in flight together: each does what it does alone."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_gpu_runner import make
from test_gpu_windows import MODEL, requests

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from config_cases import llama
from tiny import Transcript, make_core

PLAIN = llama(
    vocab_size=5000, hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2
)


@pytest.fixture(scope="module")
def runners() -> list[Any]:
    """They differ in all that a rule or a kernel asks for: windows, norms, activation, type of weights and of
    pages."""
    return [
        make(MODEL),
        make(PLAIN | {"max_position_embeddings": 1024}, kv_cache_dtype="fp8", quantization="fp8"),
    ]


def steps(runner: Any, found: dict[str, list[int]]) -> Iterator[None]:
    """Pauses with a step in flight. Text goes to ``found``."""
    core, flights, transcript = make_core(runner.facts, depth=2, step_tokens=200), deque[Any](), Transcript()
    for request in requests():
        core.offer(request, 0.0)
    while not core.idle:
        while (step := core.plan(0.0)) is not None:
            flights.append(runner.launch(step))
        yield
        result = runner.finish(flights.popleft())
        assert not result.failed
        for delta in core.retire(result, 0.0):
            transcript.setdefault(delta.rid, []).append(delta)
    found |= transcript.tokens()


def test_steps_by_turns_are_those_alone(runners: list[Any]) -> None:
    alone: list[dict[str, list[int]]] = [{}, {}]
    for runner, texts in zip(runners, alone):
        assert not any(steps(runner, texts))
    together: list[dict[str, list[int]]] = [{}, {}]
    running = [steps(runner, texts) for runner, texts in zip(runners, together)]
    while running:
        running = [one for one in running if next(one, "ended") is None]
    assert together == alone
    assert alone[0] != alone[1]

"""Requests that begin with the first layers of their prefixes while the others cross from the host's memory
answer as if all had been there."""

from __future__ import annotations

import time
from collections import deque
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace
from test_gpu_runner import TINY, make
from tiny import Transcript, make_core, submit

from sgla.messages import Submit
from sgla.sched.core import Core
from sgla.sched.prefill import Prefill

LONG, LAYERS = 6000, 12


def texts(turn: int) -> list[Submit]:
    """Three that push each other from the device, with ends of their own in each turn."""
    made = [np.random.default_rng(i).integers(0, 4000, LONG).tolist() for i in range(3)]
    return [
        replace(
            submit(f"{turn}{i}", [*text, turn, *range(300 + i)], 8, logprobs=1), arrival=10.0 * turn + i + 1
        )
        for i, text in enumerate(made)
    ]


def answers(runner: Any, core: Core, requests: list[Submit]) -> dict[str, Any]:
    """Tokens and their logprobs. Each waits for the one before."""
    found, flights = Transcript(), deque[Any]()
    for request in requests:
        core.offer(request, 0.0)
        while not core.idle:
            while (plan := core.plan(0.0)) is not None:
                flights.append(runner.launch(plan))
            for moved in runner.moved():
                core.moved(moved)
            if flights:
                for delta in core.retire(runner.finish(flights.popleft()), 0.0):
                    found.setdefault(delta.rid, []).append(delta)
            else:
                time.sleep(1e-4)
    return {
        rid: [(d.tokens, [p.logprob for p in d.logprobs or [] if p]) for d in deltas]
        for rid, deltas in found.items()
    }


def test_layers_that_come_late() -> None:
    settings = {"deterministic": True, "context_length": 8192, "kv_host_bytes": 4 << 30}
    settings["kv_cache_bytes"] = 1 << 30
    runner = make(TINY | {"num_hidden_layers": LAYERS, "max_position_embeddings": 8192}, **settings)
    size = runner.facts.page_size
    pages = (LONG + 1000) // size + 1
    assert pages < runner.facts.groups[0].pages
    late: list[int] = []  # copies that steps have found not to have ended
    wait = runner.host.wait

    def counted(crossings: Any, kept: Any = ()) -> None:
        late.extend(c.transfer for c in crossings if not c.over)
        wait(crossings, kept)

    runner.host.wait = counted
    cold = make_core(runner.facts, pages=pages, tiers=[])
    expected = answers(runner, cold, texts(0) + texts(1))
    warm = make_core(runner.facts, pages=pages)
    with patch.object(Prefill, "seconds", lambda *_: 1e9):
        found = answers(runner, warm, texts(0) + texts(1))
    assert warm.stats().tiers[0].loaded >= 3 * (LONG // size)
    assert len(set(late)) >= 3
    assert found == expected
    runner.close()

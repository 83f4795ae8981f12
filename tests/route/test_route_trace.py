"""Conversations on several workers, in time that is counted and not passed: what the policies are for."""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from pathlib import Path
from typing import Any

from sgla.route import asked
from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig
from sgla.route.workers import Look

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from route import Cache, conversations

TRACE = {"conversations": 48, "turns": 6, "turn_tokens": 100, "systems": 8, "system_tokens": 1000, "seed": 0}


def played(workers: int, concurrency: int, **settings: Any) -> tuple[float, float]:
    """Share of prompt tokens that was cached, and requests in the time of a token that is not. A worker reads
    one prompt after the other, and has answered when it is read."""
    balancer = Balancer(RouteConfig(**settings), seed=0)
    caches, free = {}, {}
    for n in range(workers):
        url = f"http://w{n}:1"
        balancer.add(url)
        balancer.saw(url, Look())
        caches[url], free[url] = Cache(10**6), 0.0
    talks = [iter(talk) for talk in conversations(argparse.Namespace(**TRACE))]
    ending: list[tuple[float, int, Any, Any]] = []
    order = itertools.count()
    tokens = cached = requests = 0
    now = 0.0

    def ask(talk: Any) -> bool:
        nonlocal tokens, cached, requests
        body = next(talk, None)
        if body is None:
            return bool(talks) and ask(talks.pop())
        ticket = balancer.place(
            asked.read("/v1/chat/completions", "application/json", body, "", True),
            "k",
            (),
            lambda error: None,
        )
        assert ticket.worker is not None
        url = ticket.worker.url
        size, hit = caches[url].read(body.partition(b'"messages":')[2])
        tokens, cached, requests = tokens + size, cached + hit, requests + 1
        free[url] = max(free[url], now) + size - hit
        heapq.heappush(ending, (free[url], next(order), ticket, talk))
        return True

    for _ in range(concurrency):
        ask(talks.pop())
    while ending:
        now, _, ticket, talk = heapq.heappop(ending)
        balancer.began(ticket)
        balancer.close(ticket, 200, False)
        ask(talk)
    return cached / tokens, requests / now


async def test_four_workers_have_nearly_the_cache_of_one() -> None:
    single, _ = played(1, 16)
    hits, rate = played(4, 16)
    turns, slower = played(4, 16, policy="round_robin")
    assert hits >= 0.95 * single > turns
    assert rate >= 1.8 * slower

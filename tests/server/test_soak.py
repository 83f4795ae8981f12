"""Random traffic with cancels, disconnects and bad bodies against a real server process: nothing leaks, all
ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from server_process import ServerProcess, serving

BAD = [
    b"{",
    b"\xff\xfe",
    b'{"prompt": 3.5}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"messages": []}',
    b'{"prompt": [99999999]}',
]


def body(rng: random.Random) -> dict[str, Any]:
    shared = list(range(5, 5 + rng.choice([0, 16, 40])))
    return {
        "prompt": shared + [rng.randrange(5, 200) for _ in range(rng.randrange(1, 30))],
        "max_tokens": rng.randrange(1, 24),
        "ignore_eos": True,
        "temperature": rng.choice([0, 1]),
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.5,
        "stop": rng.choice([None, ["a"], ["zz", "q"]]),
    }


async def one(session: aiohttp.ClientSession, rng: random.Random, outcomes: Counter[str]) -> None:
    kind = rng.random()
    if kind < 0.05:
        async with session.post("/v1/completions", data=rng.choice(BAD)) as answer:
            assert 400 <= answer.status < 500, await answer.text()
            outcomes["refused"] += 1
        return
    request = body(rng)
    timeout = aiohttp.ClientTimeout(total=rng.uniform(0.001, 0.03) if kind < 0.25 else 60)
    try:
        async with session.post("/v1/completions", json=request, timeout=timeout) as answer:
            text = await answer.text()
    except TimeoutError:
        assert kind < 0.25, "a request never ended"
        outcomes["left"] += 1
        return
    assert answer.status == 200, text
    if request["stream"]:
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"') == request["n"], text
    outcomes["finished"] += 1


async def soak(server: ServerProcess, count: int, seed: int, parallel: int = 32) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    rng = random.Random(seed)
    gate = asyncio.Semaphore(parallel)

    async def limited(session: aiohttp.ClientSession, number: int) -> None:
        async with gate:
            await one(session, random.Random(number), outcomes)

    connector = aiohttp.TCPConnector(limit=parallel)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        await asyncio.gather(*(limited(session, rng.randrange(1 << 40)) for _ in range(count)))
    return outcomes


def scheduler_stats(server: ServerProcess) -> dict[str, Any]:
    return server.get("/get_server_info")[1]["internal_states"][0]


async def settled(server: ServerProcess) -> None:
    """Wait until nothing runs; then every page is free or cached."""
    for _ in range(200):
        busy = server.metric("sgla:num_running_reqs") + server.metric("sgla:num_queue_reqs")
        if not busy:
            break
        await asyncio.sleep(0.05)
    assert not busy
    stats = scheduler_stats(server)
    assert stats["draining"] == stats["in_flight"] == stats["pages_private"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["pages_evictable"] == stats["pages_cached"]


@pytest.mark.slow
async def test_soak_on_a_tiny_model(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), "--kv-cache-bytes", "2M") as server:
        outcomes = await soak(server, 400, seed=1)
        assert min(outcomes["finished"], outcomes["left"], outcomes["refused"]) > 0
        await settled(server)
        assert server.request("POST", "/flush_cache")[0] == 200
        stats = scheduler_stats(server)
        assert stats["pages_free"] == stats["pages_total"]


@pytest.mark.slow
async def test_memory_is_flat_over_ten_thousand_requests(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), "--executor", "fake", "--kv-cache-bytes", "4M") as server:
        process = psutil.Process(server.process.pid)
        await soak(server, 4000, seed=2)
        before = process.memory_info().rss
        await soak(server, 10_000, seed=3)
        await settled(server)
        after = process.memory_info().rss
        assert after - before < 0.02 * before + (4 << 20), (before, after)

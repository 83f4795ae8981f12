"""Hundreds of streams at once, some of which are left: the others are complete and in order, and no page is
lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_process import ServerProcess, serving
from test_soak import settled

CLIENTS = 512
TOKENS, LONG = 24, 400
PROMPTS = [[*range(5, 5 + length)] for length in (3, 16, 17, 40, 64, 90)]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    flags = ("--executor", "fake", "--max-running-requests", str(CLIENTS), "--kv-cache-bytes", "16M")
    with serving("--model", str(tiny_model), *flags) as process:
        yield process


def body(prompt: int) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[prompt],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }


async def read(
    session: aiohttp.ClientSession, prompt: int, leave_after: int | None
) -> tuple[str, list[int]] | None:
    """Text and ids of a stream; None if it was left after so many chunks."""
    text, ids, chunks = "", [], 0
    # One that is left is long, or it could have ended before the client came to leave it.
    length = {} if leave_after is None else {"max_tokens": LONG}
    async with session.post("/v1/completions", json={**body(prompt), "stream": True, **length}) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if line == b"data: [DONE]\n":
                return text, ids
            if line == b"\n":
                continue
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            text += choice["text"]
            ids += choice["token_ids"]
            chunks += 1
            if chunks == leave_after:
                answer.close()
                return None
    raise AssertionError("a stream ended without [DONE]")


async def test_a_storm_of_streams(server: ServerProcess) -> None:
    rng = random.Random(0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        expected = []
        for prompt in range(len(PROMPTS)):
            async with session.post("/v1/completions", json=body(prompt)) as answer:
                (choice,) = (await answer.json())["choices"]
                expected.append((choice["text"], choice["token_ids"]))
        prompts = [rng.randrange(len(PROMPTS)) for _ in range(CLIENTS)]
        leaving = [rng.randrange(1, TOKENS // 2) if rng.random() < 0.3 else None for _ in range(CLIENTS)]
        streams = await asyncio.gather(*(read(session, *each) for each in zip(prompts, leaving)))
    for prompt, left, got in zip(prompts, leaving, streams):
        assert got == (expected[prompt] if left is None else None)
    await settled(server)
    assert server.metric("sgla:num_aborted_requests_total") > 0

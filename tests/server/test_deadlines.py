"""Timeouts and priorities of requests, through the whole server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from local_server import Local, local_server

BODY = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}


async def waiting(local: Local, count: int) -> None:
    async with asyncio.timeout(5):
        while local.system.ingress.stats().waiting < count:  # type: ignore[union-attr]
            await asyncio.sleep(0.005)


async def test_a_request_that_takes_too_long(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model)) as local:
        local.system.ingress.pause(True)
        late = asyncio.ensure_future(local.post("/v1/completions", BODY | {"timeout": 0.1}))
        stream = asyncio.ensure_future(
            local.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], "stream": True, "timeout": 0.3},
            )
        )
        patient = asyncio.ensure_future(local.post("/v1/completions", BODY | {"timeout": 60}))
        status, body = await late
        assert (status, json.loads(body)["error"]["code"]) == (408, "deadline_exceeded")
        status, body = await stream
        async with local.client.post("/generate", json={"text": "x", "timeout": 0.1}) as response:
            assert (response.status, response.headers["x-should-retry"]) == (408, "false")
        assert status in (200, 408)  # the headers may be out already
        assert "deadline_exceeded" in body
        local.system.ingress.pause(False)
        assert (await patient)[0] == 200
        assert local.system.ingress.stats().waiting == 0  # type: ignore[union-attr]


async def test_the_urgent_ones_go_first(tiny_model: Path) -> None:
    done: list[int] = []
    async with local_server(model=str(tiny_model), policy="priority", max_running_requests=1) as local:

        async def ask(priority: int) -> None:
            assert (await local.post("/v1/completions", BODY | {"priority": priority}))[0] == 200
            done.append(priority)

        local.system.ingress.pause(True)
        tasks = []
        for i, priority in enumerate((1, 3, 2, 5, 4)):
            tasks.append(asyncio.ensure_future(ask(priority)))
            await waiting(local, i + 1)
        local.system.ingress.pause(False)
        await asyncio.gather(*tasks)
    assert done == [5, 4, 3, 2, 1]

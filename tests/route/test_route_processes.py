"""``sgla route`` as it is started: several processes behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from route_fakes import FakeWorker

CHAT = {"model": "m", "messages": []}


@pytest.mark.slow
async def test_processes_answer_die_and_drain() -> None:
    """A front that is killed is started anew; on SIGTERM what runs is answered, and at a second
    one ended by an error; the exit code is 0."""
    worker = FakeWorker()
    await worker.start()
    words = ["-m", "sgla", "route", "--port", "0", "--processes", "2", "--worker", worker.url]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        [url] = re.findall(r"http://\S+", line)
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while not await healthy(url):
                await asyncio.sleep(0.1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 2
            os.kill(int(children[0]), signal.SIGKILL)
            for _ in range(20):  # connections wait for the process that comes
                assert await healthy(url)
            waiting = asyncio.ensure_future(ask(session, url, {"wait": True}))
            while not any(b"wait" in body for _, body, _ in worker.seen):
                await asyncio.sleep(0.01)
            async with session.post(f"{url}/v1/completions", json={"stream": True}) as stream:
                process.terminate()
                await asyncio.sleep(0.2)
                worker.go.set()
                assert await waiting == 200
                process.terminate()
                last = [line async for line in lines(stream)][-1]
                assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await worker.stop()


async def lines(stream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """That are not empty, until the connection ends."""
    with contextlib.suppress(aiohttp.ClientPayloadError):
        async for line in stream.content:
            if line.strip():
                yield line


async def healthy(url: str) -> bool:
    """On a connection of its own."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ServerDisconnectedError:  # it was with the process that was killed
        return True


async def ask(session: aiohttp.ClientSession, url: str, more: dict[str, bool]) -> int:
    async with session.post(f"{url}/v1/chat/completions", json=CHAT | more) as response:
        return response.status

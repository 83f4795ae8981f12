"""The whole server in the test's own loop, over the fake executor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from sgla.actors.system import System
from sgla.config import Config
from sgla.http.app import make_app
from sgla.http.connections import Runner
from sgla.observe.tracing import Tracing


class Local:
    def __init__(self, system: System, client: aiohttp.ClientSession) -> None:
        self.system = system
        self.client = client

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        async with self.client.post(path, json=body, headers=headers) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def local_server(tracing: Tracing | None = None, **settings: Any) -> AsyncIterator[Local]:
    config = Config(executor="fake", **settings)
    system = System(config)
    system.metrics.tracing = tracing
    await system.start()
    runner = Runner(make_app(system.ingress, config, system.metrics))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            yield Local(system, client)
    finally:
        await system.close()
        await runner.cleanup()

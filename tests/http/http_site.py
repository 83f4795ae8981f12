"""A running server for tests, and readers of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import aiohttp
from aiohttp import web
from http_fake import FakeIngress
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from sgla.http.state.database import Database
from sgla.observe.metrics import Metrics


class Site:
    """A running server: its fake engine, its metrics, clients for it."""

    def __init__(
        self,
        ingress: FakeIngress,
        app: web.Application,
        metrics: Metrics,
        port: int,
        key: str,
        stop: Callable[[], Awaitable[Any]],
    ) -> None:
        self.ingress = ingress
        self.app = app
        self.metrics = metrics
        self.port = port
        self.stop = stop  # ends the server, before the site is closed
        self.url = f"http://127.0.0.1:{port}"
        self.http = aiohttp.ClientSession(self.url)
        self._options = {"base_url": f"{self.url}/v1", "api_key": key, "max_retries": 0, "timeout": 10}

    @cached_property
    def client(self) -> AsyncOpenAI:
        return self._client(_strict_response_validation=True)

    @cached_property
    def lenient(self) -> AsyncOpenAI:
        """The strict type of a completion chunk wants a finish_reason in every one; OpenAI's own server sends
        null."""
        return self._client()

    def _client(self, **options: Any) -> AsyncOpenAI:
        """Without the certificates of this machine, which take longer to read than a test."""
        return AsyncOpenAI(**self._options, **options, http_client=DefaultAsyncHttpxClient(verify=False))

    async def close(self) -> None:
        await self.http.close()
        for name in {"client", "lenient"} & self.__dict__.keys():
            await self.__dict__[name].close()

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """(status, decoded JSON)."""
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(path, **data, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(path, **kwargs) as response:
            return response.status, await response.json()

    async def sse(self, path: str, body: Any) -> list[str]:
        """The ``data:`` payloads of a stream."""
        async with self.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            return sse_payloads(await response.read())


def sse_payloads(raw: bytes) -> list[str]:
    """Payloads of a complete stream, which must consist of ``data:`` blocks and comments only."""
    assert raw.endswith(b"\n\n")
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks), blocks
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


@asynccontextmanager
async def served(files: Mapping[str, bytes | str]) -> AsyncIterator[str]:
    """The address of another server that has ``files``: what is in them, or where they are to be found."""

    async def answer(request: web.Request) -> web.Response:
        found = files[request.match_info["name"]]
        if isinstance(found, str):
            raise web.HTTPFound(found)
        return web.Response(body=found)

    app = web.Application()
    app.add_routes([web.get("/{name}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def at_rest(database: Database) -> None:
    """Return when all that was begun is done, clean-ups that follow included."""
    idle = 0
    while idle < 3:
        await asyncio.sleep(0)
        idle = 0 if database.begun else idle + 1


Serve = Callable[..., Awaitable[Site]]

"""A fake worker, and a router in front of some, in one loop on loopback sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig
from sgla.route.front import Front
from sgla.route.owner import Desk, LocalOwner, Owner, RemoteOwner
from sgla.route.workers import Look

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CARDS = [{"id": "m", "object": "model"}]


class FakeWorker:
    """``seen``: (path, body, headers) of all requests. ``answer``: makes the answers, if it is set. An answer
    to ``{"wait": true}`` waits for ``go``; a stream sends an event for each token of ``queue``."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, Any]] = []
        self.answer: Handler | None = None
        self.go = asyncio.Event()
        self.queue: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled = 0
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        self.url = ""

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    def kill(self) -> None:
        """As the kernel does with what a killed process had."""
        for site in list(self._runner.sites):
            assert site._server is not None
            site._server.close()
        server = self._runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.path_qs, body, request.headers))
        try:
            return await (self.answer or self._usual)(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _usual(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fields = json.loads(body) if body[:1] == b"{" else {}
        if fields.get("wait"):
            await self.go.wait()
        if not fields.get("stream"):
            return web.json_response({"url": self.url, "method": request.method})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while (token := await self.queue.get()) != "[DONE]":
            await response.write(f"data: {token}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


class Router:
    """In front of ``workers``; ``remote``: the front asks its owner by messages."""

    def __init__(self, workers: list[FakeWorker], remote: bool, **settings: Any) -> None:
        self.workers = workers
        urls = [worker.url for worker in workers]
        self.config = RouteConfig(worker=urls, **settings)
        self.balancer = Balancer(self.config, seed=0)
        self.remote = remote
        self.url = ""
        self.session = aiohttp.ClientSession()

    async def start(self) -> None:
        for worker in self.workers:
            self.balancer.add(worker.url)
            self.balancer.saw(worker.url, Look(cards=CARDS))
        owner: Owner = LocalOwner(self.balancer)
        if self.remote:
            ours, theirs = socket.socketpair()
            self.desk = Desk(self.balancer, lambda: None)
            far = owner = RemoteOwner()
            await asyncio.gather(self.desk.connect(ours), far.connect(theirs))
        self.front = Front(self.config, owner)
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        await self.front.listen([listening], None)
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self.session.close()
        self.front.close()
        if self.remote:
            self.desk.close()

    async def post(self, fields: dict[str, Any], path: str = "/v1/chat/completions", **more: Any) -> Any:
        """Status, body and headers."""
        async with self.session.post(self.url + path, json=fields, **more) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def get(self, path: str, **more: Any) -> Any:
        async with self.session.get(self.url + path, **more) as response:
            text = await response.text()
            return response.status, json.loads(text) if text[:1] in "{[" else text, response.headers

    async def raw(self, data: bytes) -> bytes:
        """What comes back until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 5)
        finally:
            writer.close()


Route = Callable[..., Awaitable[Router]]  # the fixture ``route``

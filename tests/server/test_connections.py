"""What silent, slow and too many connections may do: nothing to others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sgla.actors.system import System
from sgla.config import Config
from sgla.http import connections
from sgla.http.app import ROUTES, make_app
from sgla.http.connections import OWN_FILES, SPARE, Listener, Runner, connection_limit

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"


class Server:
    def __init__(self, port: int, listener: Listener) -> None:
        self.port = port
        self.listener = listener

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def all_busy(self, count: int) -> None:
        """Wait until there are ``count`` connections, each with a request."""
        while len(self.listener) < count or any(each.idle for each in self.listener.connections):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    async def get(self, path: str) -> tuple[int, str]:
        """On a connection of its own."""
        timeout = aiohttp.ClientTimeout(10)
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{self.port}", timeout=timeout) as client,
            client.get(path) as response,
        ):
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def serving(limit: int) -> AsyncIterator[Server]:
    config = Config(executor="fake")
    system = System(config)
    await system.start()
    runner = Runner(make_app(system.ingress, config, system.metrics), limit, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    assert isinstance(runner.server, Listener)
    try:
        yield Server(runner.addresses[0][1], runner.server)
    finally:
        await system.close()
        await runner.cleanup()


async def ended(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), 10) == b""


async def test_silent_connections_make_room() -> None:
    async with serving(limit=16) as server:
        silent = [await server.connect() for _ in range(50)]
        for path in ("/health", "/version", "/v1/models", "/metrics"):
            assert (await server.get(path))[0] == 200
        assert len(server.listener) <= 16
        assert await ended(silent[0][0])
        for _, writer in silent:
            writer.close()


async def test_idle_connections_go_before_busy_ones() -> None:
    async with serving(limit=16) as server:
        busy = [await server.connect(POST) for _ in range(15)]
        idle, writer = await server.connect(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await idle.readline()
        while not any(connection.idle for connection in server.listener.connections):  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        _, last = await server.connect(POST)
        await asyncio.wait_for(idle.read(), 10)
        for path, status in (("/health/live", 200), ("/metrics", 200), ("/version", 429), ("/", 429)):
            assert (await server.get(path))[0] == status
        assert "--max-connections" in (await server.get("/v1/models"))[1]
        for spare in [await server.connect() for _ in range(2 * SPARE)]:
            del spare
        assert (await server.get("/health"))[0] == 200
        assert len(server.listener) <= 16 + SPARE
        for _, each in (*busy, (None, last), (None, writer)):
            each.close()
        while server.listener.full:
            await asyncio.sleep(0.01)
        assert (await server.get("/version"))[0] == 200


async def test_answered_clients_that_owe_a_body_make_room() -> None:
    """They are read from for a while, and hold neither a place nor a spare connection from others."""
    async with serving(limit=8) as server:
        data = b"GET /health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        owing = [await server.connect(data) for _ in range(8 + SPARE)]
        for reader, _ in owing:
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        assert (await server.get("/health/live"))[0] == 200
        await asyncio.sleep(0.2)  # who was busy is looked at again
        assert (await server.get("/version"))[0] == 200
        for _, writer in owing:
            writer.close()


async def test_spare_connections_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all of them are busy the oldest one makes room; an answer that is not read is dropped."""
    hang = asyncio.Event()

    async def much(request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    monkeypatch.setitem(ROUTES, "/health/ready", {"GET": lambda request: hang.wait()})
    monkeypatch.setitem(ROUTES, "/metrics", {"GET": much})
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.5)
    async with serving(limit=8) as server:
        busy = [await server.connect(POST) for _ in range(8)]
        await server.all_busy(8)
        _, unread = await server.connect(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.all_busy(9)
        while len(server.listener) > 8:
            await asyncio.sleep(0.01)
        data = b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
        spare = [await server.connect(data) for _ in range(SPARE)]
        await server.all_busy(8 + SPARE)
        assert (await server.get("/health/live"))[0] == 200
        assert await ended(spare[0][0])
        assert len(server.listener) < 8 + SPARE
        for _, writer in (*busy, *spare, (None, unread)):
            writer.close()


async def test_headers_come_in_time_and_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.4)
    async with serving(limit=16) as server:
        start = b"GET /version HTTP/1.1\r\nHost: x\r\n"
        for data in (b"", start):
            reader, writer = await server.connect(data)
            assert await ended(reader)
            writer.close()
        reader, writer = await server.connect(start + b"\r\n" + start)  # the second one never ends
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.count(b"HTTP/1.1 200") == 1
        writer.close()
        reader, writer = await server.connect(start)
        for i in range(30):
            writer.write(b"X-%d: " % i + b"a" * 4000 + b"\r\n")
        assert b" 431 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()


async def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.1)

    async def much(request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    app = web.Application()
    app.router.add_get("/", much)
    runner = Runner(app, 16, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.2)
    while len(runner.server):  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
    writer.close()
    await runner.cleanup()


def test_the_limit_of_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    for limits, files, raised in (
        ((1024, 524288), 524288, [(524288, 524288)]),
        ((1024, 1024), 1024, []),
        ((1024, resource.RLIM_INFINITY), 1 << 20, [(1 << 20, resource.RLIM_INFINITY)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1 << 20, []),
        ((1 << 30, 1 << 30), 1 << 30, []),
    ):
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        assert connections.raise_file_limit() == files
        assert asked == raised


def test_connections_fit_the_files(caplog: pytest.LogCaptureFixture) -> None:
    for files, asked, limit, warned in (
        (1 << 20, None, 16384, False),
        (1 << 20, 50_000, 50_000, False),
        (8192, None, 8192 - 1024 - SPARE - OWN_FILES, False),
        (1024, None, 1024 - 128 - SPARE - OWN_FILES, True),
        (1024, 100, 100, False),
        (1024, 1000, 1024 - 128 - SPARE - OWN_FILES, True),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert connection_limit(files, asked) == limit
        assert bool(caplog.records) == warned

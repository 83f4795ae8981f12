"""What silent, slow and too many connections may do: nothing to others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sgla.actors.system import System
from sgla.config import Config
from sgla.http import accepting, connections
from sgla.http.accepting import AT_ONCE, SEND_BYTES, Site
from sgla.http.answer import sse
from sgla.http.app import ROUTES, make_app
from sgla.http.clients import with_key
from sgla.http.connections import OWN_FILES, SPARE, Listener, Runner, connection_limit
from sgla.http.server import SERVER

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"


class Server:
    def __init__(self, port: int, listener: Listener, salt: bytes) -> None:
        self.port = port
        self.salt = salt
        self.listener = listener

    async def connect(
        self, data: bytes = b"", address: str = "127.0.0.1", **tls: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0), **tls)
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
async def serve(
    model: Path, limit: int, tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[Server]:
    config = Config(model=str(model), executor="fake", **settings)
    system = System(config)
    await system.start()
    app = make_app(system.ingress, config, system.metrics)
    runner = Runner(app, limit, shutdown_timeout=0.1)
    await runner.setup()
    await Site(runner, "127.0.0.1", 0, tls, 128).start()
    assert isinstance(runner.server, Listener)
    try:
        yield Server(runner.addresses[0][1], runner.server, app[SERVER].database.salt)
    finally:
        await system.close()
        await runner.cleanup()


Serving = Callable[..., contextlib.AbstractAsyncContextManager[Server]]


@pytest.fixture
def serving(tiny_model: Path) -> Serving:
    return functools.partial(serve, tiny_model)


async def ended(reader: asyncio.StreamReader) -> bool:
    return await asyncio.wait_for(reader.read(), 10) == b""


@pytest.fixture
def silent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections are silent ones."""
    monkeypatch.setattr(connections, "NEW_SECONDS", 0.0)


@pytest.mark.usefixtures("silent_at_once")
async def test_silent_connections_make_room(serving: Serving) -> None:
    async with serving(limit=16) as server:
        silent = [await server.connect() for _ in range(50)]
        for path in ("/health", "/version", "/v1/models", "/metrics"):
            assert (await server.get(path))[0] == 200
        assert len(server.listener) <= 16
        assert await ended(silent[0][0])
        for _, writer in silent:
            writer.close()


async def test_requests_of_many_new_connections_are_answered(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there may be, from one client, that all connect before the first of them asks."""
    monkeypatch.setattr(connections, "NEW_SECONDS", 30.0)
    async with serving(limit=8) as server:
        opened = [await server.connect() for _ in range(8 + SPARE)]
        for _, writer in opened:
            writer.write(VERSION)
        found = [(await asyncio.wait_for(reader.readline(), 10)).split()[1] for reader, _ in opened]
        assert set(found) == {b"200", b"429"}
        assert found.count(b"200") == 8
        for _, writer in opened:
            writer.close()


async def test_idle_connections_go_before_busy_ones(serving: Serving) -> None:
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


async def test_answered_clients_that_owe_a_body_make_room(serving: Serving) -> None:
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


async def test_spare_connections_are_not_held(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
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


ELSEWHERE = "127.0.0.2"
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def held(server: Server) -> dict[str, int]:
    return {client: len(share) for client, share in server.listener._shares.items()}


async def answers(server: Server, address: str) -> asyncio.StreamWriter:
    """A connection from there that has had an answer."""
    reader, writer = await server.connect(VERSION, address)
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
    return writer


@pytest.mark.parametrize("patience", [0.0, 60.0])
async def test_who_holds_most_connections_makes_room(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """The body that arrives for longest ends, or the newest request; with an answer that says why."""
    monkeypatch.setattr(connections, "PATIENCE", patience)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.3)
    async with serving(limit=8) as server:
        busy = [await server.connect(POST) for _ in range(8)]
        await server.all_busy(8)
        assert held(server) == {"127.0.0.1": 8}
        assert (await server.get("/version"))[0] == 429
        modest = [await server.connect(POST, ELSEWHERE) for _ in range(4)]
        for reader, _ in busy[:4] if patience == 0 else busy[4:]:
            answer = await asyncio.wait_for(reader.read(), 10)
            assert b" 429 " in answer
            assert b"makes room for another client" in answer
        await server.all_busy(8)
        assert held(server) == {"127.0.0.1": 4, ELSEWHERE: 4}
        reader, last = await server.connect(VERSION, ELSEWHERE)
        assert b" 429 " in await asyncio.wait_for(reader.readline(), 10)
        for _, writer in (*busy, *modest, (None, last)):
            writer.close()
        while len(server.listener):
            await asyncio.sleep(0.01)
        assert not server.listener._shares
        assert not server.listener._leaving


async def test_unread_answers_make_room(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def much(request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    monkeypatch.setitem(ROUTES, "/version", {"GET": much})
    monkeypatch.setattr(connections, "PATIENCE", 0.1)
    async with serving(limit=4) as server:
        unread = [await server.connect(VERSION) for _ in range(4)]
        while not all(each.waits for each in server.listener._places):
            await asyncio.sleep(0.01)
        _, modest = await server.connect(POST, ELSEWHERE)
        while held(server) != {"127.0.0.1": 3, ELSEWHERE: 1}:
            await asyncio.sleep(0.01)
        for _, writer in (*unread, (None, modest)):
            writer.close()


@pytest.mark.usefixtures("silent_at_once")
async def test_idle_connections_of_who_holds_most_go_first(serving: Serving) -> None:
    async with serving(limit=8) as server:
        modest = await answers(server, ELSEWHERE)
        writers = [await answers(server, "127.0.0.1") for _ in range(20)]
        assert held(server) == {"127.0.0.1": 7, ELSEWHERE: 1}
        for writer in (modest, *writers):
            writer.close()


async def test_connections_are_the_clients_that_keys_and_proxies_name(serving: Serving) -> None:
    data = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nX-Forwarded-For: %b\r\n\r\n"
    for settings, clients in (
        (
            {"api_key": ["anna", "ben"]},
            lambda salt: {with_key(key, False, salt).name for key in (b"anna", b"ben")},
        ),
        ({"forwarded_allow_ips": ["127.0.0.1"]}, lambda _: {"1.1.1.1", "2.2.2.2"}),
    ):
        async with serving(8, **settings) as server:  # type: ignore[arg-type]
            known = [
                await server.connect(data % sent) for sent in ((b"anna", b"1.1.1.1"), (b"ben", b"2.2.2.2"))
            ]
            for reader, _ in known:
                assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
            assert set(held(server)) == clients(server.salt)
            for _, writer in known:
                writer.close()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and a client's."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    files = [str(tmp_path_factory.mktemp("tls") / name) for name in ("cert", "key")]
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    server.load_cert_chain(*files)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


@pytest.mark.usefixtures("silent_at_once")
async def test_handshakes_are_connections(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    """Those that do not end make room like silent connections, and end in time."""
    async with serving(limit=8, tls=contexts[0]) as server:
        silent = [await server.connect() for _ in range(20)]
        known = [
            await server.connect(VERSION, address, ssl=contexts[1]) for address in ("127.0.0.1", ELSEWHERE)
        ]
        for reader, _ in known:
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        assert len(server.listener) == 8
        assert all([await ended(reader) for reader, _ in silent[:14]])
        assert held(server) == {"127.0.0.1": 7, ELSEWHERE: 1}
        for _, writer in silent:
            writer.close()
        while len(server.listener) > 2:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(accepting, "HANDSHAKE_SECONDS", 0.2)
        reader, last = await server.connect()
        assert await ended(reader)
        for writer in (last, *(writer for _, writer in known)):
            writer.close()
        while len(server.listener):
            await asyncio.sleep(0.01)


async def test_a_crowd_is_accepted_a_few_at_a_time(serving: Serving) -> None:
    async with serving(200) as server:
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        turns, seen = [0], 0
        while sum(turns) < len(crowd):
            await asyncio.sleep(0)
            turns.append(len(server.listener) - seen)
            seen += turns[-1]
        assert max(turns) <= AT_ONCE
        for each in server.listener.connections:  # type: ignore[attr-defined]
            assert each.transport is not None
            system = each.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert system <= 2 * SEND_BYTES
        for each in crowd:
            each.close()


async def test_headers_come_in_time_and_are_small(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert b'"message":"the headers have more than 65536 bytes; send less' in await reader.readuntil(b"}")
        writer.close()


async def test_headers_of_all_requests_have_a_limit(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many connections with long headers take no more, and those with short ones are answered."""
    monkeypatch.setattr(connections, "ALL_HEADERS", 20_000)
    async with serving(limit=16) as server:
        head = b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + b"x: %b\r\n" % (b"y" * 7_000) * 2
        held = [await server.connect(head) for _ in range(2)]
        assert (await held[1][0].readline()).startswith(b"HTTP/1.1 431 ")
        assert b"the headers of all requests take more" in await held[1][0].readuntil(b"}")
        assert server.listener.headers < 20_000
        assert (await server.get("/health/live"))[0] == 200
        reader, writer = await server.connect(head + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        writer.close()
        held[0][1].write(b"\r\n")
        assert (await held[0][0].readline()).startswith(b"HTTP/1.1 200 ")
        await held[0][0].readuntil(b"}")
        assert server.listener.headers == 0
        reader, writer = await server.connect(head + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, each in (*held, (reader, writer)):
            each.close()


async def test_what_is_no_http_leaves_nothing_behind(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until garbage is collected, which is left out while a server has many objects."""
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "disabled", True)  # pytest keeps what is logged
    gc.collect()
    gc.disable()
    try:
        async with serving(limit=16) as server:
            reader, writer = await server.connect(b"GET / HTTP/1.1\r\nno header\r\n")
            assert b" 400 " in await reader.readline()
            writer.write(b"no header\r\n")
            await ended(reader)
            writer.close()
            while len(server.listener):
                await asyncio.sleep(0.01)
            assert not [each for each in gc.get_objects() if isinstance(each, HttpProcessingError)]
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds", [0.0, 1.0])
async def test_what_takes_long_to_parse_is_parsed_in_many_turns(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Requests one behind the other, and a body in tiny chunks that arrives at once. Nothing is lost."""
    monkeypatch.setattr(connections, "SLICE", seconds)
    sizes: list[int] = []
    parse = connections.Connection._parse

    def counted(self: connections.Connection, data: bytes) -> None:
        sizes.append(len(data))
        parse(self, data)

    monkeypatch.setattr(connections.Connection, "_parse", counted)
    async with serving(limit=16) as server:
        reader, writer = await server.connect(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 600)
        for _ in range(600):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}")
        writer.close()
        body = b'{"prompt":"' + b"word " * 8000 + b'","temperature":-1}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
        reader, writer = await server.connect(head + chunks)
        answer = await reader.readuntil(b"}}")
        assert b"HTTP/1.1 400" in answer
        assert b"temperature" in answer
        writer.close()
    assert max(sizes) <= connections.PARSED
    assert sum(sizes) == 600 * 34 + len(head) + len(chunks)


async def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.1)

    async def much(request: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    app = web.Application()
    app.router.add_get("/", much)
    runner = Runner(app, 16, shutdown_timeout=0.1)
    await runner.setup()
    await Site(runner, "127.0.0.1", 0, None, 16).start()
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
        (8192, None, 8192 - 1024 - 2 * SPARE - OWN_FILES, False),
        (1024, None, 1024 - 128 - 2 * SPARE - OWN_FILES, True),
        (1024, 100, 100, False),
        (1024, 1000, 1024 - 128 - 2 * SPARE - OWN_FILES, True),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert connection_limit(files, asked) == limit
        assert bool(caplog.records) == warned


async def test_a_client_that_leaves_as_its_stream_begins_is_no_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"prompt": "abc", "max_tokens": 3, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    first_message = sse.first_message
    async with serving(limit=16) as server:

        async def leaving(*given: Any) -> None:
            await first_message(*given)
            for connection in list(server.listener.connections):
                connection.abort()  # type: ignore[attr-defined]

        monkeypatch.setattr(sse, "first_message", leaving)
        reader, _ = await server.connect(head % len(body) + body)
        assert await ended(reader)
        await asyncio.sleep(0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_handler_that_loses_another_connection_answers_with_an_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is still there, and hears of it."""
    body = b'{"prompt": "abc", "max_tokens": 3, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"

    async def losing(*given: Any) -> None:
        raise ConnectionResetError("of somebody else")

    async with serving(limit=16) as server:
        monkeypatch.setattr(sse, "first_message", losing)
        reader, _ = await server.connect(head % len(body) + body)
        assert b" 500 " in await reader.readline()
        assert b'"code":"internal_error"' in await reader.readuntil(b"}}")


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nExpect: a-miracle\r\n", 417, b"Expect takes 100-continue alone"),
        (
            b"GET /v1/models HTTP/1.1\r\nExpect: 100-continue, more\r\n",
            100,
            b"Expect takes 100-continue alone",
        ),
        (b"GET /health HTTP/1.0\r\nExpect: a-miracle\r\n", 200, b'"ready"'),
        (b"FROB /v1/models HTTP/1.1\r\n", 400, b'"the request is no HTTP: Invalid method encountered"'),
        (b"GET / HTTP/9.9\r\n", 400, b'"code":"bad_request"'),
        (b"POST /generate HTTP/1.1\r\nContent-Length: -4\r\n", 400, b'"code":"bad_request"'),
        (
            b"GET /health HTTP/1.1\r\nX: %b\r\n" % (b"y" * 9000),
            431,
            b'"a header, or the line before them, has more than 8190 bytes; send less"',
        ),
    ],
)
async def test_what_nobody_can_answer_gets_an_error_of_ours(
    serving: Serving, request_: bytes, status: int, said: bytes
) -> None:
    async with serving(limit=16) as server:
        reader, _ = await server.connect(request_ + b"Host: x\r\n\r\n")
        assert b" %d " % status in await reader.readline()
        assert said in await reader.readuntil(b"}")

"""Connections to workers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

from sgla.errors import BadRequest
from sgla.route.wire import HEAD_END, Answer, Body
from sgla.sockets import notice_loss

HEAD_BYTES = 64 << 10  # of an answer's headers
HELD_BYTES = 64 << 10  # of an answer that wait for a client
PIECE = 256 << 10  # bytes of a body that the connection gets at a time
IDLE_SECONDS = 4.0  # servers on uvicorn close theirs after 5
IDLE = 256  # connections to a worker that are kept for later
CONNECT_SECONDS = 5.0
SWEEP = 1.0  # seconds
CLOSED = "the worker has closed the connection"


class Sink(Protocol):
    """Where an answer's body goes."""

    def write(self, data: bytes) -> None: ...


class WorkerLost(Exception):
    """The connection ended before the answer did. ``stale``: the worker closed it before any byte of that, as
    it does with idle ones."""

    def __init__(self, why: str, stale: bool = False) -> None:
        super().__init__(why)
        self.stale = stale


class Upstream(asyncio.Protocol):
    """A connection to a worker: one request at a time. ``used``: requests that it has answered.
    ``on_tunnel_pause``: told whether a WebSocket's worker reads."""

    def __init__(self, pool: Pool, url: str) -> None:
        self.url = url
        self.used = 0
        self.since = 0.0  # when it last heard from the worker, or was put back
        self.head: asyncio.Future[Answer] | None = None
        self.done: asyncio.Future[None] | None = None
        self.on_tunnel_pause: Callable[[bool], None] | None = None
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._method = ""
        self._buffer = b""
        self._body: Body | None = None
        self._sink: Sink | None = None
        self._keeps = self._waits = self._full = False
        self._rest = memoryview(b"")  # of the request, not sent yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # A worker whose threads are all busy reads a long request later; one that is gone is down by then.
        notice_loss(transport.get_extra_info("socket"), reads=False)

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def ask(self, method: str, head: bytes, body: bytes | bytearray) -> Answer:
        """Send a request; the head of its answer. The body is not copied but for a piece of it, as far as
        the worker reads. Raises WorkerLost."""
        loop = asyncio.get_running_loop()
        self.head, self.done = loop.create_future(), loop.create_future()
        self._method, self._buffer, self._body, self._sink = method, b"", None, None
        self.since = loop.time()
        if self._transport is None:
            raise WorkerLost(CLOSED, stale=True)
        self._pool.active.add(self)
        self._rest = memoryview(body)
        self._transport.write(head)
        self._send_rest()
        return await self.head

    def _send_rest(self) -> None:
        while self._rest and not self._full and self._transport is not None:
            piece, self._rest = self._rest[:PIECE], self._rest[PIECE:]
            self._transport.write(piece)

    def deliver(self, head: bytes, sink: Sink) -> asyncio.Future[None]:
        """Send ``head`` and the answer's body to ``sink``; done at its end. The future raises WorkerLost."""
        assert self._body is not None
        assert self.done is not None
        rest, self._buffer, self._sink = self._buffer, b"", sink
        end = 0 if self._body.ended else self._feed(rest)
        sink.write(head + (rest if end is None else rest[:end]))
        if end is not None:
            self._finish(end == len(rest))
        elif self._transport is not None:
            self.pause(self._waits)
        elif self._body.until_close:
            self._finish(False)
        else:
            self._lose(CLOSED)
        return self.done

    def tunnel(self, data: bytes) -> None:
        """What a client sends over a WebSocket."""
        if self._transport is not None:
            self._transport.write(data)

    def pause(self, whether: bool) -> None:
        """Whether the client reads no more for now."""
        self._waits = whether
        if self._transport is not None:
            (self._transport.pause_reading if whether else self._transport.resume_reading)()

    def release(self) -> None:
        """It is needed no more: keep it for another request, or close it if the answer has not ended."""
        self._pool.active.discard(self)
        ended = self.done is not None and self.done.done() and not self.done.cancelled()
        if ended and self._keeps and not self.closed and not self._rest:
            self.pause(False)  # the client may have the end of its answer before it
            self._pool.put(self)
        else:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str) -> None:
        """Give the worker up."""
        self._lose(why)
        self.abort()

    def data_received(self, data: bytes) -> None:
        self.since = asyncio.get_running_loop().time()
        if self.done is None or self.done.done():
            self.abort()  # nobody has asked for it
        elif self._sink is not None:
            end = self._feed(data)
            self._sink.write(data if end is None else data[:end])
            if end is not None:
                self._finish(end == len(data))
        else:
            self._buffer += data
            if self._body is None:
                self._read_head()
            if len(self._buffer) > HELD_BYTES and self._transport is not None and self._body is not None:
                self._transport.pause_reading()

    def _read_head(self) -> None:
        end = self._buffer.find(HEAD_END)
        while end >= 0:
            try:
                answer = Answer(self._buffer[:end], self._method)
            except BadRequest as error:
                self.fail(f"the worker's answer cannot be read: {error.message}")
                return
            self._buffer = self._buffer[end + len(HEAD_END) :]
            if answer.status >= 200 or answer.status == 101:
                self._keeps = answer.keeps and answer.status != 101
                self._body = Body(-1 if answer.status == 101 else answer.size)
                if self.head is not None and not self.head.done():
                    self.head.set_result(answer)
                return
            end = self._buffer.find(HEAD_END)
        if len(self._buffer) > HEAD_BYTES:
            self.fail("the headers of the worker's answer are too long")

    def _feed(self, data: bytes) -> int | None:
        assert self._body is not None
        try:
            return self._body.feed(data)
        except BadRequest as error:
            self.fail(f"the worker's answer cannot be read: {error.message}")
            return None

    def _finish(self, clean: bool) -> None:
        self._keeps = self._keeps and clean
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def _lose(self, why: str, stale: bool = False) -> None:
        for future in (self.head, self.done):
            if future is not None and not future.done():
                future.set_exception(WorkerLost(why, stale))
                future.exception()  # somebody may have stopped waiting

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._rest = None, memoryview(b"")
        self._pool.forget(self)
        if self._body is not None and self._body.until_close and self._sink is not None and exc is None:
            self._finish(False)
        elif self._body is None or self._sink is not None:
            self._lose(str(exc) if exc else CLOSED, stale=self._body is None and not self._buffer)

    def pause_writing(self) -> None:
        self._full = True
        if self.on_tunnel_pause is not None:
            self.on_tunnel_pause(True)

    def resume_writing(self) -> None:
        self._full = False
        self._send_rest()
        if self.on_tunnel_pause is not None:
            self.on_tunnel_pause(False)


class Pool:
    """Connections to all workers: ``active`` ones, and idle ones that were used last."""

    def __init__(self, silence: float) -> None:
        """``silence``: seconds that a worker may send nothing of an answer."""
        self.active: set[Upstream] = set()
        self._idle: dict[str, list[Upstream]] = {}
        self._silence = silence
        self._tls: ssl.SSLContext | None = None

    async def take(self, url: str, fresh: bool) -> Upstream:
        """A connection; a new one if it has to be ``fresh``, or there is no other. Raises OSError."""
        idle = self._idle.get(url)
        while idle and not fresh:
            upstream = idle.pop()
            if not upstream.closed:
                upstream.used += 1
                return upstream
        parts = urlsplit(url)
        if parts.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        connecting = asyncio.get_running_loop().create_connection(
            lambda: Upstream(self, url),
            parts.hostname or "",
            parts.port or (443 if parts.scheme == "https" else 80),
            ssl=self._tls if parts.scheme == "https" else None,
        )
        _, made = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        return made

    def put(self, upstream: Upstream) -> None:
        idle = self._idle.setdefault(upstream.url, [])
        if len(idle) >= IDLE:
            upstream.abort()
            return
        upstream.since = asyncio.get_running_loop().time()
        idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        self.active.discard(upstream)
        idle = self._idle.get(upstream.url, [])
        if upstream in idle:
            idle.remove(upstream)

    def down(self, url: str, lost: bool = False) -> None:
        """Give up the answers of a worker that have not begun, and what is idle; of one that is ``lost`` all
        answers."""
        for upstream in [each for each in self.active if each.url == url]:
            if lost or (upstream.head is not None and not upstream.head.done()):
                upstream.fail("the worker is lost" if lost else "the worker is down")
        for upstream in self._idle.pop(url, []):
            upstream.abort()

    async def sweep(self) -> None:
        """Close what has been idle, or silent, for too long; for as long as it is not cancelled."""
        while True:
            await asyncio.sleep(SWEEP)
            now = asyncio.get_running_loop().time()
            for upstream in [each for each in self.active if now > each.since + self._silence]:
                upstream.fail(f"the worker has sent nothing for {self._silence:.0f} s")
            for idle in list(self._idle.values()):
                for upstream in [each for each in idle if now > each.since + IDLE_SECONDS]:
                    upstream.abort()

    def close(self) -> None:
        for upstream in [*self.active, *(each for idle in self._idle.values() for each in idle)]:
            upstream.abort()

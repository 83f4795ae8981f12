"""Connections: how many there may be, what they may keep waiting, and how the server listens."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from aiohttp import web

from sgla.errors import Overloaded

log = logging.getLogger(__name__)

HEADER_SECONDS = 30  # that a new connection has for its first request's header
IDLE_SECONDS = 75  # between requests, a header included; proxies commonly end theirs after 60
UNREAD_SECONDS = 120  # that a client may read nothing of an answer
# That the rest of a refused body is read, and thrown away, so that the client sees the answer; and that a client
# has to read an answer on a spare connection, or the last one where its place is wanted.
LINGER_SECONDS = 5
HEADER_BYTES = 64 << 10  # of all headers of a request
READ_BYTES = 64 << 10  # of a body that are kept for a handler that does not read, about

OWN_FILES = 128  # descriptors for all that is no client
MOST_FILES = (
    1 << 20
)  # asked of the system; some systems allow a billion, and programs that are started close them all
MOST_CONNECTIONS = 16384
SPARE = 64  # connections more than there may be, for health and metrics
BACKLOG = 1024  # connections that the system takes before the server does; they come all at once

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def raise_file_limit() -> int:
    """How many files the process may have open, after it has asked for as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connection_limit(files: int, asked: int | None) -> int:
    """Connections that ``files`` descriptors are enough for, at most ``asked``. A backlog may come at once."""
    room = max(1, files - OWN_FILES - SPARE - backlog(files))
    wanted = MOST_CONNECTIONS if asked is None else asked
    if room < (wanted if asked is not None else min(wanted, 4096)):
        log.warning(
            "the process may have %d files open, which is enough for %d connections; raise the limit (ulimit -Hn)",
            files,
            room,
        )
    return min(room, wanted)


def backlog(files: int) -> int:
    return max(16, min(BACKLOG, files // 8))


class Connection(web.RequestHandler):
    """One client's. ``spare``: it was opened beyond the limit, and gets one answer, about health or metrics."""

    __slots__ = ("_head", "_timers", "lingering", "listener", "spare")

    def __init__(self, listener: Listener) -> None:
        super().__init__(
            listener,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGER_SECONDS,
            read_bufsize=READ_BYTES,
            auto_decompress=False,  # Share.read does that
        )
        # Of requests that wait behind another one on the same connection no more are read than came with it.
        self._max_msg_queue_size, self._msg_queue_resume_size = 2, 1
        self._head = 0  # bytes of a header that is not complete
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.listener = listener
        self.lingering = False  # it has its last answer, and owes the rest of a body that nobody wants
        self.spare = False

    @property
    def idle(self) -> bool:
        """Whether it waits for the header of a request."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def silent(self) -> bool:
        """Whether no request has come yet."""
        return self._request_count == 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.listener.opened(self)
        seconds = HEADER_SECONDS / 6 if self.spare else HEADER_SECONDS
        self._timers["header"] = self._loop.call_later(seconds, self._greeted)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self.listener.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head = self._head + len(data) if self.idle else 0
        if self._head > HEADER_BYTES and self.transport is not None:
            self.transport.write(TOO_LARGE)
            self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self.spare and self.transport is not None:
            self._timers["answer"] = self._loop.call_later(LINGER_SECONDS, self.transport.abort)
        result = await super().finish_response(request, resp, start_time)
        self.lingering = not request.content.is_eof()
        return result

    def make_room(self) -> None:
        """Close it for another one: a spare one at once, else as soon as the client has read what was sent."""
        transport = self.transport
        if transport is None:
            return
        if self.spare:
            transport.abort()
        self.force_close()
        self._timers["last"] = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._timers.pop("unread").cancel()

    def _greeted(self) -> None:
        if self.silent:
            self.force_close()

    def _watch_unread(self, before: int | None = None) -> None:
        """Drop a client that has read nothing since there were ``before`` bytes for it."""
        transport = self.transport
        if transport is None:
            return
        unread = transport.get_write_buffer_size()
        if before is not None and unread >= before:
            log.warning("a connection is dropped: the client has read nothing for %d s", UNREAD_SECONDS)
            transport.abort()
            return
        self._timers["unread"] = self._loop.call_later(UNREAD_SECONDS, self._watch_unread, unread)


class Listener(web.Server):
    """Makes connections. At most ``limit`` stay open, besides ``SPARE`` for health and metrics."""

    def __init__(self, server: web.Server, limit: int) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self.limit = limit
        self._places: dict[Connection, None] = {}  # the oldest first
        self._spare: dict[Connection, None] = {}
        self._all_busy_until = 0.0

    def __call__(self) -> Connection:
        return Connection(self)

    def __len__(self) -> int:
        return len(self._places) + len(self._spare)

    @property
    def full(self) -> bool:
        return len(self._places) >= self.limit

    def opened(self, connection: Connection) -> None:
        """Find a place: a free one, that of idle connections, or a spare one, if need be that of the oldest."""
        if self.full:
            self._close_idle()
        connection.spare = self.full
        if not connection.spare:
            self._places[connection] = None
            return
        if len(self._spare) >= SPARE:
            oldest = min(self._spare, key=lambda spare: not spare.lingering)
            del self._spare[oldest]
            oldest.make_room()
        self._spare[connection] = None

    def closed(self, connection: Connection) -> None:
        self._places.pop(connection, None)
        self._spare.pop(connection, None)

    def _close_idle(self) -> None:
        """Close a sixteenth of those that wait for a request or linger: looking takes a while.

        Those go first that never had a request, and those last that linger: they may not have seen their answer.
        """
        now = asyncio.get_running_loop().time()
        if now < self._all_busy_until:
            return
        idle = [connection for connection in self._places if connection.idle or connection.lingering]
        idle.sort(key=lambda connection: (connection.lingering, not connection.silent))
        for connection in idle[: max(1, self.limit // 16)]:
            del self._places[connection]
            connection.make_room()
        if not idle:
            self._all_busy_until = now + 0.1


def is_spare(request: web.Request) -> bool:
    return isinstance(request.protocol, Connection) and request.protocol.spare


def check_spare(request: web.Request, may: bool) -> None:
    """Raise Overloaded on a connection beyond the limit, unless the route is one of those that ``may`` use it."""
    connection = request.protocol
    if isinstance(connection, Connection) and connection.spare and not may:
        raise Overloaded(
            f"{connection.listener.limit} connections are open, which is the limit; retry later or raise --max-connections",
            retry_after=1.0,
        )


class Runner(web.AppRunner):
    """An application behind a Listener."""

    __slots__ = ("_limit",)

    def __init__(self, app: web.Application, limit: int = MOST_CONNECTIONS, **kwargs: Any) -> None:
        """A client's hang-up cancels its handler: that is how it reaches the engine."""
        super().__init__(app, handler_cancellation=True, **kwargs)
        self._limit = limit

    async def _make_server(self) -> web.Server:
        return Listener(await super()._make_server(), self._limit)

"""Connections: how many there may be, how clients share them,
and what they may keep waiting."""

from __future__ import annotations

import asyncio
import heapq
import logging
import resource
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from sgla import clock
from sgla.errors import BadRequest, Overloaded, SglaError
from sgla.http.bodies import SHARE
from sgla.http.clients import without_key
from sgla.http.errors import error_body, error_response
from sgla.http.turns import SLICE

log = logging.getLogger(__name__)

HEADER_SECONDS = 30  # that a new connection has for its first request's header
NEW_SECONDS = 0.25  # that a new connection without a request is not taken for an idle one
IDLE_SECONDS = 75  # between requests, a header included; proxies commonly end theirs after 60
UNREAD_SECONDS = 120  # that a client may read nothing of an answer
# That the rest of a refused body is read, and thrown away, so that the client sees the answer; and that a
# client has to read an answer on a spare connection, or the last one where its place is wanted.
LINGER_SECONDS = 5
PATIENCE = 5.0  # seconds for which a client may keep a connection waiting that others want
HEADER_BYTES = 64 << 10  # of all headers of a request
# Of the headers of all requests, beyond which one has at most so many.
ALL_HEADERS, FEW_HEADERS = 64 << 20, 8 << 10
READ_BYTES = 64 << 10  # of a body that are kept for a handler that does not read, about
PARSED = 16 << 10  # bytes that are parsed in one go

OWN_FILES = 128  # descriptors for all that is no client
# Asked of the system; some systems allow a billion, and programs that are started close them all.
MOST_FILES = 1 << 20
MOST_CONNECTIONS = 16384
# Connections beyond the limit, for health and metrics; and as many more that are on their way out.
SPARE = 64
LOOKED_AT = 4  # clients of which a place may be taken, those that have most
BACKLOG = 1024  # connections that the system takes before the server does; they come all at once

TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s"
)


def raise_file_limit() -> int:
    """How many files the process may have open, after it has asked for as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def connection_limit(files: int, asked: int | None) -> int:
    """Connections that ``files`` descriptors are enough for, at most ``asked``.
    A backlog may come at once."""
    room = max(1, files - OWN_FILES - 2 * SPARE - backlog(files))
    wanted = MOST_CONNECTIONS if asked is None else asked
    if room < (wanted if asked is not None else min(wanted, 4096)):
        log.warning(
            "the process may have %d files open, which is enough for %d "
            "connections; raise the limit (ulimit -Hn)",
            files,
            room,
        )
    return min(room, wanted)


def backlog(files: int) -> int:
    return max(16, min(BACKLOG, files // 8))


class Connection(web.RequestHandler):
    """``client``: the name of its client: by the address until a request has come. ``spare``: it was opened
    beyond the limit, and gets one answer, about health or metrics. ``handshake``: the task that does that of
    TLS, until it is done.
    """

    __slots__ = (
        "_handler",
        "_head",
        "_headers",
        "_later",
        "_parsing",
        "_request_began",
        "_rest",
        "_resting",
        "_since",
        "_timers",
        "_unread",
        "_unreadable",
        "client",
        "gives_way",
        "handshake",
        "lingering",
        "listener",
        "spare",
    )

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
        self._headers = 0  # bytes that count as headers
        self._rest = b""  # of what came, and is parsed later
        self._later: asyncio.Handle | None = None
        self._parsing = 0.0  # seconds that were spent on it since others last had the loop
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._handler: asyncio.Task[Any] | None = None  # of a request, until its answer begins
        self._request_began = 0.0
        self._since = 0.0  # when the connection was accepted
        self._resting: float | None = None  # since when nothing is made for the client of a WebSocket
        self._unread: float | None = None  # since when the client reads less than there is for it
        self._unreadable = False  # what came is no HTTP: no more of it is looked at
        self.client = ""
        self.gives_way = False  # its request is refused, because another client needs the place
        self.handshake: asyncio.Task[None] | None = None
        self.listener = listener
        self.lingering = False  # it has its last answer, and owes the rest of a body that nobody wants
        self.spare = False

    @property
    def idle(self) -> bool:
        """Whether it waits for the header of a request, or for a handshake."""
        return self.handshake is not None or (self._waiter is not None and not self._waiter.done())

    @property
    def unanswered(self) -> bool:
        return self._handler is not None

    @property
    def waits(self) -> bool:
        """Whether its client has long kept it waiting:
        for a body or an event, or by reading nothing of an answer."""
        since = self._resting if self._unread is None else self._unread
        if since is None and self._current_request is not None and not self._current_request.content.is_eof():
            since = self._request_began
        return since is not None and self._loop.time() > since + PATIENCE

    @property
    def silent(self) -> bool:
        """Whether no request has come yet."""
        return self._request_count == 0

    @property
    def new(self) -> bool:
        """Whether its first request may be on its way."""
        return self.silent and self._loop.time() < self._since + NEW_SECONDS

    def accepted(self, address: str) -> None:
        self._since = self._loop.time()
        self.client = without_key(address).name
        self.listener.opened(self)
        seconds = HEADER_SECONDS / 6 if self.spare else HEADER_SECONDS
        self._timers["header"] = self._loop.call_later(seconds, self._greeted)

    def gone(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._count(0)
        self.listener.closed(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.handshake is None:
            peer = transport.get_extra_info("peername")
            self.accepted(str(peer[0]) if peer else "")
        self.handshake = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._rest = b""
        self.gone()
        super().connection_lost(exc)

    def request_begins(self, client: str, headers: int) -> None:
        """A request of ``client`` has come, with so many bytes of ``headers``; the running task handles it.
        Raises Overloaded."""
        self._handler, self._request_began = asyncio.current_task(), self._loop.time()
        self.listener.set_client(self, client)
        self._count(headers)
        if self._has_too_many():
            raise Overloaded(
                f"the headers of all requests take more than {ALL_HEADERS >> 20} MiB; retry later, or with "
                f"{FEW_HEADERS >> 10} KiB of them at most",
                retry_after=1.0,
            )

    def _count(self, headers: int) -> None:
        if self.transport is None:
            headers = 0
        self.listener.headers += headers - self._headers
        self._headers = headers

    def _has_too_many(self) -> bool:
        return self._headers > FEW_HEADERS and self.listener.headers > ALL_HEADERS

    def answer_begins(self) -> None:
        """The headers of the answer are about to be sent: the request can be refused no longer."""
        self._handler = None

    def data_received(self, data: bytes) -> None:
        """A turn of the loop may bring 8 MiB, a million frames or chunks: what takes long to parse is left to
        later turns."""
        if self._unreadable:
            return
        if not self._rest and len(data) <= PARSED:
            self._parse(data)
            if self._parsing > SLICE:
                self._parse_later()
        elif data:
            self._rest += data
            if self._later is None:
                self._parse_rest()
        else:  # what the parser has kept is to be parsed
            super().data_received(data)

    def _parse(self, data: bytes) -> None:
        began = clock.now()
        super().data_received(data)
        self._parsing += clock.now() - began
        error = getattr(self._messages[-1][0], "exc", None) if self._messages else None
        if error is not None:  # it refers to itself by its traceback, which keeps the data
            error.__traceback__ = None
            self._unreadable, self._rest = True, b""
        self._head = self._head + len(data) if self.idle or self.silent else 0
        if self._head:
            self._count(self._head)
        if self._head and (self._head > HEADER_BYTES or self._has_too_many()) and self.transport is not None:
            what = f"the headers have more than {HEADER_BYTES} bytes"
            if self._head <= HEADER_BYTES:
                what = f"the headers of all requests take more than {ALL_HEADERS >> 20} MiB"
            body = msgspec.json.encode(error_body(_too_large(what)))
            self.transport.write(TOO_LARGE % (len(body), body))
            self.force_close()

    def _parse_rest(self) -> None:
        """As much of it as does not take long, while aiohttp wants it."""
        self._later = None
        while self._rest and not (self._reading_paused or self._buffer_paused) and self._parsing <= SLICE:
            piece, self._rest = self._rest[:PARSED], self._rest[PARSED:]
            self._parse(piece)
        if self._reading_paused or self._buffer_paused:
            self._pause_transport_reading()
        elif self._rest or self._parsing > SLICE:
            self._parse_later()
        else:
            super()._resume_transport_reading()

    def _parse_later(self) -> None:
        self._parsing = 0.0
        self._pause_transport_reading()
        if self._later is None:
            self._later = self._loop.call_soon(self._parse_rest)

    def _resume_transport_reading(self) -> None:
        if self._rest:
            self._parse_later()
        else:
            super()._resume_transport_reading()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self.spare and self.transport is not None:
            self._timers["answer"] = self._loop.call_later(LINGER_SECONDS, self.transport.abort)
        try:
            result = await super().finish_response(request, resp, start_time)
        finally:
            if SHARE in request:
                request[SHARE].close()
        self._handler = None
        self._count(0)
        self.lingering = not request.content.is_eof()
        return result

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError) and has_gone(request):  # before its answer began: nothing to log
            raise exc
        super().handle_error(request, status, exc, message)
        answer = error_response(_why_unreadable(status, exc, message or ""))
        answer.force_close()
        return answer

    def set_resting(self, whether: bool) -> None:
        self._resting = self._loop.time() if whether else None

    def make_room(self) -> None:
        """Close it for another one:
        a spare one at once, else as soon as the client has read what was sent."""
        transport = self.transport
        if self.handshake is not None:
            self.handshake.cancel()
        if transport is None:
            return
        if self.spare:
            transport.abort()
        self.force_close()
        self._timers["last"] = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def give_way(self) -> None:
        """Close it for another client: its request is refused, unless the answer has begun."""
        transport = self.transport
        if transport is None:
            return
        if self._handler is None:
            transport.abort()
            return
        self.gives_way = True
        self._handler.cancel()
        self._timers["last"] = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._loop.time()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = None
        self._timers.pop("unread").cancel()

    def _greeted(self) -> None:
        if self.handshake is not None:
            self.handshake.cancel()
        elif self.silent:
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
    """Makes connections. At most ``limit`` stay open, handshakes of TLS among them, besides ``SPARE`` for
    health and metrics and ``SPARE`` that have to go."""

    def __init__(self, server: web.Server, limit: int) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self.limit = limit
        self.headers = 0  # bytes of those of all requests
        self._places: dict[Connection, None] = {}  # the oldest first
        self._shares: dict[str, dict[Connection, None]] = {}  # of these, by client
        self._spare: dict[Connection, None] = {}
        self._leaving: dict[Connection, None] = {}
        self._all_busy_until = 0.0

    def __call__(self) -> Connection:
        return Connection(self)

    def __len__(self) -> int:
        return len(self._places) + len(self._spare)

    @property
    def full(self) -> bool:
        return len(self._places) >= self.limit

    def opened(self, connection: Connection) -> None:
        """Find a place: a free one, that of idle connections, that of a client that has more, or a spare one,
        if need be that of the oldest."""
        if self.full:
            self._close_idle()
        if self.full:
            self._take_from_others(connection.client)
        connection.spare = self.full
        if not connection.spare:
            self._places[connection] = None
            self._shares.setdefault(connection.client, {})[connection] = None
            return
        if len(self._spare) >= SPARE:
            oldest = min(self._spare, key=lambda spare: not spare.lingering)
            del self._spare[oldest]
            oldest.make_room()
        self._spare[connection] = None

    def closed(self, connection: Connection) -> None:
        self._drop(connection)
        self._spare.pop(connection, None)
        self._leaving.pop(connection, None)

    def set_client(self, connection: Connection, client: str) -> None:
        if connection.client == client:
            return
        if connection in self._places:
            self._drop(connection)
            self._places[connection] = None
            self._shares.setdefault(client, {})[connection] = None
        connection.client = client

    def _drop(self, connection: Connection) -> None:
        if connection in self._places:
            del self._places[connection]
            share = self._shares[connection.client]
            del share[connection]
            if not share:
                del self._shares[connection.client]

    def _leave(self, connection: Connection) -> None:
        """Its place is free; what it still sends and gets is bounded in time, and there are few such."""
        self._drop(connection)
        if len(self._leaving) >= SPARE:
            oldest = next(iter(self._leaving))
            del self._leaving[oldest]
            oldest.abort()
        self._leaving[connection] = None

    def _take_from_others(self, client: str) -> None:
        """Have a connection of a client that has more than this one make room: the oldest that its client
        keeps waiting, or the newest whose answer has not begun."""
        enough = len(self._shares.get(client, ())) + 1
        for share in heapq.nlargest(LOOKED_AT, self._shares.values(), key=len):
            if len(share) <= enough:
                return
            found = next((each for each in share if each.waits), None)
            found = found or next((each for each in reversed(share) if each.unanswered), None)
            if found is not None:
                self._leave(found)
                found.give_way()
                return

    def _close_idle(self) -> None:
        """Close a sixteenth of those that wait for a request, unless they are new, or linger:
        looking takes a while.

        Those of the client that has most go first; of one client's those that never had a request, and last
        those that linger: they may not have seen their answer.
        """
        now = asyncio.get_running_loop().time()
        if now < self._all_busy_until:
            return
        idle = [each for each in self._places if each.lingering or (each.idle and not each.new)]
        held = {client: len(share) for client, share in self._shares.items()}
        idle.sort(key=lambda each: (-held[each.client], each.lingering, not each.silent))
        for connection in idle[: max(1, self.limit // 16)]:
            self._leave(connection)
            connection.make_room()
        if not idle:
            self._all_busy_until = now + 0.1


def request_begins(request: web.Request, client: str) -> None:
    """Tell the request's connection that the running task handles a request of ``client`` now. Raises
    Overloaded."""
    if isinstance(request.protocol, Connection):
        headers = sum(len(name) + len(value) for name, value in request.raw_headers)
        request.protocol.request_begins(client, headers)


async def answer_begins(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the request's connection that its answer begins. For ``on_response_prepare``."""
    if isinstance(request.protocol, Connection):
        request.protocol.answer_begins()


def set_resting(request: web.Request, whether: bool) -> None:
    """Whether nothing is made for the client of a WebSocket:
    if it has more connections than others, it may have to give this one away."""
    if isinstance(request.protocol, Connection):
        request.protocol.set_resting(whether)


def _why_unreadable(status: int, exc: BaseException | None, message: str) -> SglaError:
    """Why aiohttp could not read a request."""
    if isinstance(exc, LineTooLong):
        return _too_large(f"a header, or the line before them, has more than {exc.args[1]} bytes")
    if "Too many headers" in message:
        return _too_large("there are too many headers")
    why, _, _ = message.partition("\n\n")  # what comes then is quoted
    error: SglaError = BadRequest(f"the request is no HTTP: {' '.join(why.split()).rstrip(':')}")
    if status >= 500:
        error = SglaError("internal error; the server's log has the details")
    error.status = status
    return error


def _too_large(what: str) -> BadRequest:
    error = BadRequest(f"{what}; send less")
    error.status = 431
    return error


def has_gone(request: web.BaseRequest) -> bool:
    """Whether its client is there no longer."""
    return request.transport is None or request.transport.is_closing()


def is_last(request: web.Request) -> bool:
    """Whether the connection ends with this request."""
    connection = request.protocol
    return isinstance(connection, Connection) and (connection.spare or connection.gives_way)


def why_cancelled(request: web.Request) -> Overloaded | None:
    """Why the request's handler was cancelled, if it was for another client."""
    connection = request.protocol
    if not isinstance(connection, Connection) or not connection.gives_way:
        return None
    return Overloaded(
        f"{connection.listener.limit} connections are open, which is the limit, and most of them are yours: "
        "this one makes room for another client; retry later or raise --max-connections",
        retry_after=1.0,
    )


def check_spare(request: web.Request, may: bool) -> None:
    """Raise Overloaded on a connection beyond the limit,
    unless the route is one of those that ``may`` use it."""
    connection = request.protocol
    if isinstance(connection, Connection) and connection.spare and not may:
        raise Overloaded(
            f"{connection.listener.limit} connections are open, which is the "
            "limit; retry later or raise --max-connections",
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

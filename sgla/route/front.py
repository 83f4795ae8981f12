"""Connections of clients: bytes in, requests out, answers back. One ``Front`` a process."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from sgla.errors import BadRequest, Forbidden, NotReady, Overloaded, SglaError, TooLarge, Unauthorized
from sgla.http.clients import Proxies, without_key
from sgla.http.connections import connection_limit, raise_file_limit
from sgla.http.ids import random_id
from sgla.route import routes
from sgla.route.config import RouteConfig
from sgla.route.errors import ENDS, error_reply
from sgla.route.exchange import SAFE_ID, Exchange, key_of
from sgla.route.owner import Owner
from sgla.route.places import Places
from sgla.route.reply import Reply
from sgla.route.upstream import Pool, Upstream
from sgla.route.wire import CHUNKED, HEAD_END, Chunks, Request

log = logging.getLogger(__name__)

HEADER_BYTES = 64 << 10  # of all headers of a request
SMALL = 64 << 10  # bytes of a body that any client may send
OPEN_BODY = 4 << 10  # bytes of a body where the others need a key
READ_BYTES = 64 << 10  # of a request that waits behind another one
# Of all headers, and of all requests that wait so, beyond which one has at most so many.
ALL_BYTES, FEW_BYTES = 64 << 20, 8 << 10
HEADER_SECONDS = 30.0  # for a request to come, and more for its body by
BODY_RATE = 16 << 10  # bytes a second
IDLE_SECONDS = 75.0  # between requests
UNREAD_SECONDS = 120.0  # that a client may read nothing of an answer
LINGER_SECONDS = 5.0  # that the rest of a refused body is read, so that the client sees the answer
HANDSHAKE_SECONDS = 10.0  # of TLS
END_SECONDS = 0.5  # that clients have to take their last bytes
SWEEP = 1.0  # seconds
SEND_BYTES = 256 << 10  # that the system may hold of an answer for a client that does not read


def among(key: bytes, known: Sequence[bytes]) -> bool:
    """Compared in constant time with all of them."""
    return sum(hmac.compare_digest(key, each) for each in known) > 0


class BodyMemory:
    """What the bodies of all requests take."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._of_client: Counter[str] = Counter()

    def take(self, size: int, client: str, held: int) -> None:
        """``held``: what the request already has. Raises Overloaded."""
        others = self._of_client[client] - held  # the client's other requests
        if others and held + size > SMALL and others + held + size > self._limit // 2:
            raise Overloaded(
                f"the bodies of your requests would take more than {self._limit // 2} bytes, the half of "
                "--request-memory-bytes that one client may have; retry later",
                retry_after=1.0,
            )
        if self._taken + size > self._limit:
            raise Overloaded(
                "the bodies of all requests together are too large now; retry later, or raise "
                "--request-memory-bytes",
                retry_after=1.0,
            )
        self._taken += size
        self._of_client[client] += size

    def give(self, size: int, client: str) -> None:
        self._taken -= size
        self._of_client[client] -= size
        if not self._of_client[client]:
            del self._of_client[client]


class Front:
    """``share``: the part of the settings' limits that this process has, one in so many."""

    def __init__(self, config: RouteConfig, owner: Owner, share: int = 1) -> None:
        self.config, self.owner = config, owner
        self.pool = Pool(config.request_timeout_secs)
        self.memory = BodyMemory(max(config.max_body_bytes, config.request_memory_bytes // share))
        # A request has a second descriptor, of the connection to its worker.
        most = connection_limit(raise_file_limit() // 2, max(1, config.max_connections // share))
        self.places = Places(most)
        self.connections: set[Connection] = set()
        self.buffered = 0  # bytes of them that are not taken for a request yet
        self.draining = False
        self._proxies = Proxies(config.forwarded_allow_ips)
        self._keys = [key.encode() for key in (*config.api_key, *config.admin_api_key)]
        self._admins = [key.encode() for key in config.admin_api_key]
        self._servers: list[asyncio.Server] = []
        self._sweeping = [asyncio.ensure_future(self._sweep()), asyncio.ensure_future(self.pool.sweep())]
        owner.on_down = self.pool.down

    async def listen(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)  # accepted ones, too
            seconds = HANDSHAKE_SECONDS if tls else None
            server = await loop.create_server(
                lambda: Connection(self), sock=each, ssl=tls, ssl_handshake_timeout=seconds, backlog=1024
            )
            self._servers.append(server)

    async def drain(self) -> None:
        """Take nothing new; return when the last answer has been given."""
        self.draining = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.leave()
        while self.connections:
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        """Tell all clients that it is over, and close."""
        self.draining = True
        for connection in list(self.connections):
            connection.end()
        loop = asyncio.get_running_loop()
        until = loop.time() + END_SECONDS
        while self.connections and loop.time() < until:
            await asyncio.sleep(0.02)
        self.close()

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._sweeping:
            task.cancel()
        for connection in list(self.connections):
            connection.abort()
        self.pool.close()

    def check(self, request: Request, path: str) -> None:
        """Raise Unauthorized or Forbidden unless the request's key may do this."""
        if routes.for_admins(path):
            if not self._admins:
                raise Forbidden(
                    "who adds workers sees all prompts; start the router with --admin-api-key to do so"
                )
            known = self._admins
        elif self.config.api_key and not routes.is_open(request.method, path):
            known = self._keys
        else:
            return
        key = key_of(request)
        if not key:
            raise Unauthorized("no API key was given; send the header 'Authorization: Bearer KEY'")
        if not among(key, known):
            if known is self._admins and among(key, self._keys):
                raise Forbidden("workers are added and removed with an admin key")
            raise Unauthorized("the API key is wrong")

    def payer_of(self, request: Request, peer: str) -> str:
        """Whose limits and turns it takes: a digest of the key, or the address."""
        key = key_of(request)
        if key:
            return hashlib.blake2s(key, digest_size=12).hexdigest()
        return without_key(self._proxies.address(peer, request.text(b"x-forwarded-for"))).name

    def client_of(self, request: Request, peer: str) -> str:
        """``payer_of``, but by keys alone that have been checked."""
        if self.config.api_key:
            return self.payer_of(request, peer)
        return without_key(self._proxies.address(peer, request.text(b"x-forwarded-for"))).name

    def most_of(self, request: Request, path: str) -> int:
        """Bytes of its body."""
        free = bool(self.config.api_key) and routes.is_open(request.method, path)
        return min(OPEN_BODY, self.config.max_body_bytes) if free else self.config.max_body_bytes

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                connection.look(now)


class Connection(asyncio.Protocol):
    """One client's connection: a request is answered before the next one is read. ``since``: when it began to
    wait for what it waits for."""

    def __init__(self, front: Front) -> None:
        self.started = False
        self.address = self._client = ""
        self._front = front
        self._most = 0  # bytes of the body
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._counted = 0  # bytes of it
        self._request: Request | None = None
        self._body = bytearray()
        self._left = 0  # bytes of the body
        self._chunks: Chunks | None = None
        self._taken = 0  # of the front's memory
        self._task: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._tunnel: Upstream | None = None
        self._since = self._loop.time()
        self._unread: float | None = None
        self._lingers = self._spare = False
        self._last = b""  # piece of the answer
        self._served = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._spare = self._front.places.open(self, without_key(self.address).name)
        self._front.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._front.connections.discard(self)
        self._front.places.close(self)
        if self._task is not None:
            self._task.cancel()  # before it has begun, perhaps: then it gives nothing back
        self._give_memory()
        self._buffer = b""
        self._count()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """Close it if no request is on it; else it closes behind that one."""
        if self._task is None and self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """``leave``, and end the request that is on it with an error."""
        if self._task is not None:
            self._task.cancel()
        self.leave()

    def look(self, now: float) -> None:
        """Close it if its client keeps it waiting for too long."""
        if self._unread is not None:
            if now > self._unread + UNREAD_SECONDS:
                log.warning("a connection is dropped: the client has read nothing for %d s", UNREAD_SECONDS)
                self.abort()
        elif self._task is None:
            idle = self._served and not self._buffer and self._request is None and not self._lingers
            coming = HEADER_SECONDS + len(self._body) / BODY_RATE
            if now > self._since + (LINGER_SECONDS if self._lingers else IDLE_SECONDS if idle else coming):
                self.abort()

    # what comes

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        if self._tunnel is not None:
            self._tunnel.tunnel(data)
            return
        if not self._buffer and self._request is None:
            self._since = self._loop.time()
        self._buffer += data
        if self._task is None and self._unread is None:
            self._read()
        elif len(self._buffer) > READ_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._count()

    def _count(self) -> None:
        """What is buffered, and refuse it where all have too much of that."""
        self._front.buffered += len(self._buffer) - self._counted
        self._counted = len(self._buffer)
        if self._counted <= FEW_BYTES or self._front.buffered <= ALL_BYTES:
            return
        if self._task is not None:
            self.abort()
            return
        error = BadRequest(
            f"the headers of all requests take more than {ALL_BYTES >> 20} MiB; retry later, or with "
            f"{FEW_BYTES >> 10} KiB of them at most"
        )
        error.status = 431
        self._refuse(error)
        self._count()

    def _read(self) -> None:
        """Take in what has come of a request, and have it answered when it is complete."""
        try:
            if self._request is None and not self._read_head():
                return
            if not self._read_body():
                return
            self._take_place()
        except SglaError as error:
            self._refuse(error)
            return
        self._task = self._loop.create_task(self._serve())

    def _take_place(self) -> None:
        """For the request that has come. Raises Overloaded."""
        request = self._request
        assert request is not None
        client = "" if request.path in routes.OPEN else self._front.client_of(request, self.address)
        self._front.places.busy(self, client)

    def _read_head(self) -> bool:
        if not self._buffer:
            return False
        if self._buffer.startswith(b"\r\n"):  # some clients send one behind a body
            self._buffer = self._buffer[2:]
        end = self._buffer.find(HEAD_END, 0, HEADER_BYTES + len(HEAD_END))
        if end < 0:
            if len(self._buffer) > HEADER_BYTES:
                error = BadRequest(f"the headers have more than {HEADER_BYTES} bytes")
                error.status = 431
                raise error
            return False
        request = Request(self._buffer[:end])
        self._buffer = self._buffer[end + len(HEAD_END) :]
        self._request = request
        path = request.path
        if self._spare and path not in routes.OPEN:
            raise NotReady(
                f"{self._front.places.limit} connections are open, which is the limit; retry later",
                retry_after=1.0,
            )
        self._front.check(request, path)
        self._client = self._front.client_of(request, self.address)
        self._most = self._front.most_of(request, path)
        self._left = request.length(0)
        self._chunks = Chunks(self._body) if self._left == CHUNKED else None
        self._check_size(self._left)
        expects = request.words(b"expect")
        if expects - {b"100-continue"}:
            error = BadRequest("Expect takes 100-continue alone; leave other expectations out")
            error.status = 417
            raise error
        if expects and self._left and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _check_size(self, size: int) -> None:
        if size > self._most:
            what = "raise --max-body-bytes" if self._most > OPEN_BODY else "use a route that takes the key"
            raise TooLarge(f"the body has more than {self._most} bytes; send less, or {what}")

    def _take_memory(self) -> None:
        """For what has come of the body."""
        size = len(self._body)
        self._check_size(size)
        self._front.memory.take(size - self._taken, self._client, self._taken)
        self._taken = size

    def _give_memory(self) -> None:
        self._front.memory.give(self._taken, self._client)
        self._taken = 0

    def _read_body(self) -> bool:
        """Whether it is complete."""
        if self._chunks is not None:
            end = self._chunks.feed(self._buffer)
            self._take_memory()
            self._buffer = b"" if end is None else self._buffer[end:]
            return end is not None
        piece = self._buffer[: self._left]
        if piece:
            self._body += piece
            self._buffer = self._buffer[len(piece) :]
            self._left -= len(piece)
            self._take_memory()
        return not self._left

    # what is answered

    async def _serve(self) -> None:
        request, body, self._body = self._request, self._body, bytearray()
        assert request is not None
        self.started, self._last = False, b""
        try:
            await self._answer(request, body)
        except SglaError as error:
            self._send(error_reply(error, request.path), request)
        except asyncio.CancelledError:  # the client is gone, or the router ends
            self._send(error_reply(ENDS, request.path), request, close=True)
            if self._transport is not None:
                self._transport.close()
            raise
        except Exception:
            log.exception("a request failed")
            if self.started:
                self.abort()
            self._send(error_reply(SglaError("internal error; the router's log has the details")), request)
        finally:
            self._give_memory()
            self._upstream = self._tunnel = self._task = None
        self._next(request)

    async def _answer(self, request: Request, body: bytearray) -> None:
        front = self._front
        if routes.own(request.method, request.path):
            reply = await front.owner.reply(request.method, request.target, bytes(body))
            self._send(reply, request)
            return
        key = front.payer_of(request, self.address)
        exchange = Exchange(front.config, front.owner, front.pool, self, request, body, key)
        if (found := await exchange.run()) is not None:
            self._send(found, request)

    def _next(self, request: Request) -> None:
        """Go on with the next request, or end."""
        if self._transport is None:
            return
        if request.closes or self._spare or self._front.draining or self._transport.is_closing():
            self._transport.close()
            return
        self._request, self._body, self._chunks = None, bytearray(), None
        self._since = self._loop.time()
        self._front.places.waits(self)
        self._served += 1
        self._go_on()

    def _go_on(self) -> None:
        """Read the next request, unless answers wait for the client: they would be more and more."""
        if self._transport is not None and self._unread is None:
            self._transport.resume_reading()
            self._read()
            self._count()

    def _send(self, reply: Reply, request: Request | None, close: bool = False) -> None:
        """An answer of the router's own, unless another one has begun."""
        if self.started or self._transport is None:
            return
        self.started = True
        lines = [
            f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
            f"Content-Type: {reply.kind}",
            f"Content-Length: {len(reply.body)}",
        ]
        given = request.get(b"x-request-id") if request is not None else b""
        lines.append(f"x-request-id: {given.decode() if SAFE_ID.fullmatch(given) else random_id()}")
        if reply.retry_after:
            lines.append(f"Retry-After: {reply.retry_after}")
        if reply.status == 401:
            lines.append("WWW-Authenticate: Bearer")
        if close or request is None or request.closes or self._spare:
            lines.append("Connection: close")
        body = b"" if request is not None and request.method == "HEAD" else reply.body
        self._transport.write("\r\n".join(lines).encode() + HEAD_END + body)

    def _refuse(self, error: SglaError) -> None:
        """Answer a request that is not read to its end, and end the connection."""
        self.started = False
        request = self._request
        self._send(error_reply(error, request.path if request is not None else ""), request, close=True)
        self._give_memory()
        self._buffer, self._body = b"", bytearray()
        self._lingers, self._since = True, self._loop.time()
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    # as the exchange's client

    def attach(self, upstream: Upstream, tunnel: bool) -> None:
        self._upstream = upstream
        if tunnel:
            self._tunnel = upstream
            upstream.on_tunnel_pause = self._pause_reading
            if self._buffer:
                upstream.tunnel(self._buffer)
                self._buffer = b""
        if self._unread is not None:
            upstream.pause(True)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self.started, self._last = True, data
            self._transport.write(data)

    def break_off(self, event: bytes) -> None:
        if self._transport is None:
            return
        last = self._last
        between = last.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))  # two chunks and two events
        alone = last.startswith(b"HTTP/1.") and last.find(HEAD_END) == len(last) - len(HEAD_END)
        if event and (between or alone):
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        self._transport.close()

    def _pause_reading(self, whether: bool) -> None:
        if self._transport is not None:
            (self._transport.pause_reading if whether else self._transport.resume_reading)()

    def pause_writing(self) -> None:
        self._unread = self._loop.time()
        if self._upstream is not None:
            self._upstream.pause(True)

    def resume_writing(self) -> None:
        self._unread = None
        if self._upstream is not None:
            self._upstream.pause(False)
        elif self._task is None and not self._lingers:
            self._since = self._loop.time()
            self._go_on()

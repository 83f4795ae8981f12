"""Request bodies: read and inflated in slices, and counted against one limit for all requests."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterator

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from sgla.errors import BadRequest, Overloaded, TooLarge
from sgla.http.turns import Desk, Door

BODY_SECONDS = 120  # a client that sends its body more slowly is not waited for
SLICE = 64 << 10  # bytes that are inflated at once; others run in between
SMALL = 64 << 10  # bytes of a request that finds room while large ones do not
SMALL_SHARE = 8  # an eighth of the memory is for small requests alone
PATIENCE = 5.0  # seconds that a body may take to arrive before it has to make room for others


class BodyTimeout(BadRequest):
    status = 408
    code = "request_timeout"


class UnsupportedEncoding(BadRequest):
    status = 415
    code = "unsupported_encoding"


class RequestMemory:
    """Memory for what the requests of all clients hold: their bodies, then what these are decoded to."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        # One large body at a time is inflated, and one decoded,
        # so that many add no more than one to a turn of the loop.
        self.inflating, self.decoding = Desk(), Desk()
        self.reading = Door()  # for pieces of large bodies; what has not been read is not received either
        self.of_client: Counter[str] = Counter()
        self._arriving: dict[Share, float] = {}  # and since when, the longest first

    def make_room(self, size: int, most: int, asking: Share) -> bool:
        """Whether ``size`` more bytes fit below ``most``,
        if need be without bodies that have long been arriving."""
        now = asyncio.get_running_loop().time()
        for share, since in list(self._arriving.items()):
            if self.used + size <= most or now - since < PATIENCE:
                break
            if share is not asking and share.size > SMALL:
                share.evict()
        return self.used + size <= most

    def arriving(self, share: Share, since: float | None) -> None:
        """``share``'s body arrives since then; None: no longer."""
        if since is None:
            self._arriving.pop(share, None)
        else:
            self._arriving[share] = since


class Share:
    """What one request of ``client`` holds of the RequestMemory. ``close`` gives it back."""

    def __init__(self, memory: RequestMemory, client: str) -> None:
        self.size = 0
        self.body = 0  # bytes of the request's body, inflated, and of what it goes on from
        self.evicted = False
        self._memory = memory
        self.client = client
        self._timer: asyncio.Timeout | None = None

    def take(self, size: int) -> None:
        """Raises Overloaded if there is no room now, and TooLarge if there never is."""
        memory = self._memory
        large = self.size + size > SMALL
        most = memory.limit - memory.limit // SMALL_SHARE * large
        if self.size + size > most:
            raise TooLarge(
                f"the request would take {self.size + size} bytes of memory, of {most} that there are for "
                "the requests of all clients; send less, or start the server with a larger "
                "--request-memory-bytes"
            )
        if large and self.size < memory.of_client[self.client] > memory.limit // 2 - size:
            raise full("your requests", memory.of_client[self.client], memory.limit // 2)
        if memory.used + size > most and not memory.make_room(size, most, self):
            raise full("the requests of all clients", memory.used, most)
        self._change(size)

    def give(self, size: int) -> None:
        self._change(-min(size, self.size))

    def _change(self, size: int) -> None:
        memory = self._memory
        self.size += size
        memory.used += size
        memory.of_client[self.client] += size
        if not memory.of_client[self.client]:
            del memory.of_client[self.client]

    def close(self) -> None:
        self.give(self.size)

    def evict(self) -> None:
        """Stop reading the body, which makes room for others."""
        assert self._timer is not None
        self._timer.reschedule(0.0)
        self._memory.arriving(self, None)
        self.evicted = True
        self.close()

    async def read(self, request: web.Request) -> bytes:
        """The whole body, inflated; it is in the share, too. Raises BodyTimeout, UnsupportedEncoding,
        Overloaded, BadRequest for what is broken, and TooLarge without reading the rest."""
        limit = request.client_max_size
        check_length(request.content_length or 0, limit)
        inflate = inflater(", ".join(request.headers.getall("Content-Encoding", ())))
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS) as self._timer:
                self._memory.arriving(self, asyncio.get_running_loop().time())
                arrived = 0
                while data := await request.content.readany():
                    arrived += len(data)
                    check_length(arrived, limit)
                    if arrived > SMALL:
                        await self._memory.reading.enter(self.client)
                    if inflate is None:
                        self._add(body, data, limit)
                        continue
                    await self._inflate(body, inflate.pieces(data), limit)
        except TimeoutError as error:
            if self.evicted:
                raise Overloaded(
                    "the request body made room for others: it had not "
                    f"arrived within {PATIENCE} s; retry later",
                    retry_after=5.0,
                ) from error
            raise BodyTimeout(f"the request body did not arrive within {BODY_SECONDS} s") from error
        except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
            raise BadRequest(f"the request body could not be read: {error}") from error
        finally:
            self._memory.arriving(self, None)
        if inflate is not None and body:
            inflate.check_end()
        self.body = len(body)
        return bytes(body)

    async def _inflate(self, body: bytearray, pieces: Iterator[bytes], limit: int) -> None:
        """A large body goes on when no other one of its client does, and piece by piece by turns."""
        while len(body) < SMALL:
            await self._memory.reading.enter(self.client)
            if (piece := next(pieces, None)) is None:
                return
            self._add(body, piece, limit)
        desk = self._memory.inflating
        async with desk.own(self.client):
            while True:
                async with desk.everybodys:
                    if (piece := next(pieces, None)) is None:
                        return
                    self._add(body, piece, limit)
                    await asyncio.sleep(0)

    def _add(self, body: bytearray, piece: bytes, limit: int) -> None:
        check_length(len(body) + len(piece), limit)
        self.take(len(piece))
        body += piece


SHARE = web.RequestKey("share", Share)  # what the request holds of the memory for all


def full(whose: str, used: int, most: int) -> Overloaded:
    return Overloaded(
        f"{whose} take {used} bytes of memory, of {most} that there are for them; retry later, or start the "
        "server with a larger --request-memory-bytes",
        retry_after=1.0,
    )


def check_length(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(
            f"the request body is larger than {limit} bytes; send less, or "
            "start the server with a larger --max-body-bytes"
        )


def inflater(encoding: str) -> Inflater | None:
    """For a Content-Encoding; None: the body is as it is. Raises UnsupportedEncoding."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "x-gzip", "deflate"):
        raise UnsupportedEncoding(
            f"Content-Encoding {name[:40]!r} is not supported; send gzip, deflate, or the body as it is"
        )
    return Inflater(name)


class Inflater:
    """gzip (one member), or deflate with or without zlib's header:
    servers and clients disagree about its meaning."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stream = None if name == "deflate" else zlib.decompressobj(16 + zlib.MAX_WBITS)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What ``data`` inflates to, at most SLICE bytes at once. Raises BadRequest."""
        if self._stream is None:
            headed = data[0] & 0x0F == zlib.DEFLATED
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if headed else -zlib.MAX_WBITS)
        stream, full = self._stream, True
        while data or full:
            try:
                piece = stream.decompress(data, SLICE)
            except zlib.error as error:
                raise BadRequest(f"the request body is no {self._name}: {error}") from error
            data, full = stream.unconsumed_tail, len(piece) == SLICE
            if stream.unused_data:
                raise BadRequest(f"the request body goes on behind the end of its {self._name}")
            yield piece

    def check_end(self) -> None:
        """Raises BadRequest if something is missing."""
        if self._stream is not None and not self._stream.eof:
            raise BadRequest(f"the request body ends before its {self._name} does")

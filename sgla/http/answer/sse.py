"""Server-sent events: ``push`` encodes an event and writes it to the transport in the same call.

There is no task, queue or await for a token. While the client reads too slowly (the transport is paused),
events are gathered per choice and go out as one, or as a few if they have many logprobs, when it has caught
up; beyond a byte limit, of its own or of all streams together, the client is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from sgla.errors import SglaError
from sgla.http.answer.collect import total_usage
from sgla.http.answer.encoder import Encoder
from sgla.http.answer.held import TOGETHER, Held
from sgla.http.answer.unread import Unread
from sgla.http.server import Server, Work
from sgla.messages import Event, Rejected, Usage

log = logging.getLogger(__name__)

# A refusal found after admission (prompt too long, bad template input, a grammar that takes too long) should
# still get its HTTP status. So the headers wait for the first message: this long, in seconds, and twice as
# long again as long as the request is being prepared.
GRACE = 0.1


class SseSink:
    """The output of one streaming request.
    States: gathering (before the headers, or paused), passing, over."""

    def __init__(
        self, encoder: Encoder, work: Work, limit: int, unread: Unread, on_slow: Callable[[], None]
    ) -> None:
        self._encoder = encoder
        self._n = work.n
        self._uid = work.uid
        self._limit = limit
        self._on_slow = on_slow
        self._open = set(range(work.choices))
        self._usages: dict[int, Usage] = {}
        self._gathering = True
        self._held = Held(work.client.name, unread, encoder.cumulative)
        self._written = False  # since the last tick
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.rejected: Rejected | None = None
        self.over = False
        self.wake = asyncio.Event()  # for the handler: the first message, a pause, the end

    # from the engine

    def push(self, message: Event | Rejected) -> None:
        if not self.over:
            self._do(self._hold if self._gathering else self._send, message)

    def _do(self, function: Callable[[Event | Rejected], None], message: Event | Rejected) -> None:
        try:
            function(message)
        except Exception:  # a bug in one stream's encoding must not reach the actor that serves all streams
            log.exception("stream %s failed", self._uid)
            self._drop()

    def abort(self) -> None:
        """End the choices that are still open with finish ``abort``."""
        for index in sorted(self._open):
            if not self._held.finished(index):
                usage = self._usages.get(index) or Usage()
                self.push(Event(rid=self._uid, index=index, finish="abort", usage=usage))

    def _send(self, message: Event | Rejected) -> None:
        if isinstance(message, Event):
            data = self._encoder.encode(message)
            self._usages[message.index] = message.usage
            if message.finish is not None:
                self._open.discard(message.index)
                if not self._open:
                    data += self._encoder.end(total_usage(self._usages.items(), self._n)) + self._encoder.done
                    self._end()
        else:
            data = self._encoder.error(message) + self._encoder.done
            self._end()
        if data:
            self._write(data)

    def _hold(self, message: Event | Rejected) -> None:
        self.wake.set()
        if isinstance(message, Rejected):
            self.rejected = message
            return
        fits = self._held.add(message)
        transport = self._transport
        if transport is None:
            return
        unread = transport.get_write_buffer_size() + self._held.size
        if not fits or unread > self._limit:
            log.warning("stream %s dropped: the client has left %d bytes unread", self._uid, unread)
            self._on_slow()
            self._drop()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        if transport.is_closing():  # the handler is about to be cancelled
            self._end()
            return
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        self._written = True
        if self._protocol.writing_paused:
            self._gathering = True
            self.wake.set()

    def _end(self) -> None:
        self.over = True
        self.wake.set()

    def _drop(self) -> None:
        self._end()
        self.close()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Hold nothing any longer."""
        self._held.clear()

    # from the handler

    async def run(self, request: web.Request, writer: AbstractStreamWriter, keepalive: float) -> None:
        """Pass events on until the stream is over; the headers have been sent.
        ``keepalive``: seconds, 0 is off."""
        self._protocol = request.protocol
        self._transport = request.transport
        self._chunked = request.version >= HttpVersion11
        if self._transport is None:
            raise ConnectionResetError("the client is gone")
        if data := self._encoder.begin():
            self._write(data)
        await self._flush()
        self._written = True
        if keepalive > 0:
            self._tick(keepalive)
        try:
            while not self.over:
                await self.wake.wait()
                self.wake.clear()
                if self._gathering and not self.over:
                    await writer.drain()
                    await self._flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _flush(self) -> None:
        """What is held goes out, so many logprobs in a turn of the loop,
        until the client has to catch up again."""
        sent = 0
        while self._held and not self.over:
            event = self._held.take()
            self._do(self._send, event)
            if self._protocol.writing_paused:
                return
            sent += len(event.logprobs or ())
            if sent >= TOGETHER:
                sent = 0
                await asyncio.sleep(0)
        self._gathering = False
        if self.rejected is not None:
            self.push(self.rejected)

    def _tick(self, interval: float) -> None:
        if not self._written and not self._gathering and self._encoder.ping:
            self._write(self._encoder.ping)
        self._written = False
        if not self.over:
            self._timer = asyncio.get_running_loop().call_later(interval, self._tick, interval)


async def first_message(server: Server, work: Work, wake: asyncio.Event) -> None:
    """Wait for it, which sets ``wake``, or until the engine has taken the request."""
    grace, preparing = GRACE, True
    while preparing:
        preparing = any(server.ingress.preparing(job.rid) for job in work.jobs)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await wake.wait()
                return
        grace *= 2


async def stream(request: web.Request, server: Server, work: Work, encoder: Encoder) -> web.StreamResponse:
    """Run ``work`` and stream it. Raises what refuses the request as long as no header has been sent."""
    limit = server.config.sink_limit_bytes
    sink = SseSink(encoder, work, limit, server.unread, lambda: server.drop_slow(work))
    server.open(work, sink)
    try:
        await first_message(server, work, sink.wake)
        if sink.rejected is not None:
            raise SglaError.from_rejected(sink.rejected)
        response = web.StreamResponse(headers=encoder.headers)
        if request.version >= HttpVersion11:
            response.enable_chunked_encoding()
        writer = await response.prepare(request)
        assert writer is not None
        writer.send_headers()
        await sink.run(request, writer, server.config.sse_keepalive)
        return response
    finally:
        sink.close()
        server.close(work)

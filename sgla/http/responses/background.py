"""Responses that go on without their client: their events are kept, to be streamed from any of them on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from sgla.http.answer.sse import HEADERS, PING, Encoder
from sgla.http.server import SERVER
from sgla.messages import Event, Rejected, Usage

log = logging.getLogger(__name__)

BLOCK = 64  # bytes that a block takes beside its text
PIECE = 64  # blocks that are written at once, so that a client that does not read is not given everything


class Recorder:
    """A sink that keeps the blocks of a stream with one choice, in order. ``ended`` is set after the last one.

    ``size``: bytes that are kept; ``grown`` is called when there are more.
    """

    def __init__(self, encoder: Encoder, grown: Callable[[], None]) -> None:
        self.blocks: list[bytes] = []
        self.size = 0
        self._grown = grown
        self.ended = asyncio.Event()
        self._encoder = encoder
        self._news = asyncio.Event()
        self._add(encoder.begin())

    def push(self, message: Event | Rejected) -> None:
        if self.ended.is_set():
            return
        data, over = b"", True
        try:
            if isinstance(message, Event):
                data, over = self._encoder.encode(message), message.finish is not None
            else:
                data = self._encoder.error(message)
        except Exception:  # a bug here must not reach the actor that serves all requests
            log.exception("a response in the background failed")
        self.add(data, over)

    def add(self, data: bytes, over: bool = False) -> None:
        """More blocks of the stream, or the last ones."""
        self._add(data)
        if over:
            self.ended.set()
        self._grown()
        self._news.set()
        self._news = asyncio.Event()

    def abort(self) -> None:
        """End the stream from outside."""
        self.push(Event(rid="", index=0, finish="abort", usage=Usage()))

    def _add(self, data: bytes) -> None:
        blocks = [block + b"\n\n" for block in data.split(b"\n\n") if block]
        self.blocks += blocks
        self.size += sum(map(len, blocks)) + BLOCK * len(blocks)

    async def play(self, request: web.Request, start: int = 0) -> web.StreamResponse:
        """Stream the blocks from number ``start`` on, those to come included, and comments while there are none."""
        keepalive = request.app[SERVER].config.sse_keepalive
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        while True:
            news, over = self._news, self.ended.is_set()
            while start < len(self.blocks):
                blocks = self.blocks[start : start + PIECE]
                start += len(blocks)
                await response.write(b"".join(blocks))
            if over:
                return response
            try:
                async with asyncio.timeout(keepalive or None):
                    await news.wait()
            except TimeoutError:
                await response.write(PING)

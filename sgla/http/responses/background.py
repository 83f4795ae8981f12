"""Responses that go on without their client: their events are kept, to be streamed from any of them on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from sgla.errors import SglaError
from sgla.http.answer.encoder import HEADERS, PING, Encoder
from sgla.http.bodies import SHARE, Share
from sgla.http.state.shelf import PART, UNREAD
from sgla.messages import Event, Rejected, Usage

log = logging.getLogger(__name__)

BLOCK = 64  # bytes that a block takes beside its text


class Recorder:
    """A sink that keeps the blocks of a stream with one choice, in order.
    ``ended`` is set after the last one.

    ``size``: bytes that are kept, which are in ``share``, if there is one;
    ``grown`` is called when there are more.
    """

    def __init__(self, encoder: Encoder, grown: Callable[[], None], share: Share | None = None) -> None:
        """Raises Overloaded and TooLarge."""
        self.blocks: list[memoryview] = []
        self.size = 0
        self._grown = grown
        self._share = share
        self._readers = 0
        self._unread: Callable[[], None] | None = None
        self.ended = asyncio.Event()
        self._encoder = encoder
        self._news = asyncio.Event()
        begun = encoder.begin()
        if share is not None:
            share.take(len(begun))
        self._add(begun)

    def push(self, message: Event | Rejected) -> None:
        if self.ended.is_set():
            return
        data, over = b"", True
        try:
            if isinstance(message, Event):
                data, over = self._encoder.encode(message), message.finish is not None
                if self._share is not None:
                    self._share.take(len(data))
            else:
                data = self._encoder.error(message)
        except SglaError as error:
            data, over = self._encoder.error(error), True
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

    def when_unread(self, then: Callable[[], None]) -> None:
        """Call ``then`` when nobody reads the blocks any more."""
        self._unread = then
        if not self._readers:
            then()

    @contextmanager
    def reader(self) -> Iterator[None]:
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers and self._unread is not None:
                self._unread()

    def _add(self, data: bytes) -> None:
        """Without a copy."""
        start, view = 0, memoryview(data)
        while start < len(data):
            end = data.index(b"\n\n", start) + 2
            self.blocks.append(view[start:end])
            self.size += end - start + BLOCK
            start = end

    async def play(self, request: web.Request, keepalive: float, start: int = 0) -> web.StreamResponse:
        """Stream the blocks from number ``start`` on, those to come included, and a comment after each
        ``keepalive`` seconds without one (0: none). Raises Overloaded."""
        request[SHARE].take(UNREAD)
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        with self.reader():
            while True:
                news, over = self._news, self.ended.is_set()
                while start < len(self.blocks):
                    start = await self._write(response, start)
                if over:
                    return response
                try:
                    async with asyncio.timeout(keepalive or None):
                        await news.wait()
                except TimeoutError:
                    await response.write(PING)

    async def _write(self, response: web.StreamResponse, start: int) -> int:
        """Up to ``PART`` bytes of blocks, or one block a part at a time;
        returns the number of the next one."""
        size, end = len(self.blocks[start]), start + 1
        while end < len(self.blocks) and size + len(self.blocks[end]) <= PART:
            size += len(self.blocks[end])
            end += 1
        blocks = self.blocks[start:end]
        data = blocks[0] if len(blocks) == 1 else memoryview(b"".join(blocks))
        for at in range(0, len(data), PART):
            await response.write(data[at : at + PART])
        return end

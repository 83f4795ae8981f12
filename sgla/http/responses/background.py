"""Responses that go on without their client: their events are kept, to be streamed from any of them on."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sgla.http.answer.sse import HEADERS, Encoder
from sgla.messages import Event, Rejected, Usage


class Recorder:
    """A sink that keeps the blocks of a stream with one choice, in order. ``ended`` is set after the last one."""

    def __init__(self, encoder: Encoder) -> None:
        self.blocks: list[bytes] = []
        self.ended = asyncio.Event()
        self._encoder = encoder
        self._news = asyncio.Event()
        self._add(encoder.begin())

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, self.blocks))

    def push(self, message: Event | Rejected) -> None:
        if self.ended.is_set():
            return
        if isinstance(message, Event):
            self._add(self._encoder.encode(message))
        else:
            self._add(self._encoder.error(message))
        if isinstance(message, Rejected) or message.finish is not None:
            self.ended.set()
        self._news.set()
        self._news = asyncio.Event()

    def abort(self) -> None:
        """End the stream from outside."""
        self.push(Event(rid="", index=0, finish="abort", usage=Usage()))

    def _add(self, data: bytes) -> None:
        self.blocks += [block + b"\n\n" for block in data.split(b"\n\n") if block]

    async def play(self, request: web.Request, start: int = 0) -> web.StreamResponse:
        """Stream the blocks from number ``start`` on, those to come included."""
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        while True:
            news, over = self._news, self.ended.is_set()
            data = b"".join(self.blocks[start:])
            start = max(start, len(self.blocks))
            if data:
                await response.write(data)
            if over:
                return response
            await news.wait()

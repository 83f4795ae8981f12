"""What a streaming route says how its events are written."""

from __future__ import annotations

from typing import Protocol

from sgla.errors import SglaError
from sgla.messages import Event, Rejected, Usage

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Encoder(Protocol):
    """The wire format of one route. Each method returns complete blocks, or nothing."""

    done: bytes = DONE  # the last block of every stream, errors included
    ping: bytes = PING  # b"": none
    headers: dict[str, str] = HEADERS
    cumulative: bool = False  # each event shows all that came before it

    def begin(self) -> bytes:
        """What goes out with the headers."""
        return b""

    def encode(self, event: Event) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """What follows the last event and precedes ``done``."""

    def error(self, error: Rejected | SglaError) -> bytes: ...

"""How handlers take one answer apart: text, reasoning and tool calls, as they stream."""

from __future__ import annotations

from typing import Protocol

from sgla.text.tools.cursor import CONTENT, Piece


class Reader(Protocol):
    """Any split of the text into ``feed`` calls gives the same pieces, once neighbours of one kind are joined."""

    def feed(self, text: str) -> list[Piece]: ...

    def close(self) -> list[Piece]:
        """What was held back; the answer is over."""


class PlainReader:
    """For models that write nothing but text."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece(CONTENT, text)] if text else []

    def close(self) -> list[Piece]:
        return []

"""How handlers take one answer apart: text, reasoning and tool calls, as they stream."""

from __future__ import annotations

from typing import Protocol

from sgla.http.answer.collect import Choice
from sgla.messages import Event
from sgla.text.tools.cursor import CONTENT, Piece


class Reader(Protocol):
    """Any split of the text into events gives the same pieces, once neighbours of one kind are joined.

    ``reasoning_tokens``: how many of the output's tokens so far are reasoning, the tags around it included.
    """

    reasoning_tokens: int

    def read(self, event: Event | Choice) -> list[Piece]:
        """What the next event brings; with its ``finish`` also what was held back."""


class PlainReader:
    """For models that write nothing but text."""

    reasoning_tokens = 0

    def read(self, event: Event | Choice) -> list[Piece]:
        return [Piece(CONTENT, event.text)] if event.text else []

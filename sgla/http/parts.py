"""What a model's answer consists of, as it streams: text, reasoning, tool calls."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Text(msgspec.Struct):
    text: str


class Reasoning(msgspec.Struct):
    text: str


class Call(msgspec.Struct):
    """A tool call begins; its arguments follow."""

    id: str
    name: str


class Arguments(msgspec.Struct):
    """A fragment of the JSON arguments of the latest call."""

    text: str


Part = Text | Reasoning | Call | Arguments


class Reader(Protocol):
    """Takes one answer apart; any split of the text into ``feed`` calls gives the same parts, joined."""

    def feed(self, text: str) -> list[Part]: ...

    def close(self) -> list[Part]:
        """What was held back; the answer is over."""


class PlainReader:
    """For models that write nothing but text."""

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def close(self) -> list[Part]:
        return []

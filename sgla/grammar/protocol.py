"""What passes between the server, the compiler's process and the workers."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from sgla.messages import Grammar

LENGTH = struct.Struct("<I")  # before each record on the streams of the compiler's processes


class Vocabulary(msgspec.Struct):
    """``tokens``: what each id of the model adds to a text, ``b""`` for ids without a token. ``special``: ids
    that no text contains, ``ends`` among them: those that end an output, at least one."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def read(path: Path) -> Vocabulary:
        return msgspec.msgpack.decode(path.read_bytes(), type=Vocabulary)

    def named(self) -> dict[str, int]:
        """Text -> id of the special tokens."""
        return {self.tokens[i].decode("utf-8", "replace"): i for i in self.special if self.tokens[i]}


class Ask(msgspec.Struct):
    """Compile ``grammar``; or, with ``output``, tell whether that text fits it."""

    grammar: Grammar
    output: str | None = None


class Answer(msgspec.Struct):
    """``seconds`` of CPU time that the source takes to compile. ``fits`` is None where nobody can tell."""

    source: str = ""
    error: str | None = None
    unsupported: bool = False  # the error is about something that is right but not supported
    seconds: float = 0.0
    fits: bool | None = None

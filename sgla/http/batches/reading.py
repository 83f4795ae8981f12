"""Reading the lines of a batch's input from its file:
one after the other, none of them in memory that there is no room for."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import NamedTuple

from sgla.http.batches.files import PIECES, Files
from sgla.http.clients import Client

BLANK = 1024  # lines with nothing but spaces that are passed at once
BOM = b"\xef\xbb\xbf"
LINE_ENDS = re.compile(rb"\n+")


class TooManyLines(Exception):
    """The file has more lines than it may have."""


class Offset(NamedTuple):
    """In a file: byte ``start`` of piece ``piece``, and ``skip`` bytes further."""

    piece: int
    start: int
    skip: int


class Numbered(NamedTuple):
    """A line and its number, from 1.
    ``text`` is None for one that is read when there is room for it, or too long."""

    number: int
    size: int
    place: Offset
    text: bytes | None


class Lines:
    """The lines of file ``number`` that are not empty. Those of up to ``kept`` bytes come with their text; of
    those longer than ``longest`` nobody gets it. ``most``: lines, empty ones included."""

    def __init__(
        self, files: Files, client: Client, number: int, longest: int, kept: int, most: float = math.inf
    ) -> None:
        self._files = files
        self._client = client
        self._file = number
        self._longest = longest
        self._kept = min(kept, longest)
        self._most = most
        self._part = b""
        self._at = 0  # in the part
        self._place, self._behind = (0, 0), (0, 0)  # where the part begins, and the next one: piece and byte
        self._number = 0  # of the last line
        self.ended = False

    async def next(self) -> Numbered | None:
        """None if it has ``ended``, and after many lines with nothing but spaces. Raises TooManyLines."""
        text, size, place, blank, passed = bytearray(), 0, None, True, 0
        while self._at < len(self._part) or await self._read():
            part, at = self._part, self._at
            if not size and (empty := LINE_ENDS.match(part, at)):
                self._at = empty.end()
                self._count(self._at - at)
                continue
            end = part.find(b"\n", at)
            stop = len(part) if end < 0 else end
            if place is None:
                place = Offset(*self._place, at)
            piece = part[at:stop]
            size += len(piece)
            blank = blank and (not piece or piece.isspace())
            if size <= self._kept:
                text += piece
            else:
                text.clear()
            self._at = stop
            if end < 0:
                continue
            self._at += 1
            self._count(1)
            if not blank:
                return self._found(text, size, place)
            text, size, place, blank, passed = bytearray(), 0, None, True, passed + 1
            if passed == BLANK:
                return None
        self.ended = True
        if place is None or blank:
            return None
        self._count(1)
        return self._found(text, size, place)

    def _found(self, text: bytearray, size: int, place: Offset) -> Numbered:
        kept = None if size > self._kept else self._stripped(bytes(text), self._number)
        return Numbered(self._number, size, place, kept)

    async def text(self, line: Numbered) -> bytes | None:
        """Its text, without spaces around it; None for one that is too long."""
        if line.text is not None or line.size > self._longest:
            return line.text
        (piece, start, skip), data = line.place, bytearray()
        while len(data) < skip + line.size:
            part, piece, start = await self._part_at(piece, start)
            if not part:
                break
            data += part
        return self._stripped(bytes(memoryview(data)[skip : skip + line.size]), line.number)

    @staticmethod
    def _stripped(text: bytes, number: int) -> bytes:
        text = text.strip()
        return text.removeprefix(BOM) if number == 1 else text

    async def _read(self) -> bool:
        """The next part; False at the end of the file."""
        self._place = self._behind
        self._part, *behind = await self._part_at(*self._behind)
        self._behind, self._at = (behind[0], behind[1]), 0
        return bool(self._part)

    async def _part_at(self, piece: int, start: int) -> tuple[bytes, int, int]:
        """See ``Pieces.read``."""
        read = partial(PIECES.read, self._file, piece, start)
        return await self._files.database.run(self._client, read, always=True)

    def _count(self, lines: int) -> None:
        self._number += lines
        if self._number > self._most:
            raise TooManyLines

"""What each token reads as, for any id.

Filled on use, since a vocabulary has 10^5 tokens and an output needs few of them, and packed: objects that
stay, made among those of a request, would keep the memory of these from being used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol, TypeVar

BLOCK = 256  # tokens that are packed together
NOTHING, TEXT, RAW = range(3)
Piece = str | bytes | None
V = TypeVar("V", covariant=True)


class Table(Protocol[V]):
    def __getitem__(self, token: int, /) -> V: ...


class Packed:
    """``make``: the piece of a token. ``size``: ids from there on are not kept. Thread-safe."""

    __slots__ = ("_blocks", "_make", "_size")

    def __init__(self, make: Callable[[int], Piece], size: int) -> None:
        self._make = make
        self._size = size
        self._blocks: list[tuple[array[int], bytes, bytes] | None] = [None] * -(-size // BLOCK)

    def _block(self, number: int) -> tuple[array[int], bytes, bytes]:
        """Where the bytes of its tokens end, behind a 0; the bytes; the kind of each token."""
        ends, data, kinds = array("I", [0]), bytearray(), bytearray()
        for token in range(number * BLOCK, (number + 1) * BLOCK):
            piece = self._make(token)
            kinds.append(NOTHING if piece is None else TEXT if isinstance(piece, str) else RAW)
            data += piece.encode() if isinstance(piece, str) else piece or b""
            ends.append(len(data))
        block = self._blocks[number] = ends, bytes(data), bytes(kinds)
        return block


class Bytes(Packed):
    """id -> the bytes that it adds; ``b""`` for an id without a token."""

    __slots__ = ()

    def __getitem__(self, token: int) -> bytes:
        if not 0 <= token < self._size:
            piece = self._make(token)
            return piece.encode() if isinstance(piece, str) else piece or b""
        ends, data, _ = self._blocks[token >> 8] or self._block(token >> 8)
        at = token & 255
        return data[ends[at] : ends[at + 1]]


class Pieces(Packed):
    """id -> text, or raw bytes of a byte-fallback token, or None where there is nothing to decode."""

    __slots__ = ()

    def __getitem__(self, token: int) -> Piece:
        if not 0 <= token < self._size:
            return self._make(token)
        ends, data, kinds = self._blocks[token >> 8] or self._block(token >> 8)
        at = token & 255
        piece = data[ends[at] : ends[at + 1]]
        kind = kinds[at]
        return piece.decode() if kind == TEXT else piece if kind == RAW else None

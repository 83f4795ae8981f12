"""Long lists of numbers in a body, such as token ids, in pieces:
decoding a million of them at once holds the loop for 70 ms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

PIECE = 128 << 10  # bytes that are decoded at once, which takes 1 to 3 ms
DEEPEST = 2  # lists of lists of numbers are cut, too
_FIRST = re.compile(r"`\$\[(\d+)\]")  # of a path in an error


def is_long(value: msgspec.Raw) -> bool:
    """Whether a JSON value is worth cutting: more than a piece, and a list without strings and objects."""
    view = memoryview(value)
    if view.nbytes <= PIECE or bytes(view[:1]) == b'"':
        return False
    text = bytes(value)
    return text.lstrip()[:1] == b"[" and b'"' not in text and b"{" not in text


def pieces(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """The list in shorter ones,
    and of each whether its first item goes on with the last one of the list before."""
    start, depth = 0, 0
    while start < len(text):
        end, inside = text.find(b",", start + PIECE), depth
        depth += text.count(b"[", start, end) - text.count(b"]", start, end)
        if end < 0 or depth > DEEPEST:
            end, depth = len(text), 0
        yield b"[" * inside + text[start:end] + b"]" * depth, inside == DEEPEST
        start = end + 1


def read(
    decode: Callable[[bytes], list[Any]], name: str, items: list[Any], inside: bool, piece: bytes
) -> None:
    """Put a piece of the field ``name`` behind ``items``.
    Raises msgspec's errors, with the path within the whole body."""
    before = len(items) - inside
    try:
        more = decode(piece)
    except msgspec.ValidationError as error:
        place = _FIRST.sub(lambda found: f"`$.{name}[{before + int(found[1])}]", str(error))
        raise msgspec.ValidationError(place) from error
    if inside:
        items[-1].extend(more[0])
    items.extend(more[inside:])

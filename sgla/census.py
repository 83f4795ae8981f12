"""What a JSON text consists of, counted before it is decoded.

Decoding holds Python's lock, and with it the loop, for a time that grows with the number of values more than
with the number of bytes: 16 MiB may be one string (10 ms) or five million lists (a second). numpy counts in
slices of a millisecond or two; a text beyond a limit is never decoded. The limits leave room for a full
context of token ids, and for far more messages, tools and schemas than chats have; what is within them is
decoded in 30 ms or less, a million ids in 60.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from sgla.errors import BadRequest

SMALL = 64 << 10  # bytes; no text of this size takes long, whatever it is
SLICE = 1 << 18  # bytes that are counted at once
MAX_DEPTH = 128  # lists and objects inside each other
MAX_NUMBER = 64  # characters of a number; longer ones take time in the square of their length
LIMITS = {  # what a text may have of each
    "values": 1 << 19,  # or a full context of token ids and 65,536, if that is more
    "strings": 1 << 18,
    "backslashes": 1 << 21,
    "members of objects": 1 << 16,
    "lists and objects": 1 << 16,
}
VALUE, CONTAINER = 48, 128  # bytes of objects of Python, without their characters
QUOTE, BACKSLASH, COMMA, COLON, OPEN, CLOSE = (ord(char) for char in '"\\,:{}')
EIGHT = 0x0101010101010101  # eight times true
LOWER = 0x20  # makes [ and ] of the same value as { and }


class TooComplex(BadRequest):
    """A JSON text has more of something than it takes to make a request."""

    code = "request_too_complex"


class Census:
    """Counts what ``feed`` brings, piece by piece, exactly: what stands inside strings does not count."""

    def __init__(self, context: int = 0) -> None:
        """``context``: tokens that a request may have."""
        self.counts = dict.fromkeys(LIMITS, 0)
        self._limits = LIMITS | {"values": max(LIMITS["values"], context + (1 << 16))}
        self.deepest = 0
        self._depth = 0
        self._quotes = 0
        self._inside = False  # of a string, at the end of the last piece
        self._escaped = False  # is the next character
        self._number = 0  # characters, so far, of a number that the last piece ends with

    def feed(self, piece: bytes) -> None:
        """Raises TooComplex as soon as a limit is exceeded."""
        if not piece:
            return
        text = np.frombuffer(piece, np.uint8)
        outside = ~self._strings(text)
        folded = text | LOWER
        opens, closes = (folded == OPEN) & outside, (folded == CLOSE) & outside
        commas, colons = (text == COMMA) & outside, (text == COLON) & outside
        self._nest(opens, closes)
        counts = self.counts
        counts["lists and objects"] += (containers := int(np.count_nonzero(opens)))
        counts["values"] += int(np.count_nonzero(commas)) + containers
        counts["members of objects"] += int(np.count_nonzero(colons))
        counts["strings"] = self._quotes // 2
        for name, most in self._limits.items():
            if counts[name] > most:
                raise TooComplex(
                    f"the JSON text has more than {most} {name}, which is the limit; send less at once"
                )
        self._measure(outside & (text > LOWER) & (text != QUOTE) & ~(opens | closes | commas | colons))

    def memory(self, text: bytes) -> int:
        """About the bytes that ``text``, which was counted, takes when it is decoded."""
        characters = 1 if text.isascii() and b"\\u" not in text else 4  # bytes for each, at most
        counts = self.counts
        return characters * len(text) + VALUE * counts["values"] + CONTAINER * counts["lists and objects"]

    def _strings(self, text: np.ndarray) -> np.ndarray:
        """For each character whether it is inside of a string; an opening quote is, a closing one is not."""
        quotes = text == QUOTE
        slashes = np.flatnonzero(text == BACKSLASH)
        if self._escaped:
            quotes[0] = False
        self.counts["backslashes"] += len(slashes)
        if len(slashes):
            first = np.diff(slashes, prepend=-2) != 1
            nth = slashes - np.maximum.accumulate(np.where(first, slashes, 0))  # in its run of backslashes
            if self._escaped and slashes[0] == 0:
                nth += slashes == np.arange(len(slashes))  # the run goes on from the last piece
            escaped = slashes[nth % 2 == 0] + 1
            self._escaped = len(escaped) > 0 and bool(escaped[-1] == len(text))
            quotes[escaped[: len(escaped) - self._escaped]] = False
        else:
            self._escaped = False
        self._quotes += int(np.count_nonzero(quotes))
        inside = np.logical_xor.accumulate(quotes) ^ self._inside
        self._inside = bool(inside[-1])
        return inside

    def _nest(self, opens: np.ndarray, closes: np.ndarray) -> None:
        places = np.flatnonzero(opens | closes)
        if not len(places):
            return
        depths = self._depth + np.cumsum(np.where(opens[places], 1, -1))
        self._depth = int(depths[-1])
        self.deepest = max(self.deepest, int(depths.max()))
        if self.deepest > MAX_DEPTH:
            raise TooComplex(f"the JSON text is nested more than {MAX_DEPTH} deep, which is the limit")

    def _measure(self, bare: np.ndarray) -> None:
        """``bare``: which characters are part of a number, or of true, false and null."""
        longest = self._number + run(bare[: MAX_NUMBER + 1])
        words = bare[: len(bare) // 8 * 8].view(np.uint64) == EIGHT
        if (words[1:] & words[:-1]).any():  # some may be longer than 16 characters
            longest = max(longest, int(np.diff(np.flatnonzero(~bare)).max(initial=1)) - 1)
        self._number = run(bare[: -MAX_NUMBER - 2 : -1]) + (self._number if bare.all() else 0)
        if max(longest, self._number) > MAX_NUMBER:
            raise TooComplex(
                f"the JSON text has a number of more than {MAX_NUMBER} characters, which is the limit"
            )


def run(bare: np.ndarray) -> int:
    """How many of ``bare`` are true at its beginning."""
    return len(bare) if bare.all() else int(bare.argmin())


def counting(text: bytes, census: Census) -> Iterator[None]:
    """Let ``census`` count ``text``, and pause every millisecond or two. Raises TooComplex.

    Of small texts only numbers that are not too small are found out.
    """
    opens = text.count(b"[") + text.count(b"{") if len(text) <= SMALL else MAX_DEPTH + 1
    if opens <= MAX_DEPTH:
        census.counts["values"] += text.count(b",") + opens
        census.counts["lists and objects"] += opens
        return
    for start in range(0, len(text), SLICE):
        census.feed(text[start : start + SLICE])
        yield


def check(text: str) -> None:
    """Raises TooComplex for a JSON text inside a request, such as the arguments of a call."""
    for _ in counting(text.encode("utf-8", "surrogatepass"), Census()):
        pass


def loads(text: str) -> Any:
    """The value of a JSON text inside a request. Raises ValueError, and TooComplex."""
    check(text)
    return json.loads(text)

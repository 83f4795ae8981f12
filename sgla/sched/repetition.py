"""Outputs that repeat themselves:
whether the last tokens are copies of one pattern, as vLLM's ``repetition_detection`` asks.

Copies of a pattern of ``p`` tokens end with the last token if so many tokens in a row equal the one ``p``
places before them. Such runs can only go on where the last token has occurred before, so a token costs as
much as it has occurrences in the last ``MAX_PATTERN`` tokens: usually a handful.
"""

from __future__ import annotations

from collections import deque

from sgla.errors import InvalidField
from sgla.messages import Repetition

MAX_PATTERN = 512  # tokens


def check_repetition(asked: Repetition | None) -> Repetition | None:
    """``asked``, or None if it asks for nothing. Raises InvalidField."""
    if asked is None or asked.max_pattern_size == 0:
        return None
    least, most = max(1, asked.min_pattern_size), asked.max_pattern_size
    if not (asked.min_pattern_size >= 0 and least <= most <= MAX_PATTERN):
        raise InvalidField(
            f"repetition_detection: pattern sizes must be from 0 to {MAX_PATTERN}, and min_pattern_size at "
            f"most max_pattern_size; got {asked.min_pattern_size} and {most}",
            param="repetition_detection",
        )
    if asked.min_count < 2:
        raise InvalidField(
            f"repetition_detection: min_count must be at least 2, got {asked.min_count}",
            param="repetition_detection",
        )
    return asked


class Loop:
    """The state of one output."""

    __slots__ = ("_count", "_least", "_length", "_most", "_places", "_runs", "_window")

    def __init__(self, asked: Repetition) -> None:
        """``asked`` is checked."""
        self._least = max(1, asked.min_pattern_size)
        self._most = asked.max_pattern_size
        self._count = asked.min_count
        self._length = 0
        self._window: deque[int] = deque()  # the last ``most`` tokens
        self._places: dict[int, deque[int]] = {}  # where in the output they are
        self._runs: dict[int, int] = {}  # by size of the pattern

    def add(self, token: int) -> bool:
        """Take the next token; true if the output ends with ``count`` copies of a pattern."""
        runs: dict[int, int] = {}
        looping = False
        places = self._places.setdefault(token, deque())
        for place in places:
            size = self._length - place
            if size >= self._least:
                run = runs[size] = self._runs.get(size, 0) + 1
                looping = looping or run >= size * (self._count - 1)
        self._runs = runs
        places.append(self._length)
        self._length += 1
        self._window.append(token)
        if len(self._window) > self._most:
            oldest = self._window.popleft()
            self._places[oldest].popleft()
            if not self._places[oldest]:
                del self._places[oldest]
        return looping

"""Outputs that repeat themselves:
whether the last tokens are copies of one pattern, as vLLM's ``repetition_detection`` asks.

Copies of a pattern of ``p`` tokens end with the last token if so many tokens in a row equal the one ``p``
places before them. How many these are is kept for every size of a pattern, and a token changes all of them at
once: it costs the same (some microseconds) whatever the output is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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

    __slots__ = ("_asked", "_at", "_needed", "_runs", "_tokens")

    def __init__(self, asked: Repetition) -> None:
        """``asked`` is checked."""
        most = asked.max_pattern_size
        self._asked = asked
        self._tokens = np.full(4 * most, -1, np.int32)  # from ``_at`` on the output, its last token first
        self._at = 4 * most
        self._runs = np.zeros(most, np.int32)  # by size of the pattern, from 1
        self._needed = self._lengths()

    def _lengths(self) -> np.ndarray[Any, Any]:
        """Of the runs that are looked for, by size of the pattern."""
        sizes, never = np.arange(1, self._asked.max_pattern_size + 1), np.iinfo(np.int32).max
        lengths = sizes * min(self._asked.min_count - 1, never)
        lengths[: max(1, self._asked.min_pattern_size) - 1] = never
        return np.minimum(lengths, never).astype(np.int32)

    def add(self, token: int) -> bool:
        """Take the next token; true if the output ends with ``min_count`` copies of a pattern."""
        most, tokens, runs = len(self._runs), self._tokens, self._runs
        if self._at == 0 or self._at == len(tokens):
            self._at = len(tokens) - most
            tokens[self._at :] = tokens[:most]
        before = tokens[self._at : self._at + most]
        self._at -= 1
        tokens[self._at] = token
        runs += 1
        runs *= before == token
        return bool((runs >= self._needed).any())

    def __getstate__(self) -> tuple[Repetition, int, bytes, bytes]:
        return self._asked, self._at, self._tokens.tobytes(), self._runs.tobytes()

    def __setstate__(self, state: tuple[Repetition, int, bytes, bytes]) -> None:
        self._asked, self._at, tokens, runs = state
        self._tokens = np.frombuffer(tokens, np.int32).copy()
        self._runs = np.frombuffer(runs, np.int32).copy()
        self._needed = self._lengths()

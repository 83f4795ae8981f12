"""What requests were answered lately, for the guesses of others.

Source: G. Oliaro et al., "SuffixDecoding", arXiv 2411.04975, whose trees are here runs of a fixed length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgla.messages import VERIFIED
from sgla.worker.state import Int32s

RUN = 4  # tokens that have come before
ROOM = 1 << 16  # tokens
PART = 64  # of an output, which others see at once
NONE = -1  # behind a part
BITS, PRIME = 17, 16777619  # of the number of a run; FNV's


class Put(NamedTuple):
    """Where a part was put, and the numbers of its runs."""

    places: range
    runs: NDArray[np.intp]


class Outputs:
    """Parts of outputs, the latest ``ROOM`` tokens. Those of slots that are ``apart`` (of another namespace
    of the prefix cache) are not for others, and see none. ``memory`` int32[*]: ``places``
    int32[2 ** BITS], by the number of a run, which several may have, what came behind it the last time; then
    the ``tokens`` of the parts."""

    def __init__(self, slots: int) -> None:
        self.memory, self._end = np.zeros((1 << BITS) + ROOM + VERIFIED, np.int32), 0
        self.places, self.tokens = np.split(self.memory, [1 << BITS])
        self.tokens[:] = NONE
        self._waiting: list[list[int]] = [[] for _ in range(slots)]
        self._apart = np.zeros(slots, bool)

    def admit(self, slot: int, apart: bool) -> None:
        self._put(self._waiting[slot])
        self._waiting[slot], self._apart[slot] = [], apart

    def add(self, slot: int, tokens: list[int]) -> None:
        """The request in ``slot`` is answered so much more."""
        if self._apart[slot]:
            return
        waiting = self._waiting[slot]
        waiting += tokens
        if len(waiting) >= PART:
            self._put(waiting)
            del waiting[:-RUN]

    def behind(self, slot: int, tokens: Int32s, most: int) -> Int32s:
        """At most ``most`` tokens that came behind the last ones of ``tokens``."""
        if self._apart[slot] or len(tokens) < RUN:
            return tokens[:0]
        run = tokens[-RUN:].tolist()
        place = int(self.places[number_of(run)])
        if place < RUN or self.tokens[place - RUN : place].tolist() != run:
            return tokens[:0]
        found = self.tokens[place : place + most]
        ends = np.flatnonzero(found == NONE)
        return found[: ends[0]] if len(ends) else found

    def _put(self, part: list[int]) -> Put | None:
        if len(part) <= RUN:
            return None
        if self._end + len(part) >= ROOM:
            self._end = 0
        first, self._end = self._end, self._end + len(part) + 1
        values = self.tokens[first : self._end]
        values[:] = [*part, NONE]
        runs = numbers_of(np.lib.stride_tricks.sliding_window_view(values[:-2], RUN))
        self.places[runs] = np.arange(first + RUN, self._end - 1)
        return Put(range(first, self._end), runs)


def number_of(run: list[int]) -> int:
    """Of a run, below ``2 ** BITS``."""
    made = 0
    for token in run:
        made = (made ^ token) * PRIME & 0xFFFFFFFF
    return made >> (32 - BITS)


def numbers_of(runs: Int32s) -> NDArray[np.intp]:
    """Of runs int32[N, RUN]."""
    made = np.zeros(len(runs), np.uint32)
    for tokens in runs.T.astype(np.uint32):
        made = (made ^ tokens) * np.uint32(PRIME)
    return (made >> np.uint32(32 - BITS)).astype(np.intp)

"""What requests were answered lately, for the guesses of others.

Source: G. Oliaro et al., "SuffixDecoding", arXiv 2411.04975, whose trees are here runs of a fixed length.
"""

from __future__ import annotations

import numpy as np

from sgla.worker.state import Int32s

RUN = 4  # tokens that have come before
ROOM = 1 << 16  # tokens
PART = 64  # of an output, which others see at once
NONE = -1  # behind a part


class Outputs:
    """Parts of outputs, the latest ``ROOM`` tokens. Those of slots that are ``apart`` (of another namespace
    of the prefix cache) are not for others, and see none."""

    def __init__(self, slots: int) -> None:
        self._tokens, self._end = np.full(ROOM, NONE, np.int32), 0
        self._places: dict[bytes, int] = {}  # what came behind a run the last time
        self._runs: list[bytes] = [b""] * ROOM  # before each place
        self._waiting: list[list[int]] = [[] for _ in range(slots)]
        self._apart = np.zeros(slots, bool)

    def admit(self, slot: int, apart: bool) -> None:
        self._put(self._waiting[slot])
        self._waiting[slot], self._apart[slot] = [], apart

    def add(self, slot: int, tokens: Int32s) -> None:
        """The request in ``slot`` is answered so much more."""
        if self._apart[slot]:
            return
        waiting = self._waiting[slot]
        waiting += tokens.tolist()
        if len(waiting) >= PART:
            self._put(waiting)
            del waiting[:-RUN]

    def behind(self, slot: int, tokens: Int32s, most: int) -> Int32s:
        """At most ``most`` tokens that came behind the last ones of ``tokens``."""
        place = None if self._apart[slot] else self._places.get(tokens[-RUN:].tobytes())
        if place is None:
            return tokens[:0]
        found = self._tokens[place : place + most]
        ends = np.flatnonzero(found == NONE)
        return found[: ends[0]] if len(ends) else found

    def _put(self, part: list[int]) -> None:
        if len(part) <= RUN:
            return
        if self._end + len(part) >= ROOM:
            self._end = 0
        first, self._end = self._end, self._end + len(part) + 1
        for place in range(first, self._end):
            if self._places.get(self._runs[place]) == place:
                del self._places[self._runs[place]]
            self._runs[place] = b""
        values = np.array([*part, NONE], np.int32)
        self._tokens[first : self._end] = values
        for i in range(RUN, len(part)):
            run = values[i - RUN : i].tobytes()
            self._places[run], self._runs[first + i] = first + i, run

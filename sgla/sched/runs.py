"""Runs of tokens that a text has had, as numbers of few bits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAIR, OWN = 2, 19  # tokens that have come before, and bits of their numbers
FACTOR = 0x9E3779B1  # 2 ** 32 by the golden ratio
MANY = 32  # tokens that are taken in together


class Text:
    """The pairs of tokens of a text, a bit for each number. ``again``: its latest one came before."""

    __slots__ = ("_count", "_seen", "again")

    def __init__(self) -> None:
        self._seen, self._count, self.again = bytearray(1 << OWN - 3), 1, False

    def read(self, tokens: array[int]) -> bool:
        """The text goes on; returns ``again``."""
        seen, count = self._seen, len(tokens)
        if count - self._count > MANY:
            known = np.array(tokens[self._count - 1 : count - 1], np.uint32)
            numbers = numbers_of(known, PAIR, OWN)
            bits = (1 << (numbers & 7)).astype(np.uint8)
            np.bitwise_or.at(np.frombuffer(seen, np.uint8), numbers >> 3, bits)
            self._count = count - 1
        for i in range(self._count, count):
            number = number_of(tokens[i - 1 : i + 1], OWN)
            byte, bit = number >> 3, 1 << (number & 7)
            self.again = bool(seen[byte] & bit)
            seen[byte] |= bit
        self._count = max(count, self._count)
        return self.again


def number_of(run: Sequence[int], bits: int) -> int:
    """Of a run of tokens, below ``2 ** bits``."""
    made = 0
    for token in run:
        made = (made ^ token) * FACTOR & 0xFFFFFFFF
        made ^= made >> 15
    return made >> (32 - bits)


def numbers_of(tokens: NDArray[np.uint32], length: int, bits: int) -> NDArray[Any]:
    """Of each run of ``length`` tokens."""
    count = max(len(tokens) - length + 1, 0)
    made = np.zeros(count, np.uint32)
    for place in range(length):
        made = (made ^ tokens[place : place + count]) * np.uint32(FACTOR)
        made ^= made >> np.uint32(15)
    return made >> np.uint32(32 - bits)

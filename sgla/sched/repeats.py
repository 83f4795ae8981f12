"""Whether texts repeat what came before, so that it pays to look for guesses there: by bytes that several
runs of tokens share, behind the steps in flight, whose tokens are not known yet."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sgla.sched.request import Request

PAIR, RUN = 2, 4  # tokens that have come before, in a text and in what others were answered
OWN, ANSWERED = 19, 20  # bits of their numbers
ROOM = 1 << 16  # tokens that others were answered, of which runs are known
FACTOR = 0x9E3779B1  # 2 ** 32 by the golden ratio
MANY = 32  # tokens that are taken in together


class Text:
    """The pairs of tokens of a text. ``again``: its latest one came before."""

    __slots__ = ("_count", "_seen", "again")

    def __init__(self) -> None:
        self._seen, self._count, self.again = bytearray(1 << OWN), 1, False

    def read(self, tokens: array[int]) -> bool:
        """The text goes on; returns ``again``."""
        seen, count = self._seen, len(tokens)
        if count - self._count > MANY:
            known = np.array(tokens[self._count - 1 : count - 1], np.uint32)
            np.frombuffer(seen, np.uint8)[numbers_of(known, PAIR, OWN)] = 1
            self._count = count - 1
        for i in range(self._count, count):
            number = number_of(tokens[i - 1 : i + 1], OWN)
            self.again = bool(seen[number])
            seen[number] = 1
        self._count = max(count, self._count)
        return self.again


class Repeats:
    """What is known of the texts of requests, and of what they were answered."""

    def __init__(self) -> None:
        self._answered, self._tokens = bytearray(1 << ANSWERED), 0

    def has(self, request: Request) -> bool:
        """Whether what the request's text ends with came before."""
        if request.text is None:
            request.text = Text()
        if request.text.read(request.tokens):
            return True
        if request.submit.namespace or len(request.tokens) < RUN:
            return False
        return bool(self._answered[number_of(request.tokens[-RUN:], ANSWERED)])

    def learn(self, request: Request) -> None:
        """The request has ended. Of those with a namespace others see nothing, and they nothing of others."""
        if request.submit.namespace:
            return
        tokens = request.tokens[request.prompt_len :]
        self._tokens += len(tokens)
        if self._tokens > ROOM:
            self._answered, self._tokens = bytearray(1 << ANSWERED), len(tokens)
        numbers = numbers_of(np.array(tokens, np.uint32), RUN, ANSWERED)
        np.frombuffer(self._answered, np.uint8)[numbers] = 1


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

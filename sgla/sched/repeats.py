"""Whether texts repeat what came before, so that it pays to look for guesses there: by bits that several runs
of tokens share, behind the steps in flight, whose tokens are not known yet."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sgla.sched.request import Request

PAIR, RUN = 2, 4  # tokens that have come before, in a text and in what others were answered
OWN, ANSWERED = 19, 20  # bits of their numbers
ROOM = 1 << 16  # tokens that others were answered, of which runs are known
FACTOR = 0x9E3779B1  # 2 ** 32 by the golden ratio


class Text:
    """The pairs of tokens of a text. ``again``: its latest one came before."""

    __slots__ = ("_count", "_seen", "again")

    def __init__(self) -> None:
        self._seen, self._count, self.again = np.zeros(1 << OWN, bool), 0, False

    def read(self, tokens: array[int]) -> bool:
        """The text goes on; returns ``again``."""
        if len(tokens) > self._count:
            numbers = numbers_of(np.array(tokens[max(self._count - PAIR + 1, 0) :], np.uint32), PAIR, OWN)
            self._count = len(tokens)
            if len(numbers):
                self._seen[numbers[:-1]] = True
                self.again = bool(self._seen[numbers[-1]])
                self._seen[numbers[-1]] = True
        return self.again


class Repeats:
    """What is known of the texts of requests, and of what they were answered."""

    def __init__(self) -> None:
        self._answered, self._tokens = np.zeros(1 << ANSWERED, bool), 0

    def has(self, request: Request) -> bool:
        """Whether what the request's text ends with came before."""
        if request.text is None:
            request.text = Text()
        if request.text.read(request.tokens):
            return True
        if request.submit.namespace:
            return False
        last = numbers_of(np.array(request.tokens[-RUN:], np.uint32), RUN, ANSWERED)
        return bool(len(last) and self._answered[last[0]])

    def learn(self, request: Request) -> None:
        """The request has ended. Of those with a namespace others see nothing, and they nothing of others."""
        if request.submit.namespace:
            return
        tokens = request.tokens[request.prompt_len :]
        self._tokens += len(tokens)
        if self._tokens > ROOM:
            self._answered[:], self._tokens = False, len(tokens)
        self._answered[numbers_of(np.array(tokens, np.uint32), RUN, ANSWERED)] = True


def numbers_of(tokens: NDArray[np.uint32], length: int, bits: int) -> NDArray[Any]:
    """Of each run of ``length`` tokens, below ``2 ** bits``."""
    count = max(len(tokens) - length + 1, 0)
    made = np.zeros(count, np.uint32)
    for place in range(length):
        made = (made ^ tokens[place : place + count]) * np.uint32(FACTOR)
        made ^= made >> np.uint32(15)
    return made >> np.uint32(32 - bits)

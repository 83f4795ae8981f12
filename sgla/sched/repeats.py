"""Whether texts repeat what came before, so that it pays to look for guesses there: by numbers that
several runs of tokens share, behind the steps in flight, whose tokens are not known yet."""

from __future__ import annotations

import numpy as np

from sgla.sched.request import Request
from sgla.sched.runs import Text, number_of, numbers_of

RUN, ANSWERED = 4, 20  # tokens that have come before in what others were answered, and bits of their numbers
ROOM = 1 << 16  # tokens that others were answered, of which runs are known
UNTRIED = 2  # guesses of a request of which none was right yet
MOST = 6  # credit that a request may have
RAREST = 8  # without credit it guesses one token in every fourth step, four times as rarely with each that is
# wrong, down to one of 2 ** RAREST steps


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


def drafts_of(request: Request, most: int, step: int, repeats: Repeats | None) -> int:
    """Where drafts cost time that are not guessed, a request gets none while its text repeats nothing, as far
    as that is looked for (``repeats``), and one without credit one, ever more rarely."""
    if request.credit <= 0:
        rare = step % (1 << min(2 * (1 - request.credit), RAREST)) == 0
        most = min(most, int(rare))
    elif not request.guesses[2]:
        most = min(most, UNTRIED)
    if most == 0 or repeats is None or request.submit.sampling.grammar or repeats.has(request):
        return most
    return 0


def after(credit: int, right: int) -> int:
    """``credit`` of a request after a row with guesses, of which so many were ``right``."""
    return min(max(credit, 0) + right, MOST) if right else credit - 1

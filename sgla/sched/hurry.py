"""Short prompts beside long ones: how long those who want a first token soon wait for those who cannot have
one soon.

While prompts of few tokens come and one of many is read, a step lasts at most ``LONGER`` times as long as
that of a short prompt alone, or as one of ``SHORT`` tokens; the next is planned when it is about to end, and
is the short prompts' first. So whoever comes waits for the rest of one step and for its own: at p95 less than
three times as long as on an idle server, unless many come at once. Long prompts are read more slowly
meanwhile; without short ones they are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from sgla.sched.budget import CostModel, pairs
from sgla.sched.limits import Limits
from sgla.sched.request import Request

SHORT, LONG = 256, 2048  # tokens of a short prompt at most, and of a long one at least
TYPICAL = 128  # tokens of the one that a step is measured by
LONGER = 2.0
NEXT = 64  # of those that wait, so many may be in the next step
LINGER = 30.0  # seconds after a short prompt has met a long one in which another is expected
# Nor may a long step begin when so many came within so many seconds, one after the other: the next would come
# during that step.
FEW, LATELY, APART = 8, 2.0, 0.1


class Hurry:
    """``on``: for the step that is being planned."""

    def __init__(self, limits: Limits, costs: CostModel) -> None:
        self._costs = costs
        self._watched = limits.itl_target is not None and limits.stages == 1 and not limits.encoder
        self._met = -LINGER  # when the last short prompt has met a long one
        self._latest: deque[float] = deque(maxlen=FEW)  # when short prompts came
        self._reading = False  # a long one, in the last step that read prompts
        self.on = False

    def offer(self, tokens: int, now: float) -> None:
        if tokens <= SHORT:
            self._latest.append(now)
            if self._reading:
                self._met = now

    def begin(self, waiting: Sequence[Request], now: float) -> None:
        expected = self._watched and (now - self._met < LINGER or self._often(now))
        self.on = expected and (self._reading or any(one.known > LONG for one in waiting[:NEXT]))

    def _often(self, now: float) -> bool:
        """Not those that came at once: streams which were there before want no first token."""
        if len(self._latest) < FEW:
            return False
        first, last = self._latest[0], self._latest[-1]
        return now - first < LATELY and last - first > APART

    def reads(self, requests: Iterable[Request]) -> None:
        """These have been read in the step, or might have been, and may not have been read to their ends."""
        self._reading = any(request.known - request.planned > SHORT for request in requests)

    def seconds(self, decodes: int, work: int) -> float:
        """For prompts, beside so many decode rows."""
        base = self._costs.predict(decodes, work) if decodes else self._costs.coefficients[0]
        with_one = self._costs.predict(decodes + TYPICAL, work + pairs(0, TYPICAL))
        return self._costs.beside(decodes, LONGER * with_one) - base

    def first(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Short ones before the others, in their order."""
        return sorted(waiting, key=lambda request: request.known > SHORT) if self.on else waiting

    def hurries(self, request: Request) -> bool:
        """Others leave room to it."""
        return self.on and request.known <= SHORT

    def shorts(self, requests: Iterable[Request]) -> list[Request]:
        return [request for request in requests if self.hurries(request)] if self.on else []

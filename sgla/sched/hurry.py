"""Short prompts beside long ones: how long those who want a first token soon wait for those who cannot have
one soon.

While prompts of few tokens come and one of many is read, a step lasts at most ``LONGER`` times as long as
that of a short prompt alone, or as one of ``SHORT`` tokens; one is in flight at a time, and the next is the
short prompts' first. So whoever comes waits for the rest of one step and for its own: at p95 less than three
times as long as on an idle server, unless many come at once. Long prompts are read more slowly meanwhile;
without short ones they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgla.sched.budget import CostModel, pairs
from sgla.sched.limits import Limits
from sgla.sched.request import Request

SHORT, LONG = 256, 2048  # tokens of a short prompt at most, and of a long one at least
TYPICAL = 128  # tokens of the one that a step is measured by
LONGER = 1.7
NEXT = 64  # of those that wait, so many may be in the next step
LINGER = 30.0  # seconds after a short prompt in which another is expected


class Hurry:
    """``on``: for the step that is being planned."""

    def __init__(self, limits: Limits, costs: CostModel) -> None:
        self._costs = costs
        self._watched = limits.itl_target is not None and limits.stages == 1 and not limits.encoder
        self._came = -LINGER  # when the last short prompt did
        self._reading = False  # a long one, in the last step that read prompts
        self.on = False

    def offer(self, tokens: int, now: float) -> None:
        """Only those count that meet a long one: streams which were there before want no first token."""
        if tokens <= SHORT and self._reading:
            self._came = now

    def begin(self, waiting: Sequence[Request], now: float) -> None:
        expected = self._watched and now - self._came < LINGER
        self.on = expected and (self._reading or any(one.known > LONG for one in waiting[:NEXT]))

    def reads(self, requests: Iterable[Request]) -> None:
        """These have been read in the step, or might have been, and may not have been read to their ends."""
        self._reading = any(request.known - request.planned > SHORT for request in requests)

    def seconds(self, decodes: int, work: int) -> float:
        """For prompts, beside so many decode rows."""
        base = self._costs.predict(decodes, work) if decodes else self._costs.coefficients[0]
        with_one = self._costs.predict(decodes + TYPICAL, work + pairs(0, TYPICAL))
        return LONGER * with_one - base

    def first(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """Short ones before the others, in their order."""
        return sorted(waiting, key=lambda request: request.known > SHORT) if self.on else waiting

    def shorts(self, requests: Iterable[Request]) -> list[Request]:
        """Those of the requests that others leave room to."""
        return [request for request in requests if request.known <= SHORT] if self.on else []

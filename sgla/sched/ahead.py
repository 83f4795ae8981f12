"""When the next step is planned, while others are in flight.

Not before these are about to end, where they last long: whoever comes meanwhile is in the next step and does
not wait for another one. While short prompts hurry, that holds for every step.
"""

from __future__ import annotations

import math

from sgla.sched.budget import CostModel
from sgla.sched.hurry import Hurry
from sgla.sched.limits import Limits
from sgla.sched.queues import Queues
from sgla.sched.step import Step

# Seconds that are enough to plan a step and to launch it: as a graph, and kernel by kernel.
GRAPH, LAUNCH = 0.003, 0.05
# Seconds of a step below which more may be in flight: from the end of one to the launch of the next but one
# the host takes 0.3 to 0.45 ms, now and then twice as long.
BRIEF = 0.001


class Ahead:
    def __init__(self, limits: Limits, queues: Queues, costs: CostModel, hurry: Hurry) -> None:
        self._queues, self._costs, self._hurry = queues, costs, hurry
        self._depth, self._most = limits.depth, max(limits.depth, limits.brief_depth)
        self._padded = limits.padded_drafts
        # Where copies begin with steps, these are planned early.
        copies = limits.tiers or limits.adapters
        self._patient = not (limits.itl_target is None or limits.stages > 1 or limits.encoder or copies)
        self._begun = 0.0  # when the oldest step in flight was
        self._brief = False  # the latest step to end was

    def when(self, now: float) -> float:
        """If nothing is told before; infinite: only a result can bring it about."""
        flights = self._queues.flights
        self._hurry.begin(self._queues.waiting, now)
        if not flights:
            self._begun = now
        elif len(flights) >= (self._most if self._more() else self._depth):
            return math.inf
        elif self._hurry.on or self._patient:
            over = self._begun + sum(step.seconds for step in flights)
            return over - (GRAPH if self._hurry.on else LAUNCH)
        return now

    def _more(self) -> bool:
        """Whether more may be in flight. Models guess with the latest tokens; what n-grams guess takes long
        to launch, and where those in flight have no guesses it is known where it begins."""
        queues = self._queues
        return (
            self._brief
            and not (self._hurry.on or queues.waiting)
            and all(step.steady for step in queues.flights)
            and (self._padded or not any(request.drafting for request in queues.running))
        )

    def expect(self, step: Step) -> None:
        """The step is to be the last in flight. Those of one token a row are short enough."""
        if self._hurry.on or step.decodes < len(step.rows):
            step.seconds = self._costs.predict(step.tokens, step.work)
        step.steady = self._most > self._depth and self._steady(step)

    def _steady(self, step: Step) -> bool:
        """It has one token of each row, and nobody has more to read behind it. No row guesses, and none has a
        grammar: the host has to know its token before the next step can begin."""
        return 0 < step.decodes == len(step.rows) == step.tokens and not any(
            request.known - request.planned > 1 or request.submit.sampling.grammar
            for request in self._queues.running
        )

    def ended(self, now: float, step: Step, seconds: float) -> None:
        """The oldest step has, which took so long."""
        self._begun = now
        self._brief = step.steady and 0 < seconds < BRIEF

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
# Seconds of a step below which one more is in flight: from the end of one to the launch of the next but one
# the host takes 0.3 to 0.45 ms, now and then twice as long.
BRIEF = 0.001


class Ahead:
    def __init__(self, limits: Limits, queues: Queues, costs: CostModel, hurry: Hurry) -> None:
        self._queues, self._costs, self._hurry = queues, costs, hurry
        self._depth, self._deeper = limits.depth, limits.deeper
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
        elif len(flights) >= self._depth + self._more():
            return math.inf
        elif self._hurry.on or self._patient:
            over = self._begun + sum(step.seconds for step in flights)
            return over - (GRAPH if self._hurry.on else LAUNCH)
        return now

    def _more(self) -> bool:
        """Whether there may be one more. Not where rows guess: how much depends on what was right."""
        return self._brief and not self._hurry.on and not any(step.guesses for step in self._queues.flights)

    def expect(self, step: Step) -> None:
        """The step is to be the last in flight. Those of one token a row are short enough."""
        if self._hurry.on or step.decodes < len(step.rows):
            step.seconds = self._costs.predict(step.tokens, step.work)

    def ended(self, now: float, step: Step, seconds: float) -> None:
        """The oldest step has, which took so long."""
        self._begun = now
        self._brief = self._deeper and 0 < step.decodes == len(step.rows) and seconds < BRIEF

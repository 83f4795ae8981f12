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


class Ahead:
    def __init__(self, limits: Limits, queues: Queues, costs: CostModel, hurry: Hurry) -> None:
        self._queues, self._costs, self._hurry, self._depth = queues, costs, hurry, limits.depth
        # Where copies begin with steps, these are planned early.
        copies = limits.tiers or limits.adapters
        self._patient = not (limits.itl_target is None or limits.stages > 1 or limits.encoder or copies)
        self._begun = 0.0  # when the oldest step in flight was

    def when(self, now: float) -> float:
        """If nothing is told before; infinite: only a result can bring it about."""
        flights = self._queues.flights
        self._hurry.begin(self._queues.waiting, now)
        if not flights:
            self._begun = now
        elif len(flights) >= self._depth:
            return math.inf
        elif self._hurry.on or self._patient:
            over = self._begun + sum(step.seconds for step in flights)
            return over - (GRAPH if self._hurry.on else LAUNCH)
        return now

    def expect(self, step: Step) -> None:
        """The step is to be the last in flight. Those of one token a row are short enough."""
        if self._hurry.on or step.decodes < len(step.rows):
            step.seconds = self._costs.predict(step.tokens, step.work)

    def ended(self, now: float) -> None:
        """The oldest step has."""
        self._begun = now

"""How many steps may be in flight."""

from __future__ import annotations

from sgla.sched.limits import Limits
from sgla.sched.step import Step

BRIEF = 0.002  # seconds: from a result to the launch of the step that needs it the host takes about one


class Depth:
    """``most``: one more than usual (``Limits.deeper``) while steps that guess are brief."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.most = limits.depth

    def took(self, step: Step, seconds: float) -> None:
        brief = self._limits.deeper and max(step.drafts, default=0) > 0 and seconds < BRIEF
        self.most = self._limits.depth + brief

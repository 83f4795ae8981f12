"""Where pages are short: who gives some up, and how many are kept free for what running requests may need.

Numbers of pages are lists with one for each cache group, or for the memory that groups share (``stock.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, le

from sgla.sched.memory import Memory
from sgla.sched.queues import Queues
from sgla.sched.request import Request

RESERVE_CLIP = 4096  # outputs a request is expected to have at most when pages are reserved
RATIO_RISE, RATIO_FALL = 0.1, 0.001


def together(start: list[int], more: Iterable[list[int]]) -> list[int]:
    """The sum."""
    return [sum(column) for column in zip(start, *more)]


def plus(one: list[int], other: list[int]) -> list[int]:
    """The sum of two."""
    return list(map(add, one, other))


def at_most(wanted: list[int], there: list[int]) -> bool:
    """In every group."""
    return all(map(le, wanted, there))


class Pressure:
    """``short``: pages that running rows lack in the plan being made."""

    def __init__(self, memory: Memory, queues: Queues, reserve: float) -> None:
        self._memory, self._queues, self._reserve = memory, queues, reserve
        self._none = [0] * len(memory.available)
        self.short = self._none
        self._ratio = reserve  # part of its possible outputs that a request is expected to produce

    def begin(self) -> None:
        """A plan begins."""
        self.short = self._none

    def relax(self) -> None:
        """A step is done."""
        self._ratio = max(self._reserve / 5, self._ratio - RATIO_FALL)

    def grow(self, request: Request, n: int) -> bool:
        """Give the request ``n`` more pages: free, else evicted, else from lower-ranked requests. Those give
        them back when their steps are done; until then the request misses a step."""
        memory, before = self._memory, self.short
        if memory.grow(request, n):
            return True
        self.short = plus(before, memory.short(request, n))
        while not at_most(self.short, self._coming()):
            victim = self._victim(request)
            if victim is None:
                return False
            self.preempt(victim)
            if memory.grow(request, n):
                self.short = before
                return True
        return False

    def preempt(self, request: Request) -> None:
        """Retract a running request. The more of them, the more pages are reserved."""
        self._ratio = min(1.0, self._ratio + RATIO_RISE)
        self._queues.preempt(request)

    def _victim(self, claimant: Request) -> Request | None:
        """The lowest-ranked running request below ``claimant``, leaving aside those about to end."""
        for request in reversed(self._queues.running):
            if request is claimant:
                return None
            if request.planned < request.goal:
                return request
        return None

    def _coming(self) -> list[int]:
        """Pages that requests on their way out will give back. What they found in the tree is not counted."""
        queues = self._queues
        leaving = queues.draining + [r for r in queues.running if r.planned >= r.goal]
        return together(self._none, map(self._memory.own, leaving))

    def fits(self, wanted: list[int]) -> bool:
        """Whether there are as many pages, free or to be evicted."""
        return at_most(wanted, self._memory.available)

    def expected(self, requests: Iterable[Request]) -> list[int]:
        """Pages that the requests are expected to need beside those they have."""
        return together(self._none, map(self.lacking, requests))

    def lacking(self, request: Request) -> list[int]:
        """``expected`` of one, for its known tokens and its outputs. Of these the expectation rises with each
        retraction and falls slowly, as in SGLang."""
        known = request.known
        tokens = known + self._ratio * min(request.limit - known, RESERVE_CLIP)
        return self._memory.lacking(request, int(tokens))

"""Copies of prefixes and adapters that begin while a request waits for its turn."""

from __future__ import annotations

from sgla.messages import PAGES
from sgla.sched.memory import Memory
from sgla.sched.queues import Queues
from sgla.sched.request import Request, State

ASKED = 8  # requests that come next, for which tiers are asked
AHEAD = 4  # part of the device's pages that may be brought, unless it is for one request alone


class Prefetch:
    """So that copies run beside the steps that others wait for. A request is held until pages that are
    brought have come, and keeps its turn; the tree has them then, and may lose them again, since nobody holds
    them. So it is with adapters and places, but that nobody is held."""

    def __init__(self, memory: Memory, queues: Queues, rows: int) -> None:
        """``rows``: requests that may run."""
        self._memory, self._queues, self._rows = memory, queues, rows
        self._most = memory.pool.total // AHEAD
        self._brought: dict[Request, int] = {}  # pages of those whose turn has not come

    def begin(self) -> None:
        """Ask for the prefixes of the requests that come next, once for each. Where others run, their
        adapters come, too."""
        memory, queues = self._memory, self._queues
        if memory.adapters.count and queues.running:
            memory.adapters.expect([request.adapter for request in queues.waiting[: self._rows]])
        if not (memory.transfers.keeps and queues.waiting):
            return
        early = (State.WAITING, State.HELD)
        self._brought = {r: pages for r, pages in self._brought.items() if r.state in early}
        for request in queues.waiting[:ASKED]:
            room = self._most - sum(self._brought.values()) if self._brought else memory.pool.total
            if room <= 0:
                return
            if not request.fetched:
                self._fetch(request, room)

    def _fetch(self, request: Request, room: int) -> None:
        had = request.brought
        held = self._memory.prefetch(request, room)
        if held is None:
            return
        if held:
            self._queues.hold(request, PAGES)
        if request.brought != had:
            self._brought[request] = request.brought[1]
        request.fetched = not held or request.brought != had

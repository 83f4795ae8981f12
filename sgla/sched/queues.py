"""Every request from ``offer`` to its last unit, in the queue of its state, and the steps in flight.

A request moves from one queue to another here alone, as docs/design.md ("The life of a request") has it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush

from sgla.cache.spaces import RENEWED
from sgla.messages import Ready, Submit, int32
from sgla.sched.limits import Limits
from sgla.sched.memory import Memory
from sgla.sched.request import OWNERS, Prompt, Request, State
from sgla.sched.stats import Ledger
from sgla.sched.step import Step
from sgla.sched.turns import Turns


def _by_rank(request: Request) -> tuple[float, int, float, int]:
    return request.rank


def _by_turn(request: Request) -> tuple[bool, int, float, int]:
    return request.yields, request.turn, request.arrival, request.seq


def _yields(request: Request) -> bool:
    return request.yields


def before_yielding(requests: list[Request]) -> int:
    """How many come before those that yield, which are the last."""
    return bisect_left(requests, True, key=_yields)


class Queues:
    """``open``: the requests that have not ended."""

    def __init__(self, limits: Limits, memory: Memory, ledger: Ledger) -> None:
        self.open: dict[str, Request] = {}
        self.held: dict[str, Request] = {}
        self.waiting: list[Request] = []  # by turn, then by arrival; those that yield last
        self.running: list[Request] = []  # by rank; also the row order
        self.draining: list[Request] = []
        self.flights: deque[Step] = deque()
        self.steps = 0  # planned
        self.weights = ""  # the name of those that have come since the start
        self.turns = Turns()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._seq = 0
        self._prompt = Prompt([])  # of the latest request
        self._limits, self._memory, self._ledger = limits, memory, ledger

    @property
    def empty(self) -> bool:
        """No request, and no step in flight."""
        return not (self.open or self.draining or self.flights)

    def candidates(self) -> list[Request]:
        """Of those that wait: those that yield only if nobody else does."""
        waiting = self.waiting
        mixed = bool(waiting) and not waiting[0].yields and waiting[-1].yields
        return waiting[: before_yielding(waiting)] if mixed else waiting

    def add(self, submit: Submit, max_new: int, now: float) -> None:
        """A new request, held or waiting."""
        self._seq += 1
        priority = submit.priority if self._limits.policy == "priority" else 0
        if submit.tokens is not self._prompt.given:
            self._prompt = Prompt(submit.tokens)
        turn = 0 if submit.yields else self.turns.take(submit.client, alone=not self.waiting)
        request = Request(submit, self._prompt, max_new, self._seq, submit.arrival or now, priority, turn)
        if self._limits.canvas:
            request.goal = (
                request.limit
            )  # KV of its last block is never needed, and how long that is is not known
        request.namespace = self.space(submit)
        for position, digest in submit.media:
            page, offset = divmod(position, self._limits.page_size)
            request.marks[page] = request.marks.get(page, b"") + int32((offset, len(digest))) + digest
        self.open[request.rid] = request
        if request.state is State.HELD:
            self.held[request.rid] = request
        else:
            insort(self.waiting, request, key=_by_turn)
        if submit.deadline is not None:
            heappush(self._deadlines, (submit.deadline, self._seq, request))
            if len(self._deadlines) > 2 * len(self.open) + 64:
                self._deadlines = sorted(entry for entry in self._deadlines if entry[2].finish is None)

    def renew(self, weights: str) -> None:
        """Weights have become others: who begins from now on finds nothing that is of the old ones, in no
        tier either. Requests that run go on with what they have."""
        self.weights = weights
        self._memory.rests.clear()
        for request in (*self.waiting, *self.held.values()):
            request.renew(self.space(request.submit))

    def space(self, submit: Submit) -> str:
        """No other request's begins like that of one with other weights."""
        if not self.weights and not submit.namespace.startswith(RENEWED):
            return submit.namespace
        return f"{RENEWED}{self.weights}{RENEWED}{submit.namespace}"

    @property
    def next_deadline(self) -> float | None:
        """Of a request, which may have ended."""
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now: float) -> list[Request]:
        """Those that have not ended by their deadline, each told once."""
        found = []
        while self._deadlines and (self._deadlines[0][2].finish or self._deadlines[0][0] <= now):
            request = heappop(self._deadlines)[2]
            if request.finish is None:
                found.append(request)
        return found

    def ready(self, told: Ready) -> None:
        """Something that a request is held for is there. The request may have ended meanwhile."""
        request = self.held.get(told.rid)
        if request is not None and request.ready(told):
            del self.held[told.rid]
            insort(self.waiting, request, key=_by_turn)

    def hold(self, request: Request, reason: str) -> None:
        """A copy brings what a waiting request needs: its adapter, or pages."""
        self._unlist(request)
        request.hold(reason)
        self.held[request.rid] = request

    def run(self, request: Request, now: float) -> None:
        """A waiting request, which has its slot, takes part in steps."""
        self._unlist(request)
        request.run(now)
        insort(self.running, request, key=_by_rank)

    def preempt(self, request: Request) -> None:
        """Retract: the request gives its memory up and will start over from its committed tokens."""
        self.running.remove(request)
        self._ledger.counts.preemptions += 1
        self._leave(request)

    def end(self, request: Request, reason: str, now: float) -> None:
        """The request produces nothing more. Its slot and units are free as soon as no submitted step has
        it."""
        request.finish = reason
        del self.open[request.rid]
        self._ended(request, reason, now)
        self._memory.rests.drop(request.rid)
        if request.state is State.WAITING:
            self._unlist(request)
            request.end()
        elif request.state is State.HELD:
            del self.held[request.rid]
            self._memory.transfers.leave(request.rid)
            self._memory.adapters.leave(request.rid)
            request.end()
        elif request.state is State.RUNNING:
            self.running.remove(request)
            self._leave(request)

    def _ended(self, request: Request, reason: str, now: float) -> None:
        if request.scheduled is not None:
            self._ledger.missed(request, self._limits.page_size)
        self._ledger.ended(request, reason, now)

    def conclude(self, ended: list[Request], step: int, now: float) -> None:
        """The result of this ``step`` has come. Requests that have ``ended`` with it leave; those that no
        step contains any more are released."""
        for request in ended:
            del self.open[request.rid]
            self._ended(request, request.finish or "", now)
        if ended:
            leaving = [r for r in ended if r.state is State.RUNNING]
            self.running = [r for r in self.running if r.finish is None]
            for request in leaving:
                self._leave(request)
        if self.draining:
            settled = [r for r in self.draining if r.last_step <= step]
            self.draining = [r for r in self.draining if r.last_step > step]
            for request in settled:
                self._settle(request)

    def _unlist(self, request: Request) -> None:
        """Take a waiting request off the list."""
        del self.waiting[bisect_left(self.waiting, _by_turn(request), key=_by_turn)]

    def _leave(self, request: Request) -> None:
        """A running request, taken off the list already, takes no more steps;
        it holds memory while one contains it."""
        request.leave()
        if request.last_step >= self._oldest:
            self.draining.append(request)
        else:
            self._settle(request)

    @property
    def _oldest(self) -> int:
        """Number of the oldest step in flight; the one being planned counts."""
        return self.flights[0].number if self.flights else self.steps + 1

    def _settle(self, request: Request) -> None:
        """No submitted step contains the request any more."""
        self._memory.release(request)
        if request.finish is None:
            request.requeue()
            insort(self.waiting, request, key=_by_turn)
        else:
            request.end()

    def check(self) -> None:
        """Raises AssertionError if a request is in no queue, or in a wrong one."""
        states = (
            (list(self.held.values()), State.HELD),
            (self.waiting, State.WAITING),
            (self.running, State.RUNNING),
            (self.draining, State.DRAINING),
        )
        for requests, state in states:
            assert all(request.state is state for request in requests), f"not all are {state}"
        listed = [request for requests, _ in states for request in requests]
        for request in listed:
            assert (request.slot >= 0) == (request.state in OWNERS), "a slot without an owner"
            assert bool(request.holds) == (request.state is State.HELD), "held for nothing"
            assert request.finish is None or request.state is State.DRAINING, (
                "an ended request is still listed"
            )
        assert sorted(r.rid for r in listed if r.finish is None) == sorted(self.open), (
            "an open request is in no list"
        )
        assert self.waiting == sorted(self.waiting, key=_by_turn), "the waiting list is out of order"
        assert self.running == sorted(self.running, key=_by_rank), "the running list is out of order"
        assert all(request.last_step >= self._oldest for request in self.draining), "drained but still held"

"""Which waiting requests start in a step."""

from __future__ import annotations

from functools import partial

from sgla.messages import ADAPTER, PAGES
from sgla.sched.adapters import PLACE
from sgla.sched.budget import Budget
from sgla.sched.hurry import Hurry
from sgla.sched.limits import FLIGHT_BYTES, STEP_BYTES, Limits
from sgla.sched.memory import Memory
from sgla.sched.policy import Auto, order
from sgla.sched.prefill import Prefill
from sgla.sched.pressure import Pressure, plus
from sgla.sched.queues import Queues
from sgla.sched.request import Request, State
from sgla.sched.stats import Ledger
from sgla.sched.step import Step

ALONE = 256  # tokens behind those that it knows, that a request computes before others join it


class Admission:
    """In the order of the policy, as long as slots, pages and the step's budget last."""

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        queues: Queues,
        pressure: Pressure,
        prefill: Prefill,
        hurry: Hurry,
        ledger: Ledger,
    ) -> None:
        self._limits, self._memory, self._queues, self._pressure = limits, memory, queues, pressure
        self._prefill, self._hurry, self._ledger = prefill, hurry, ledger
        self._auto = Auto() if limits.policy == "auto" else None
        self._reserved: list[int] = []  # pages that running rows are expected to need, of each cache group
        self._gathered: set[str] = set()  # requests whose adapters others wait for, with which they begin
        self._anew = False  # one request is to begin that keeps others from it
        self._alone: Request | None = None  # it has begun
        self._until = 0  # so many of its tokens are computed

    def admit(self, step: Step, budget: Budget, now: float) -> None:
        queues, memory, limits = self._queues, self._memory, self._limits
        if self._alone is not None:
            if self._alone.state is State.RUNNING and self._alone.planned < self._until:
                return
            self._alone = None
        waiting = queues.candidates()
        if not waiting or budget.tokens <= 0:
            return
        queues.turns.serve(waiting[0].turn, len(waiting))
        may_displace = limits.policy == "priority" or (bool(queues.running) and queues.running[-1].yields)
        if not (memory.slots or may_displace):
            return
        promised = len(queues.draining)
        self._reserved = self._pressure.expected(queues.running)
        counts = self._ledger.counts
        policy = self._auto.look(counts.query_tokens, counts.hit_tokens) if self._auto else limits.policy
        ordered = self._hurry.first(order(policy, waiting, memory.cache, now, limits.patience))
        gathers = False
        if memory.adapters.count and not (queues.running or any(flight.rows for flight in queues.flights)):
            gathers = self._gather(ordered := list(ordered), budget)
        else:
            self._gathered.clear()
        flying = sum(flight.plan_bytes for flight in queues.flights)
        last = len(waiting) - 1
        coming = len(memory.adapters.held)
        for i, request in enumerate(ordered):
            plan_bytes = step.plan_bytes + request.plan_bytes
            if budget.tokens <= 0 or (step.plan_bytes and plan_bytes > STEP_BYTES):
                return
            if flying and flying + plan_bytes > FLIGHT_BYTES:
                return
            if gathers and request.adapter:
                continue
            if awaited := self._await_adapter(request, may_displace or coming < len(memory.slots)):
                if awaited == ADAPTER:
                    queues.hold(request, ADAPTER)
                    coming += 1
                continue
            if not memory.slots:
                if not may_displace:
                    return
                if promised:  # a slot is on its way to this one
                    promised -= 1
                    continue
                if not self._displace(request):
                    return
                if not memory.slots:
                    continue
            if not self._admit_one(step, request, budget, i < last, now):
                return
            if self._anew and request.state is State.RUNNING:
                self._alone, self._anew, self._until = request, False, request.known + ALONE
                return

    def begin_anew(self) -> None:
        """Nobody can go on: of a memory that groups share each slab that one lacks has a page of another. So
        all give theirs back, and one begins with all of it, alone for a while: it gets further each time."""
        assert self._limits.groups[0].slab, "requests wait for nothing"
        assert not self._anew, "a request does not fit into all of the memory"
        for request in list(self._queues.running):
            self._pressure.preempt(request)
        self._memory.flush()
        self._anew = True

    def _gather(self, requests: list[Request], budget: Budget) -> bool:
        """Nobody runs: the first ones, as many as one step has room for, begin together in it, and the
        adapters of those that have slots are brought. Returns whether some have to wait for theirs. For who
        comes meanwhile nobody waits: while adapters come, others may go on coming."""
        adapters, queues, tokens = self._memory.adapters, self._queues, budget.tokens
        held = [queues.held[rid] for rid in adapters.held]
        first = (held + requests)[: len(self._memory.slots)]
        adapters.expect([request.adapter for request in first], len(first))
        if self._gathered:
            self._gathered.intersection_update(adapters.held)
            return bool(self._gathered)
        for request in first:
            if tokens > 0 and not request.holds and adapters.comes(request.adapter):
                adapters.awaited(request, False)
                queues.hold(request, ADAPTER)
            tokens -= request.known
        self._gathered.update(adapters.held)
        return bool(self._gathered)

    def _await_adapter(self, request: Request, bring: bool) -> str:
        """See ``Adapters.awaited``. Requests that yield leave the place that another one is to have."""
        awaited = self._memory.adapters.awaited(request, bring)
        place = self._memory.adapters.claimed(request.adapter) if awaited == PLACE else 0
        if not place or request.yields:
            return awaited
        leaving = [other for other in self._queues.running if other.yields and other.place == place]
        for other in leaving:
            self._pressure.preempt(other)
        return self._memory.adapters.awaited(request) if leaving else awaited

    def _displace(self, request: Request) -> bool:
        """Retract the lowest-ranked running request if ``request`` has a higher priority,
        or that one yields to it."""
        if not self._queues.running:
            return False
        victim = self._queues.running[-1]
        higher = self._limits.policy == "priority" and request.submit.priority > victim.submit.priority
        if request.yields or victim.yields:
            higher = victim.yields and not request.yields
        if not higher or victim.boosted or victim.planned >= victim.goal:
            return False
        self._reserved = [r - lacking for r, lacking in zip(self._reserved, self._pressure.lacking(victim))]
        self._pressure.preempt(victim)
        return True

    def _admit_one(self, step: Step, request: Request, budget: Budget, others: bool, now: float) -> bool:
        """Admit a waiting request to this step, if it fits beside what the running ones will need, or leave
        it to the next, which can begin with more of it. False: it does not fit."""
        memory, limits = self._memory, self._limits
        if memory.attach(request):
            return True
        while not self._fits(request):
            if self._queues.draining or not self._displace(request):
                memory.release(request)
                return False
        if memory.load(request, partial(self._prefill.seconds, step, request, budget)):
            self._queues.hold(request, PAGES)
            return True
        given = memory.rests.give(request, limits.page_size)
        count = self._prefill.chunk(request, budget, others)
        lacking = -(-(request.planned + count - request.allocated) // limits.page_size)
        lacking = min(lacking, memory.room(request))
        roomy = limits.encoder and count > 0
        if not roomy and (count <= 0 or (lacking > 0 and not memory.grow(request, lacking))):
            count = 0
        else:
            count = self._prefill.uncut(request, min(count, request.allocated - request.planned), 0)
        if not count:
            if given:
                memory.rests.take_back(request, limits.page_size)
            memory.release(request)
            return False
        self._queues.run(request, now)
        request.drafting = bool(limits.drafts) and request.may_guess(limits.guided_drafts)
        if request.preemptions == 0:
            self._ledger.counts.query_tokens += request.known
            self._ledger.counts.prompt_tokens += request.prompt_len
            memory.remember(request)
        self._prefill.count_hit(request, request.borrowed)
        step.add_new(request)
        self._prefill.add(step, request, count, budget)
        self._reserved = plus(self._reserved, self._pressure.lacking(request))
        return True

    def _fits(self, request: Request) -> bool:
        """Pages suffice for its known tokens, and for the outputs expected of it and of the running requests.
        Alone, it always fits."""
        if any(self._pressure.short):
            return False
        if not self._queues.running and not self._queues.draining:
            return True
        return self._pressure.fits(plus(self._reserved, self._pressure.lacking(request)))

"""The scheduler: decides what every step computes.

The caller drives it: ``offer``, ``ready`` and ``cancel`` at any time, ``retire`` for each result in order,
then ``plan`` until it returns ``None``. Nothing here waits, reads a clock or draws a random number.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice
from operator import le

from msgspec.structs import replace

from sgla.errors import DeadlineExceeded, SglaError
from sgla.messages import LONGEST, PAGES, Delta, Moved, Ready, StepCost, StepPlan, StepResult, Submit, int32
from sgla.sched.budget import Budget, CostModel, can_wait
from sgla.sched.commit import commit
from sgla.sched.limits import FLIGHT_BYTES, STEP_BYTES, VERIFIED, Limits, wide_tokens
from sgla.sched.memory import Memory, SlotsOnly
from sgla.sched.policy import order
from sgla.sched.request import OWNERS, Prompt, Request, State
from sgla.sched.stats import Finished, Ledger, Stats, WindowStats
from sgla.sched.step import Step
from sgla.sched.turns import Turns

RESERVE_CLIP = 4096  # outputs a request is expected to have at most when pages are reserved
RATIO_RISE, RATIO_FALL = 0.1, 0.001


def _sum(start: list[int], more: Iterable[list[int]]) -> list[int]:
    """Of numbers of pages, group by group."""
    return [sum(column) for column in zip(start, *more)]


def _at_most(wanted: list[int], there: list[int]) -> bool:
    """In every group."""
    return all(map(le, wanted, there))


def _by_rank(request: Request) -> tuple[float, int, float, int]:
    return request.rank


def _by_turn(request: Request) -> tuple[bool, int, float, int]:
    return request.yields, request.turn, request.arrival, request.seq


def _yields(request: Request) -> bool:
    return request.yields


class Core:
    """All requests from ``offer`` to their last page."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._memory = SlotsOnly(limits) if limits.encoder else Memory(limits)
        self._costs = CostModel(limits.itl_target, limits.step_tokens)
        self._table = limits.costs or [StepCost(tokens=limits.step_tokens)]
        self._open: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._waiting: list[Request] = []  # by turn, then by arrival; those that yield last
        self._running: list[Request] = []  # by rank; also the row order
        self._draining: list[Request] = []
        self._flights: deque[Step] = deque()
        self._turns = Turns()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._now = 0.0  # the latest time told
        self._seq = 0
        self._steps = 0
        self._none = [0] * len(limits.groups)
        self._paged = len(limits.groups) - limits.recurrent
        self._short = self._none  # pages that running rows lack in the plan being made, of each cache group
        self._reserved = self._none  # pages that they are expected to need
        self._ratio = limits.reserve  # part of its possible outputs that a request is expected to produce
        self._last = Step(0)
        self._prompt = Prompt([])  # of the latest request
        self._ledger = Ledger()

    # --- requests come and go

    def offer(self, submit: Submit, now: float) -> None:
        """Take a request. ``max_new`` is cut to what the context and the pool can hold. How many may wait is
        not decided here: whoever admits requests has done so.

        Raises ContextTooLong (it could never run), InvalidField (empty prompt, huge answers).
        """
        self._now = now
        assert submit.rid not in self._open, f"request {submit.rid} offered twice"
        try:
            max_new = self.limits.outputs(submit)
        except SglaError:
            self._ledger.counts.rejected += 1
            raise
        self._seq += 1
        priority = submit.priority if self.limits.policy == "priority" else 0
        if submit.tokens is not self._prompt.given:
            self._prompt = Prompt(submit.tokens)
        turn = 0 if submit.yields else self._turns.take(submit.client, alone=not self._waiting)
        request = Request(submit, self._prompt, max_new, self._seq, submit.arrival or now, priority, turn)
        for position, digest in submit.media:
            page, offset = divmod(position, self.limits.page_size)
            request.marks[page] = request.marks.get(page, b"") + int32((offset, len(digest))) + digest
        self._open[request.rid] = request
        if request.state is State.HELD:
            self._held[request.rid] = request
        else:
            insort(self._waiting, request, key=_by_turn)
        if submit.deadline is not None:
            heappush(self._deadlines, (submit.deadline, self._seq, request))
            if len(self._deadlines) > 2 * len(self._open) + 64:
                self._deadlines = sorted(entry for entry in self._deadlines if entry[2].finish is None)

    def ready(self, told: Ready) -> None:
        """Something that a request is held for is there. The request may have ended meanwhile."""
        request = self._held.get(told.rid)
        if request is not None and request.ready(told):
            del self._held[told.rid]
            insort(self._waiting, request, key=_by_turn)

    def moved(self, moved: Moved) -> None:
        """A copy has ended. Whoever was held for it waits for room again, and finds its pages in the tree, or
        computes them if it failed."""
        for rid in self._memory.transfers.moved(moved):
            self.ready(Ready(rid=rid, reason=PAGES))

    def cancel(self, rid: str, reason: str) -> Delta | None:
        """End a request in whatever state. Returns its last Delta, with finish ``stop`` if ``reason`` is
        ``stop`` (a stop string was seen) and ``abort`` otherwise; ``None`` if it is unknown or has ended. Its
        slot and pages are free as soon as no submitted step contains it."""
        request = self._open.get(rid)
        if request is None:
            return None
        finish = "stop" if reason == "stop" else "abort"
        self._end(request, finish)
        return Delta(rid=rid, finish=finish)

    def expire(self, now: float) -> list[Delta]:
        """End the requests whose deadline has passed, with a DeadlineExceeded error."""
        self._now = now
        deltas = []
        while self._deadlines and (self._deadlines[0][2].finish or self._deadlines[0][0] <= now):
            request = heappop(self._deadlines)[2]
            if request.finish is None:
                self._end(request, "error")
                error = DeadlineExceeded(
                    f"The request was not done {now - request.arrival:.1f} s after its arrival."
                )
                rejected = error.rejected(request.submit.parent)
                deltas.append(Delta(rid=request.rid, finish="error", error=rejected))
        return deltas

    @property
    def next_deadline(self) -> float | None:
        """When ``expire`` may have something to do."""
        return self._deadlines[0][0] if self._deadlines else None

    def _end(self, request: Request, reason: str) -> None:
        """The request produces nothing more."""
        request.finish = reason
        del self._open[request.rid]
        self._ledger.ended(request, reason, self._now)
        if request.state is State.WAITING:
            self._unlist(request)
            request.end()
        elif request.state is State.HELD:
            del self._held[request.rid]
            request.end()
        elif request.state is State.RUNNING:
            self._running.remove(request)
            self._leave(request)

    def _unlist(self, request: Request) -> None:
        """Take a waiting request off the list."""
        del self._waiting[bisect_left(self._waiting, _by_turn(request), key=_by_turn)]

    def _leave(self, request: Request) -> None:
        """A running request, taken off the list already, takes no more steps;
        it holds memory while one contains it."""
        request.leave()
        if request.last_step >= self._oldest:
            self._draining.append(request)
        else:
            self._settle(request)

    @property
    def _oldest(self) -> int:
        """Number of the oldest step in flight; the one being planned counts."""
        return self._flights[0].number if self._flights else self._steps + 1

    def _settle(self, request: Request) -> None:
        """No submitted step contains the request any more."""
        self._memory.release(request)
        if request.finish is None:
            request.requeue()
            insort(self._waiting, request, key=_by_turn)
        else:
            request.end()

    def _preempt(self, request: Request) -> None:
        """Retract: the request gives its memory up and will start over from its committed tokens."""
        self._running.remove(request)
        self._ledger.counts.preemptions += 1
        self._ratio = min(1.0, self._ratio + RATIO_RISE)
        self._leave(request)

    # --- planning

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or ``None``: nothing can run, or ``depth`` steps are in flight."""
        self._now = now
        memory = self._memory
        transfers = memory.transfers
        if len(self._flights) >= self.limits.depth or not (
            self._running or self._waiting or transfers.copies
        ):
            return None
        step = Step(self._steps + 1, self._paged)
        self._short = self._none
        prefills = self._plan_verifies(step) if self.limits.drafts else self._plan_decodes(step)
        if prefills or self._waiting:
            first = prefills[0] if prefills else self._waiting[0]
            budget = self._budget(step, first.yields)
            self._plan_prefills(step, prefills, budget)
            if self._waiting and budget.tokens > 0:
                self._admit(step, budget)
        if not (step.rows or transfers.copies):
            busy = self._flights or transfers.under_way
            assert busy or not (self._running or self._waiting), "requests wait for nothing"
            return None
        for request in step.rows[step.decodes :]:
            memory.slide(request)
        if self.limits.recurrent:
            self._checkpoint_outputs(step)
            memory.planned()
        step.zeroed, memory.spoiled = memory.spoiled, []
        step.copies, transfers.copies = transfers.copies, []
        self._steps += 1
        self._flights.append(step)
        self._last = step
        return step.encode()

    def _plan_decodes(self, step: Step) -> list[Request]:
        """One token for each row that has one to compute;
        returns the rows that have more, or prompt, to compute."""
        prefills: list[Request] = []
        rows: list[Request] = []
        slots: list[int] = []
        starts: list[int] = []
        number = step.number
        for request in islice(self._running, self._taking_part()):  # _grow may remove later ones
            planned = request.planned
            if planned >= request.goal:
                continue
            if planned < request.prompt_len or request.known - planned > 1:
                prefills.append(request)
                continue
            if planned == request.allocated:
                if not self._grow(request, 1):
                    continue
                step.tell_pages(request)
            rows.append(request)
            slots.append(request.slot)
            starts.append(planned)
            request.planned = planned + 1
            request.known = planned + 2
            request.last_step = number
        step.set_decodes(rows, slots, starts)
        return prefills

    def _plan_verifies(self, step: Step) -> list[Request]:
        """``_plan_decodes`` where rows may guess."""
        prefills: list[Request] = []
        running = list(islice(self._running, self._taking_part()))
        room = min(VERIFIED, self.limits.step_tokens) // max(len(running), 1)
        most = min(self.limits.drafts, max(room - 1, 0))
        page = self.limits.page_size
        for request in running:
            if request.state is not State.RUNNING or request.planned >= request.goal:
                continue
            if request.planned < request.prompt_len or request.known - request.planned > 1:
                prefills.append(request)
                continue
            drafts = most if request.drafting else 0
            lacking = -(-(min(request.planned + 1 + drafts, request.goal) - request.allocated) // page)
            if lacking > 0 and drafts and lacking > self._memory.room(request):
                drafts = 0
                lacking = -(-(request.planned + 1 - request.allocated) // page)
            if lacking > 0:
                if not self._grow(request, lacking):
                    continue
                step.tell_pages(request)
            step.add_verify(request, drafts, request.goal)
        return prefills

    def _taking_part(self) -> int | None:
        """How many of the running requests the step is for; None: all. Those that yield are the last: none of
        them while another request waits or reads its prompt, beside decode rows as many as make the step
        little longer, and one at least."""
        running = self._running
        if not running or not running[-1].yields:
            return None
        others = bisect_left(running, True, key=_yields)
        if self._waiting and not self._waiting[0].yields:
            return others
        if not others:
            return None
        if any(request.known - request.planned != 1 for request in running[:others]):
            return others
        lengths = [request.planned for request in running]
        return others + max(1, self._costs.more_rows(lengths[:others], lengths[others:]))

    def _budget(self, step: Step, yields: bool) -> Budget:
        """``yields``: the prompts are of requests that do."""
        limits = self.limits
        seconds = self._costs.prefill_seconds(step.tokens, step.work)
        if yields:
            beside = bool(step.rows) and not step.rows[0].yields
            least = self._costs.yielding_seconds(step.tokens, step.work, beside, limits.depth)
            seconds = min(seconds, least)
        cost = self._cost(step)
        tokens = min(limits.step_tokens, max(cost.tokens, 2 * step.tokens)) - step.tokens
        return Budget(
            tokens, seconds, self._costs.coefficients, limits.page_size, step.tokens, cost.tile, cost.prompts
        )

    def _cost(self, step: Step) -> StepCost:
        """The kind of step in which prompts are read:
        the cheapest beside decode rows if they can wait, else the one that takes most."""
        *cheap, largest = self._table
        if step.decodes:
            for cost in cheap:
                if self._unhurried(cost.longest):
                    return cost
        return largest

    def _unhurried(self, longest: int) -> bool:
        """Nobody watches, all that wait have a place, so that none is in the way of another, have at most
        ``longest`` tokens, and end before one that runs."""
        if self.limits.itl_target is not None or len(self._waiting) > len(self._memory.slots):
            return False
        if not can_wait(self._running, self._waiting, longest):
            return False
        return _at_most(self._all_lacking(self._running + self._waiting), self._memory.available)

    def _plan_prefills(self, step: Step, prefills: list[Request], budget: Budget) -> None:
        for i, request in enumerate(prefills):
            if budget.tokens <= 0:
                return
            if request.state is not State.RUNNING:  # retracted for an earlier row
                continue
            pages = self._memory.catch_up(request)
            if pages is None:
                continue
            self._count_hit(request, pages)
            others = i + 1 < len(prefills) or bool(
                self._waiting and self._waiting[0].yields <= request.yields
            )
            count = self._chunk(request, budget, others)
            count = self._fit(request, count)
            if count > 0:
                self._add_prefill(step, request, count, budget)

    def _chunk(self, request: Request, budget: Budget, others: bool) -> int:
        """Tokens the request gets of this step. A chunk that is not the last ends on a page, so that it can
        be shared. It ends before a tile of the step that neither it nor ``others`` can fill, if that leaves
        the step a tile of prefill.

        A prompt longer than a whole step leaves half of it to the ``others``:
        behind a 100k-token prompt, short ones go on.
        """
        need = request.known - request.planned
        if self.limits.encoder:  # all or nothing; what is longer than a step goes alone
            return need if need <= budget.tokens or budget.tokens == self.limits.step_tokens else 0
        share = 0.5 if others and need > self.limits.step_tokens else 1.0
        wide = self._wide(request)
        if wide is not None and budget.wide:
            return 0
        count = budget.grant(request.planned, need if wide is None else min(need, wide), share)
        if wide is not None:
            return count
        if count < need or budget.seconds < math.inf:
            count = budget.whole_tiles(request.planned, count, others)
        if count < need:
            page = self.limits.page_size
            aligned = (request.planned + count) // page * page - request.planned
            if aligned > 0:
                count = aligned
        return count

    def _wide(self, request: Request) -> int | None:
        """``wide_tokens`` as long as the request owes logprobs of its prompt;
        ``stated_tokens`` if it wants hidden states."""
        wide = None if request.prompt_logprobs is None else wide_tokens(request.submit.sampling)
        if request.states is None:
            return wide
        return min(wide or LONGEST, self.limits.stated_tokens)

    def _fit(self, request: Request, count: int) -> int:
        """Get pages for ``count`` more tokens; returns for how many there are."""
        page = self.limits.page_size
        lacking = -(-(request.planned + count - request.allocated) // page)
        if lacking > 0:
            self._memory.slide(request)
            lacking = min(lacking, self._memory.room(request))
            # With no page to be had it goes on with the room it has;
            # a request with none takes it from others.
            stuck = not lacking and request.allocated == request.planned
            if (lacking or stuck) and not self._grow(request, max(lacking, 1)):
                return 0
        return min(count, request.allocated - request.planned)

    def _add_prefill(self, step: Step, request: Request, count: int, budget: Budget) -> None:
        complete = request.planned + count == request.known
        long = request.known - request.planned > self.limits.step_tokens
        wide = self._wide(request) is not None
        budget.wide |= wide
        budget.spend(request.planned, count)
        start = request.planned
        step.add_prefill(request, count)
        self._memory.share(request)
        if self.limits.recurrent:
            self._hand_states(step, request, start)
        if not (complete or long or wide):
            # The rest of an aligned chunk must not go to a request that would compute the same page.
            budget.close()

    def _hand_states(self, step: Step, request: Request, start: int) -> None:
        """Tell the states that the request's row, which begins at ``start``, reads and leaves in the tree."""
        assert self._memory.states is not None
        if request.read:
            self._memory.states.pin(request.read)
            step.read_state(request)
        step.add_checkpoints(request, self._memory.checkpoint(request, start))

    def _checkpoint_outputs(self, step: Step) -> None:
        for request in step.rows[: step.decodes]:
            if not request.drafting:  # where its rows begin is known
                step.add_checkpoints(request, self._memory.checkpoint_output(request))

    # --- page pressure

    def _grow(self, request: Request, n: int) -> bool:
        """Give the request ``n`` more pages: free, else evicted, else from lower-ranked requests. Those give
        them back when their steps are done; until then the request misses a step."""
        memory, before = self._memory, self._short
        if memory.grow(request, n):
            return True
        wanted = zip(before, memory.wanted(request, n), memory.available)
        self._short = [short + (w if w > there else 0) for short, w, there in wanted]
        while not _at_most(self._short, self._coming()):
            victim = self._victim(request)
            if victim is None:
                return False
            self._preempt(victim)
            if memory.grow(request, n):
                self._short = before
                return True
        return False

    def _victim(self, claimant: Request) -> Request | None:
        """The lowest-ranked running request below ``claimant``, leaving aside those about to end."""
        for request in reversed(self._running):
            if request is claimant:
                return None
            if request.planned < request.goal:
                return request
        return None

    def _coming(self) -> list[int]:
        """Pages that requests on their way out will give back. What they found in the tree is not counted."""
        leaving = self._draining + [r for r in self._running if r.planned >= r.goal]
        return _sum(self._none, map(self._memory.own, leaving))

    # --- admission

    def _admit(self, step: Step, budget: Budget) -> None:
        waiting = self._waiting
        if not waiting[0].yields and waiting[-1].yields:
            waiting = waiting[: bisect_left(waiting, True, key=_yields)]
        self._turns.serve(waiting[0].turn, len(waiting))
        may_displace = self.limits.policy == "priority" or (bool(self._running) and self._running[-1].yields)
        if not (self._memory.slots or may_displace):
            return
        promised = len(self._draining)
        self._reserved = self._all_lacking(self._running)
        ordered = order(self.limits.policy, waiting, self._memory.cache, self._now, self.limits.patience)
        flying = sum(flight.plan_bytes for flight in self._flights)
        last = len(waiting) - 1
        for i, request in enumerate(ordered):
            together = step.plan_bytes + request.plan_bytes
            if budget.tokens <= 0 or (step.plan_bytes and together > STEP_BYTES):
                return
            if flying and flying + together > FLIGHT_BYTES:
                return
            if not self._memory.slots:
                if not may_displace:
                    return
                if promised:  # a slot is on its way to this one
                    promised -= 1
                    continue
                if not self._displace(request):
                    return
                if not self._memory.slots:
                    continue
            if not self._admit_one(step, request, budget, others=i < last):
                return

    def _displace(self, request: Request) -> bool:
        """Retract the lowest-ranked running request if ``request`` has a higher priority,
        or that one yields to it."""
        if not self._running:
            return False
        victim = self._running[-1]
        higher = self.limits.policy == "priority" and request.submit.priority > victim.submit.priority
        if request.yields or victim.yields:
            higher = victim.yields and not request.yields
        if not higher or victim.boosted or victim.planned >= victim.goal:
            return False
        self._reserved = [r - lacking for r, lacking in zip(self._reserved, self._lacking(victim))]
        self._preempt(victim)
        return True

    def _admit_one(self, step: Step, request: Request, budget: Budget, others: bool) -> bool:
        """Admit a waiting request to this step, if it fits beside what the running ones will need, or leave
        it to the next, which can begin with more of it. False: it does not fit."""
        memory = self._memory
        if awaited := memory.attach(request):
            if awaited == PAGES:
                self._hold(request)
            return True
        while not self._fits(request):
            if self._draining or not self._displace(request):
                memory.release(request)
                return False
        if memory.load(request):
            self._hold(request)
            return True
        count = self._chunk(request, budget, others)
        lacking = -(-(request.planned + count - request.allocated) // self.limits.page_size)
        lacking = min(lacking, memory.room(request))
        roomy = self.limits.encoder and count > 0
        if not roomy and (lacking <= 0 or not memory.grow(request, lacking)):
            memory.release(request)
            return False
        self._unlist(request)
        request.run(self._now)
        request.drafting = bool(self.limits.drafts) and request.guesses
        insort(self._running, request, key=_by_rank)
        if request.preemptions == 0:
            self._ledger.counts.query_tokens += request.known
            self._ledger.counts.prompt_tokens += request.prompt_len
        self._count_hit(request, request.borrowed)
        step.add_new(request)
        self._add_prefill(step, request, min(count, request.allocated - request.planned), budget)
        self._reserved = _sum(self._reserved, [self._lacking(request)])
        return True

    def _hold(self, request: Request) -> None:
        """A transfer brings pages of a waiting request."""
        self._unlist(request)
        request.hold(PAGES)
        self._held[request.rid] = request

    def _fits(self, request: Request) -> bool:
        """Pages suffice for its known tokens, and for the outputs expected of it and of the running requests.
        The expectation (``_ratio``) rises with each retraction and falls slowly, as in SGLang. Alone, it
        always fits."""
        if any(self._short):
            return False
        if not self._running and not self._draining:
            return True
        return _at_most(_sum(self._reserved, [self._lacking(request)]), self._memory.available)

    def _lacking(self, request: Request) -> list[int]:
        """Pages the request is expected to need beside those it has."""
        known = request.known
        tokens = known + self._ratio * min(request.limit - known, RESERVE_CLIP)
        return self._memory.lacking(request, int(tokens))

    def _all_lacking(self, requests: Iterable[Request]) -> list[int]:
        return _sum(self._none, map(self._lacking, requests))

    def _count_hit(self, request: Request, pages: int) -> None:
        if request.preemptions == 0:
            request.cached += pages * self.limits.page_size
            self._ledger.counts.hit_tokens += pages * self.limits.page_size

    # --- results

    def retire(self, result: StepResult, now: float) -> list[Delta]:
        """Commit the tokens of the oldest step in flight. Tokens of requests that have ended are dropped."""
        self._now = now
        step = self._flights.popleft()
        assert result.step == step.number, f"result of step {result.step}, expected {step.number}"
        self._costs.observe(step.tokens, step.work, result.seconds)
        self._ledger.counts.step_seconds += result.seconds
        self._ledger.counts.gap_seconds += result.gap
        self._ratio = max(self.limits.reserve / 5, self._ratio - RATIO_FALL)
        outcome = commit(step, result, now)
        self._ledger.counts.output_tokens += outcome.outputs
        self._ledger.counts.forced_tokens += outcome.forced
        self._ledger.verified(outcome.verified)
        self._ledger.counts.invalid_logits += outcome.faults
        self._conclude(outcome.ended, step.number)
        return outcome.deltas

    def _conclude(self, ended: list[Request], number: int) -> None:
        """Requests of this result that have ended leave;
        those that no step contains any more are released."""
        for request in ended:
            del self._open[request.rid]
            self._ledger.ended(request, request.finish or "", self._now)
        if ended:
            leaving = [r for r in ended if r.state is State.RUNNING]
            self._running = [r for r in self._running if r.finish is None]
            for request in leaving:
                self._leave(request)
        if self._draining:
            settled = [r for r in self._draining if r.last_step <= number]
            self._draining = [r for r in self._draining if r.last_step > number]
            for request in settled:
                self._settle(request)

    # --- the rest

    @property
    def idle(self) -> bool:
        """No request, no step in flight, and no copy under way."""
        return not (self._open or self._draining or self._flights or self._memory.transfers.under_way)

    @property
    def rids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._open)

    def flush_cache(self) -> bool:
        """Forget the cached prefixes that no request uses; true if none is left."""
        self._memory.transfers.tier.flush()
        return self._memory.cache.flush()

    def drain_finished(self) -> list[Finished]:
        """Requests that ended since the last call, the latest few thousand at most."""
        return self._ledger.drain()

    def rest(self) -> None:
        """A moment to tidy up in: called now and then, when nobody waits for the scheduler.
        There is nothing to do here."""

    def stats(self) -> Stats:
        """A copy of the counters, and the numbers of now."""
        memory, last, page = self._memory, self._last, self.limits.page_size
        total, free, cached = memory.pool.total - 1, len(memory.pool), memory.cache.pages
        return replace(
            self._ledger.counts,
            running=len(self._running),
            held=len(self._held),
            waiting=len(self._waiting),
            retracted=sum(request.preemptions > 0 for request in self._waiting),
            draining=len(self._draining),
            in_flight=len(self._flights),
            pages_total=total,
            pages_free=free,
            pages_cached=cached,
            pages_evictable=memory.cache.evictable,
            pages_private=total - free - cached,
            windows=[
                WindowStats(window=p.window, total=p.total - 1, free=len(p), evictable=p.evictable)
                for p in memory.windows
            ],
            cached_tokens=cached * page,
            finished=dict(self._ledger.counts.finished),
            right_at=list(self._ledger.counts.right_at),
            steps=self._steps,
            last_rows=len(last.rows),
            last_decodes=last.decodes,
            last_tokens=last.tokens,
            last_predicted=self._costs.predict(last.tokens, last.work) if self.limits.itl_target else 0.0,
        )

    def check(self) -> None:
        """Raises AssertionError if pages, slots or lists do not add up."""
        self._memory.check(self._running + self._draining)
        states = (
            (list(self._held.values()), State.HELD),
            (self._waiting, State.WAITING),
            (self._running, State.RUNNING),
            (self._draining, State.DRAINING),
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
        assert sorted(r.rid for r in listed if r.finish is None) == sorted(self._open), (
            "an open request is in no list"
        )
        assert self._waiting == sorted(self._waiting, key=_by_turn), "the waiting list is out of order"
        assert self._running == sorted(self._running, key=_by_rank), "the running list is out of order"
        assert all(request.last_step >= self._oldest for request in self._draining), "drained but still held"

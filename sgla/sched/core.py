"""The scheduler: decides what every step computes.

The caller drives it: ``offer``, ``ready`` and ``cancel`` at any time, ``retire`` for each result in order,
then ``plan`` until it returns ``None``. Nothing here waits, reads a clock or draws a random number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from sgla.cache.events import Events, KvEvent
from sgla.errors import DeadlineExceeded, SglaError
from sgla.messages import ADAPTER, PAGES, Delta, Keep, Moved, Ready, StepPlan, StepResult, Submit
from sgla.sched.admission import Admission
from sgla.sched.ahead import Ahead
from sgla.sched.budget import CostModel
from sgla.sched.cohorts import Cohorts
from sgla.sched.commit import commit
from sgla.sched.hurry import Hurry
from sgla.sched.limits import Limits, room_for_guesses
from sgla.sched.memory import Memory, SlotsOnly
from sgla.sched.prefetch import Prefetch
from sgla.sched.prefill import Prefill
from sgla.sched.pressure import Pressure
from sgla.sched.queues import Queues, before_yielding
from sgla.sched.recurrent import Recurrent
from sgla.sched.repeats import Repeats, drafts_of
from sgla.sched.request import Prompt, Request, State
from sgla.sched.stats import Finished, Ledger, Stats, WindowStats
from sgla.sched.step import Step


class Size(NamedTuple):
    """How large the latest step was. The step itself would keep what its requests brought."""

    rows: int = 0
    decodes: int = 0
    tokens: int = 0
    work: int = 0


class Core:
    """Puts steps together out of what its parts say: ``Queues`` which requests there are, ``Memory`` which
    units they have, ``Pressure`` who gives some up, ``Prefill`` how much of a prompt is read, ``Admission``
    who starts. Rows of one token are planned here."""

    def __init__(self, limits: Limits, found: Sequence[Sequence[bytes]] = ()) -> None:
        """``found``: Facts.found."""
        self.limits = limits
        self._memory = SlotsOnly(limits) if limits.encoder else Memory(limits, found)
        self._costs = CostModel(limits.itl_target, limits.step_tokens, asked=bool(limits.tiers))
        self._ledger = Ledger()
        self._queues = Queues(limits, self._memory, self._ledger)
        self._pressure = Pressure(self._memory, self._queues, limits.reserve)
        shared = limits, self._memory, self._queues, self._pressure
        self._hurry = Hurry(limits, self._costs)
        self._repeats = Repeats() if limits.searched_drafts and limits.drafts else None
        self.ahead = Ahead(limits, self._queues, self._costs, self._hurry)
        self._prefill = Prefill(*shared, self._costs, self._hurry, self._ledger)
        self._admission = Admission(*shared, self._prefill, self._hurry, self._ledger)
        self._prefetch = Prefetch(self._memory, self._queues, limits.rows)
        self._now = 0.0  # the latest time told
        self.next_plan = 0.0  # when ``plan`` may have a step though nothing is told until then
        self._paged = len(limits.groups) - limits.recurrent
        self._cohorts = Cohorts(*shared) if limits.stages > 1 else None
        self._last = Size()

    def offer(self, submit: Submit, now: float) -> None:
        """Take a request. ``max_new`` is cut to what the context and the pool can hold. How many may wait is
        not decided here: whoever admits requests has done so.

        Raises ContextTooLong (it could never run), InvalidField (empty prompt, huge answers).
        """
        self._now = now
        assert submit.rid not in self._queues.open, f"request {submit.rid} offered twice"
        try:
            max_new = self.limits.outputs(submit)
        except SglaError:
            self._ledger.counts.rejected += 1
            raise
        self._queues.add(submit, max_new, now)
        self._hurry.offer(len(submit.tokens), now)

    def ready(self, told: Ready) -> None:
        """Something that a request is held for is there. The request may have ended meanwhile."""
        self._queues.ready(told)

    def moved(self, moved: Moved) -> None:
        """A copy has ended. Whoever was held for it waits for room again, and finds its pages in the tree, or
        computes them if it failed."""
        held = self._memory.adapters.moved(moved)
        reason = PAGES if held is None else ADAPTER
        for rid in self._memory.transfers.moved(moved) if held is None else held:
            self._queues.ready(Ready(rid=rid, reason=reason))

    def keep(self, told: Keep) -> None:
        """An adapter is pinned to its place, or gone."""
        if told.pinned:
            self._memory.adapters.pinned.add(told.adapter)
        else:
            self._memory.adapters.forget(told.adapter)

    def cancel(self, rid: str, reason: str) -> Delta | None:
        """End a request in whatever state. Returns its last Delta, with finish ``stop`` if ``reason`` is
        ``stop`` (a stop string was seen) and ``abort`` otherwise; ``None`` if it is unknown or has ended. Its
        slot and pages are free as soon as no submitted step contains it."""
        request = self._queues.open.get(rid)
        if request is None:
            return None
        finish = "stop" if reason == "stop" else "abort"
        self._queues.end(request, finish, self._now)
        return Delta(rid=rid, finish=finish)

    def expire(self, now: float) -> list[Delta]:
        """End the requests whose deadline has passed, with a DeadlineExceeded error."""
        self._now = now
        deltas = []
        for request in self._queues.overdue(now):
            self._queues.end(request, "error", now)
            text = f"The request was not done {now - request.arrival:.1f} s after its arrival."
            error = DeadlineExceeded(text).rejected(request.submit.parent)
            deltas.append(Delta(rid=request.rid, finish="error", error=error))
        return deltas

    @property
    def next_deadline(self) -> float | None:
        """When ``expire`` may have something to do."""
        return self._queues.next_deadline

    def plan(self, now: float, paused: bool = False) -> StepPlan | None:
        """The next step, of copies alone if ``paused``; or ``None``: nothing runs, or it is too early."""
        self._now = now
        queues, memory = self._queues, self._memory
        self.next_plan = self.ahead.when(now)
        if now < self.next_plan or not (queues.running or queues.waiting or memory.copies):
            return None
        step = Step(queues.steps + 1, self._paged, self.limits.canvas)
        self._pressure.begin()
        memory.cache.expire(now)
        memory.adapters.begin()
        memory.transfers.begin()
        prefills = [] if paused else self._rows_of_one(step)
        if prefills or (queues.waiting and not paused):
            first = prefills[0] if prefills else queues.waiting[0]
            budget = self._prefill.budget(step, first.yields)
            left = self._prefill.plan(step, prefills, budget)
            self._admission.admit(step, budget, now)
            self._prefill.go_on(step, left, budget)  # with what those that wait could not take
            self._prefetch.begin()
        self._hurry.reads([*prefills, *step.rows[step.decodes :]])
        self.ahead.expect(step)
        step.copies, step.dropped = memory.begin_copies()
        if not (step.rows or step.copies or step.dropped):
            if memory.copies:  # of what was retracted just now, and this plan computes nothing
                return self.plan(now, paused)
            if queues.flights or memory.copying or paused or not (queues.running or queues.waiting):
                return None
            self._admission.begin_anew()
            return self.plan(now)
        for request in step.rows[step.decodes :]:
            memory.slide(request)
        if memory.recurrent is not None:
            self._checkpoint_outputs(step, memory.recurrent)
        step.zeroed, memory.spoiled = memory.spoiled, []
        queues.steps += 1
        queues.flights.append(step)
        self._last = Size(len(step.rows), step.decodes, step.tokens, step.work)
        return step.encode()

    def _rows_of_one(self, step: Step) -> list[Request]:
        """One token for each row that has one to compute; returns the rows that have more, or prompt, to
        compute."""
        if self.limits.canvas:
            return self._plan_canvases(step)
        if self._cohorts is not None:
            return self._cohorts.plan(step, self._taking_part())
        return self._plan_verifies(step) if self.limits.drafts else self._plan_decodes(step)

    def _plan_decodes(self, step: Step) -> list[Request]:
        """``_rows_of_one`` where none may guess. Of rows that may in other steps it is certain where they
        begin."""
        prefills: list[Request] = []
        rows: list[Request] = []
        slots: list[int] = []
        starts: list[int] = []
        number = step.number
        for request in self._taking_part():  # grow may remove later ones
            planned = request.planned
            if planned >= request.goal:
                continue
            if planned < request.prompt_len or request.known - planned > 1:
                prefills.append(request)
                continue
            if planned == request.allocated:
                if not self._pressure.grow(request, 1):
                    continue
                step.tell_pages(request)
            rows.append(request)
            slots.append(request.slot)
            starts.append(planned)
            request.planned = planned + 1
            request.known = planned + 2
            request.last_step = number
        if self.limits.drafts:
            step.count(rows)
        step.set_decodes(rows, slots, starts)
        return prefills

    def _plan_verifies(self, step: Step) -> list[Request]:
        """``_rows_of_one`` where rows may guess."""
        prefills: list[Request] = []
        running = list(self._taking_part())
        most = room_for_guesses(self.limits, len(running))
        if not most and self.limits.padded_drafts and not any(request.loose for request in running):
            return self._plan_decodes(step)
        for request in running:
            if request.state is not State.RUNNING or request.planned >= request.goal:
                continue
            if request.planned < request.begun or request.known - request.planned > 1:
                prefills.append(request)
                continue
            drafts = self._drafts(request, most, step.number) if request.drafting else 0
            lacking = self._lacking(request, drafts)
            if drafts and lacking > 0 and not self._memory.fits(request, lacking):
                drafts, lacking = 0, self._lacking(request, 0)
            if lacking > 0:
                if not self._pressure.grow(request, lacking):
                    continue
                step.tell_pages(request)
            step.add_verify(request, drafts, request.goal)
        return prefills

    def _plan_canvases(self, step: Step) -> list[Request]:
        """``_rows_of_one`` of a model that writes blocks: of requests whose latest result is there, who waits
        longest is first. They leave half of a step to prompts, and to blocks that are to be read."""
        size, page = self.limits.canvas, self.limits.page_size
        running = list(self._taking_part())
        prefills = [request for request in running if request.planned < request.known]
        waiting = self._queues.waiting[:1] if self._memory.slots else []
        unread = sum(request.known - request.planned for request in prefills + waiting)
        room = self.limits.step_tokens - min(unread, self.limits.step_tokens // 2)
        due = (request for request in running if request.planned == request.known and not request.loose)
        for request in sorted(due, key=lambda request: request.last_step):
            if step.tokens + size > room:
                break
            if request.state is not State.RUNNING:  # retracted for an earlier one
                continue
            lacking = -(-(request.planned + size - request.allocated) // page)
            if lacking <= 0 or self._pressure.grow(request, lacking):
                step.add_canvas(request)
        return prefills

    def _drafts(self, request: Request, most: int, step: int) -> int:
        return drafts_of(request, most, step, self._repeats) if self.limits.padded_drafts else most

    def _lacking(self, request: Request, drafts: int) -> int:
        """Pages that a row of the pending token and so many drafts has not; none or less: it has all."""
        end = min(request.planned + 1 + drafts, request.goal)
        return -(-(end - request.allocated) // self.limits.page_size)

    def _taking_part(self) -> Iterable[Request]:
        """The running requests that the step is for. Those that yield are the last: none of them while
        another request waits or reads its prompt, beside decode rows as many as make the step little longer,
        and one at least."""
        running, waiting = self._queues.running, self._queues.waiting
        if not running or not running[-1].yields:
            return running
        others = before_yielding(running)
        if waiting and not waiting[0].yields:
            return islice(running, others)
        if not others:
            return running
        if any(request.known - request.planned != 1 for request in running[:others]):
            return islice(running, others)
        lengths = [request.planned for request in running]
        return islice(running, others + max(1, self._costs.more_rows(lengths[:others], lengths[others:])))

    def _checkpoint_outputs(self, step: Step, recurrent: Recurrent) -> None:
        for request in step.rows[: step.decodes]:
            if not request.drafting:  # where its rows begin is known
                step.add_checkpoints(request, recurrent.checkpoint_output(request))
        recurrent.planned()

    def retire(self, result: StepResult, now: float) -> list[Delta]:
        """Commit the tokens of the oldest step in flight. Tokens of requests that have ended are dropped."""
        self._now = now
        step = self._queues.flights.popleft()
        self.ahead.ended(now, step, result.seconds)
        assert result.step == step.number, f"result of step {result.step}, expected {step.number}"
        self._costs.observe(step.tokens, step.work, step.told(result.seconds), step.mixed)
        self._pressure.relax()
        outcome = commit(step, result, now)
        counts = self._ledger.counts
        counts.step_seconds += result.seconds
        counts.gap_seconds += result.gap
        counts.output_tokens += outcome.outputs
        counts.forced_tokens += outcome.forced
        counts.invalid_logits += outcome.faults
        self._ledger.verified(outcome.verified)
        if self._repeats is not None:
            for request in outcome.ended:
                self._repeats.learn(request)
        self._queues.conclude(outcome.ended, step.number, now)
        return outcome.deltas

    @property
    def idle(self) -> bool:
        """No request, no step in flight, and no copy under way."""
        return self._queues.empty and not self._memory.copying

    @property
    def rids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._queues.open)

    @property
    def open(self) -> Mapping[str, Request]:
        """The same, by rid."""
        return self._queues.open

    def cached(self, submit: Submit, prompt: Prompt) -> int:
        """Tokens of its ``prompt`` that are cached now, but for the last."""
        limit = len(prompt.array) - 1
        return self._memory.cache.length(self._queues.space(submit), prompt.data, limit)

    def tell_events(self, medium: str) -> Callable[[], list[KvEvent]]:
        """Keep what happens to cached pages, and return what fetches it. ``medium``: see ``Events``."""
        events = self._memory.cache.events = Events(self.limits.page_size, medium)
        return events.drain

    def flush_cache(self, tiers: bool = True) -> bool:
        """Forget the cached prefixes that no request uses, on the device and in ``tiers``; true if none is
        left on the device. Without ``tiers`` true says also that workers have nothing to do: a step may still
        compute what a request that has ended would have had next."""
        if tiers:
            self._memory.transfers.flush()
        return self._memory.flush() and (tiers or self.idle)

    def renew(self, weights: str) -> bool:
        """Forget the cached prefixes, those of open requests, too, which go on with what they have: weights
        of this name come, "" those of the start. False while a step or a copy is under way."""
        if self._queues.flights or self._memory.copying:
            return False
        self._memory.transfers.saving.renew(weights)
        self._queues.renew(weights)
        return True

    def drain_finished(self) -> list[Finished]:
        """Requests that ended since the last call, the latest few thousand at most."""
        return self._ledger.drain()

    def stats(self) -> Stats:
        """A copy of the counters, and the numbers of now."""
        queues, memory, last, page = self._queues, self._memory, self._last, self.limits.page_size
        return replace(
            self._ledger.counts,
            running=len(queues.running),
            held=len(queues.held),
            waiting=len(queues.waiting),
            retracted=sum(request.preemptions > 0 for request in queues.waiting),
            draining=len(queues.draining),
            in_flight=len(queues.flights),
            pages_total=memory.pool.total - 1,
            pages_free=memory.stock.free,
            pages_cached=memory.cache.pages,
            pages_evictable=memory.cache.evictable,
            pages_private=memory.stock.private,
            windows=[
                WindowStats(window=p.window, total=p.total - 1, free=len(p), evictable=p.evictable)
                for p in memory.windows
            ],
            tiers=memory.transfers.told(),
            adapter_places=self.limits.adapters,
            adapters_placed=memory.adapters.used,
            adapter_loads=memory.adapters.loads,
            cached_tokens=memory.cache.pages * page,
            hits=dict(self._ledger.counts.hits),
            misses=dict(self._ledger.counts.misses),
            finished=dict(self._ledger.counts.finished),
            right_at=list(self._ledger.counts.right_at),
            steps=queues.steps,
            last_rows=last.rows,
            last_decodes=last.decodes,
            last_tokens=last.tokens,
            last_predicted=self._costs.predict(last.tokens, last.work) if self.limits.itl_target else 0.0,
        )

    def check(self) -> None:
        """Raises AssertionError if pages, slots or queues do not add up."""
        self._memory.check(self._queues.running + self._queues.draining)
        self._queues.check()

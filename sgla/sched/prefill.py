"""Prompts in a step: what kind of step they are read in, and how many tokens of each."""

from __future__ import annotations

import math

from sgla.messages import LONGEST, StepCost
from sgla.sched.budget import Budget, CostModel, can_wait, pairs
from sgla.sched.hurry import SHORT, Hurry
from sgla.sched.limits import Limits, wide_tokens
from sgla.sched.memory import Memory
from sgla.sched.pressure import Pressure
from sgla.sched.queues import Queues
from sgla.sched.request import Request, State
from sgla.sched.stats import Ledger
from sgla.sched.step import Step


class Prefill:
    """Rows of prompts, and of requests that start over."""

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        queues: Queues,
        pressure: Pressure,
        costs: CostModel,
        hurry: Hurry,
        ledger: Ledger,
    ) -> None:
        self._limits, self._memory, self._queues, self._pressure = limits, memory, queues, pressure
        self._costs, self._hurry, self._ledger = costs, hurry, ledger
        self._table = limits.costs or [StepCost(tokens=limits.step_tokens)]

    def budget(self, step: Step, yields: bool) -> Budget:
        """``yields``: the prompts are of requests that do."""
        limits = self._limits
        seconds = self._costs.prefill_seconds(step.tokens, step.work)
        if yields:
            beside = bool(step.rows) and not step.rows[0].yields
            least = self._costs.yielding_seconds(step.tokens, step.work, beside, limits.depth)
            seconds = min(seconds, least)
        if self._hurry.on:
            seconds = min(seconds, self._hurry.seconds(step.tokens, step.work))
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
        running, waiting, pressure = self._queues.running, self._queues.waiting, self._pressure
        if self._limits.itl_target is not None or len(waiting) > len(self._memory.slots):
            return False
        return can_wait(running, waiting, longest) and pressure.fits(pressure.expected(running + waiting))

    def plan(self, step: Step, requests: list[Request], budget: Budget) -> list[Request]:
        """Rows for running ``requests``; returns those for which short ones have left nothing."""
        short = self._hurry.shorts(requests)
        hurried = short + self._hurry.shorts(self._queues.candidates())
        budget.keep(sum(request.known - request.planned for request in hurried))
        left = self.go_on(step, [request for request in requests if request not in short], budget)
        budget.give_back(SHORT)
        self.go_on(step, short, budget)
        return left

    def go_on(self, step: Step, requests: list[Request], budget: Budget) -> list[Request]:
        """Rows for ``requests`` as long as the budget lasts; returns the others."""
        waiting = self._queues.waiting
        for i, request in enumerate(requests):
            if budget.tokens <= 0:
                return requests[i:]
            if request.state is not State.RUNNING:  # retracted for an earlier row
                continue
            pages = self._memory.catch_up(request)
            if pages is None:
                continue
            self.count_hit(request, pages)
            others = i + 1 < len(requests) or bool(waiting and waiting[0].yields <= request.yields)
            count = self._fit(request, self.chunk(request, budget, others))
            if count > 0:
                self.add(step, request, count, budget)
        return []

    def chunk(self, request: Request, budget: Budget, others: bool) -> int:
        """Tokens the request gets of this step. A chunk that is not the last ends on a page, so that it can
        be shared. It ends before a tile of the step that neither it nor ``others`` can fill, if that leaves
        the step a tile of prefill. One that others leave room to has what it can.
        """
        need = request.known - request.planned
        if self._limits.encoder:  # all or nothing; what is longer than a step goes alone
            return need if need <= budget.tokens or budget.tokens == self._limits.step_tokens else 0
        share = 0.5 if others and self._halves(request, budget) else 1.0
        wide = self._wide(request)
        if wide is not None and budget.wide:
            return 0
        count = budget.grant(request.planned, need if wide is None else min(need, wide), share)
        if wide is not None:
            return count
        if (count < need or budget.seconds < math.inf) and not self._hurry.hurries(request):
            count = budget.whole_tiles(request.planned, count, others)
        if count < need:
            page = self._limits.page_size
            aligned = (request.planned + count) // page * page - request.planned
            if aligned > 0:
                count = aligned
        return self.uncut(request, count, budget.tokens)

    def _halves(self, request: Request, budget: Budget) -> bool:
        """A prompt longer than a whole step leaves half of it to the others: behind a 100k-token prompt,
        short ones go on. In a hurried step one does, or the last would have a few tokens each."""
        long = request.known - request.planned > self._limits.step_tokens
        return long and not (self._hurry.on and budget.halved)

    def seconds(self, step: Step, request: Request, budget: Budget, start: int) -> float:
        """Of the step that reads the request from ``start`` on, if it is as this one; 0: nobody knows."""
        count = budget.grant(start, request.known - start)
        return self._costs.predict(step.tokens + count, step.work + pairs(start, count))

    def uncut(self, request: Request, count: int, most: int) -> int:
        """About so many tokens, ``most`` at most, that end in no picture whose tokens see each other. 0: the
        next one does not fit."""
        end = request.planned + count
        for placed in request.submit.pictures:
            if placed.whole and placed.first < end < placed.end:
                if placed.first > request.planned:
                    end = placed.first
                else:
                    end = placed.end if placed.end - request.planned <= most else request.planned
        return end - request.planned

    def _wide(self, request: Request) -> int | None:
        """``wide_tokens`` as long as the request owes logprobs of its prompt;
        ``stated_tokens`` if it wants hidden states."""
        wide = None if request.prompt_logprobs is None else wide_tokens(request.submit.sampling)
        if request.hidden is None:
            return wide
        return min(wide or LONGEST, self._limits.stated_tokens(request.submit.sampling))

    def _fit(self, request: Request, count: int) -> int:
        """Get pages for ``count`` more tokens; returns for how many there are."""
        page = self._limits.page_size
        lacking = -(-(request.planned + count - request.allocated) // page)
        if lacking > 0:
            self._memory.slide(request)
            possible = min(lacking, self._memory.room(request))
            there = min(count, request.allocated + possible * page - request.planned)
            if not self.uncut(request, there, 0):
                possible = lacking if request.submit.pictures else 1
            # With no page to be had it goes on with the room it has;
            # a request with none of use takes it from others.
            if possible and not self._pressure.grow(request, possible):
                return 0
        return self.uncut(request, min(count, request.allocated - request.planned), 0)

    def add(self, step: Step, request: Request, count: int, budget: Budget) -> None:
        """A row of ``count`` tokens, for which there are pages."""
        complete = request.planned + count == request.known
        halves = self._halves(request, budget)
        budget.halved |= halves
        wide = self._wide(request) is not None
        budget.wide |= wide
        budget.spend(request.planned, count)
        start = request.planned
        step.add_prefill(request, count)
        self._ledger.counts.prefilled_tokens += count
        self._memory.share(request)
        self._memory.transfers.saving.save_part(request)
        if (recurrent := self._memory.recurrent) is not None:
            if request.read:
                step.read_state(request, recurrent.begin(request))
            checkpoints = recurrent.checkpoint(request, start)
            if complete and request.planned not in checkpoints[::2]:
                checkpoints += recurrent.checkpoint_output(request)
            step.add_checkpoints(request, checkpoints)
        if not (complete or halves or wide or self._hurry.hurries(request)):
            # The rest of an aligned chunk must not go to a request that would compute the same page.
            budget.close()

    def count_hit(self, request: Request, pages: int) -> None:
        """The request has found ``pages`` in the tree."""
        if request.preemptions == 0:
            size, (place, most) = self._limits.page_size, request.brought
            here = pages - min(pages, most)
            cached = pages * size
            if request.most_cached is not None:
                cached = max(0, min(cached, request.most_cached - request.cached))
            request.cached += cached
            counts = self._ledger.counts
            counts.hit_tokens += cached
            own = min(here * size, cached)
            for name, count in ((place, cached - own), ("device", own)):
                counts.hits[name] = counts.hits.get(name, 0) + count
            request.brought = ("device", 0)

"""Rows of one token where steps go through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from sgla.sched.limits import Limits, room_for_guesses
from sgla.sched.memory import Memory
from sgla.sched.pressure import Pressure
from sgla.sched.queues import Queues
from sgla.sched.request import Request, State
from sgla.sched.step import Step


def _last_step(request: Request) -> int:
    return request.last_step


def _rank(request: Request) -> tuple[float, int, float, int]:
    return request.rank


class Cohorts:
    """A row has to wait until its token has come out of the last stage, and its plan brings it to the first.
    So that all stages have work, the requests that decode are shared out to as many steps. One step more may
    be in flight, for prompts.

    Rows guess where the last stage does, which tells its guesses with the tokens that it has drawn: so the
    stages before know them as they know tokens, by the plan."""

    def __init__(self, limits: Limits, memory: Memory, queues: Queues, pressure: Pressure) -> None:
        self._limits, self._memory, self._queues, self._pressure = limits, memory, queues, pressure
        self._most = min(limits.stages, limits.depth)

    def plan(self, step: Step, running: Iterable[Request]) -> list[Request]:
        """One token for a part of those that have one to compute; returns the rows that have more, or
        prompt, to compute."""
        prefills: list[Request] = []
        ready: list[Request] = []
        sampled = 0
        for request in running:
            if request.planned >= request.goal:
                continue
            if request.known > len(request.tokens):  # by a step in flight
                sampled += 1
            elif request.planned < request.prompt_len or request.known - request.planned > 1:
                prefills.append(request)
            else:
                ready.append(request)
        share = -(-(len(ready) + sampled) // self._most)
        if sum(flight.decodes > 0 for flight in self._queues.flights) >= self._most:
            share = 0  # a step of few rows may take as long: those that are ready wait for others
        turn = sorted(nsmallest(share, ready, key=_last_step), key=_rank)
        place = self._place_guessing if self._limits.drafts else self._place
        if not place(step, turn) and share:
            place(step, ready)
        return prefills

    def _place(self, step: Step, requests: list[Request]) -> bool:
        """Rows of one token each; whether there are any."""
        rows = self._with_pages(step, requests)
        step.pending = [request.tokens[-1] for request in rows]
        step.set_decodes(rows, [request.slot for request in rows], [request.planned for request in rows])
        for request in rows:
            request.planned += 1
            request.known += 1
            request.last_step = step.number
        return bool(rows)

    def _place_guessing(self, step: Step, requests: list[Request]) -> bool:
        """The same where rows may guess: with their guesses, and pages for as many more behind these, if
        there are any."""
        most = room_for_guesses(self._limits, len(requests))
        for request in requests:
            if request.state is not State.RUNNING:  # retracted for an earlier row
                continue
            guesses, drafts = request.proposed[:most], most if request.drafting and most else -1
            lacking = self._lacking(request, 1 + len(guesses) + most) if drafts > 0 else 0
            if lacking > 0 and not self._memory.fits(request, lacking):
                guesses, drafts = (), -1
            if drafts < 0:
                lacking = self._lacking(request, 1)
            if lacking > 0:
                if not self._pressure.grow(request, lacking):
                    continue
                step.tell_pages(request)
            if (recurrent := self._memory.recurrent) is not None:
                if unit := recurrent.go_back(request):
                    step.read_state(request, unit)
                guesses = guesses[: recurrent.room]
                step.add_checkpoints(request, recurrent.verify(request, len(guesses)))
            step.add_told(request, guesses, drafts)
            request.proposed = ()
        return bool(step.rows)

    def _lacking(self, request: Request, tokens: int) -> int:
        """Pages that it has not for so many more; none or less: it has all."""
        end = min(request.planned + tokens, request.goal)
        return -(-(end - request.allocated) // self._limits.page_size)

    def _with_pages(self, step: Step, requests: Iterable[Request]) -> list[Request]:
        """Those that have a place for their pending token; those of high rank may take it from others."""
        rows: list[Request] = []
        for request in requests:
            if request.state is not State.RUNNING:  # retracted for an earlier row
                continue
            if request.planned == request.allocated:
                if not self._pressure.grow(request, 1):
                    continue
                step.tell_pages(request)
            rows.append(request)
        return rows

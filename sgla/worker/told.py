"""Rows that guess on a GPU that has a stage of a pipeline. A plan tells all stages what its rows guess, so
the host knows where each row begins; the last stage guesses behind what it draws, for later plans
(``StepResult.proposed``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.gpu.states import DeviceStates
from sgla.kernels.triton import drafts
from sgla.messages import SAMPLE, StepPlan, StepResult
from sgla.sampling.sampler import Samples
from sgla.worker.device_state import upload
from sgla.worker.drafts import rows_of
from sgla.worker.state import Int32s, column
from sgla.worker.verify import DeviceDrafts, Verify


def with_told(plan: StepPlan) -> StepPlan:
    """With the number of guesses that each row is told, in the place of those that it may make."""
    if not plan.drafts:
        return plan
    told = np.where(column(plan.drafts) < 0, -1, column(plan.q_lens) - 1).astype(np.int32)
    return replace(plan, drafts=told.tobytes())


def without_told(plan: StepPlan) -> StepPlan:
    """Its rows that are told no guesses, of which none makes any: what a model that guesses has not read
    before it guesses behind the step."""
    if not plan.drafts:
        return plan
    rest = rows_of(plan, np.flatnonzero(column(with_told(plan).drafts) <= 0))
    return replace(rest, drafts=b"")


class Trials(NamedTuple):
    """Decode rows of rows that are told guesses, int32[n] each: their numbers; units that states are read
    from (0: of the row before) and written to; and ``DeviceStates.runs``."""

    rows: Int32s
    reads: Int32s
    writes: Int32s
    runs: Int32s


def trials(plan: StepPlan, units: Int32s) -> tuple[StepPlan, Trials]:
    """``plan``, as ``with_told`` has it, without what it says of states behind guesses, and that. ``units``:
    of each slot."""
    told, slots = column(plan.drafts), column(plan.slots)
    spans = np.maximum(told, 0) + 1
    firsts = np.cumsum(spans) - spans
    reads, marks = column(plan.state_reads).reshape(-1, 2), column(plan.checkpoints).reshape(-1, 3)
    begins = dict(zip(*reads.T.tolist()))
    rows = np.flatnonzero(told > 0)
    parts = []
    for slot, first, span in zip(slots[rows].tolist(), firsts[rows].tolist(), spans[rows].tolist()):
        own, ends = units[slot], marks[marks[:, 0] == slot, 2]
        part = np.zeros((4, span), np.int32)
        part[0] = np.arange(first, first + span)
        part[1, 0], part[3, 0] = begins.get(slot, own), span
        part[2, :-1], part[2, -1] = ends, own
        parts.append(part)
    plan = replace(
        plan,
        state_reads=reads[~np.isin(reads[:, 0], slots[rows])].tobytes(),
        checkpoints=marks[~np.isin(marks[:, 0], slots[rows])].tobytes(),
    )
    return plan, Trials(*np.concatenate([np.zeros((4, 0), np.int32), *parts], 1))


class Proposals:
    """What rows of ``plan`` guess behind it. ``guess``: has a model put guesses into the token table, if one
    does, for the rows of a plan that begins there."""

    def __init__(
        self, state: DeviceDrafts, plan: StepPlan, guess: Callable[[StepPlan], None] | None = None
    ) -> None:
        most = column(plan.drafts)
        sampled = np.flatnonzero(np.frombuffer(plan.flags, np.uint8) & SAMPLE)
        self._count, self._rows = len(sampled), np.flatnonzero(most[sampled] > 0)
        rows = sampled[self._rows]
        self._state, self._guess, self._next = state, guess, _behind(plan, rows)
        self._ends = np.cumsum(most[rows] + 1)
        if len(rows):
            columns = column(plan.slots)[rows], most[rows], self._ends - most[rows] - 1
            self._columns = upload(np.stack(columns).astype(np.int32))
            self._told = torch.zeros(2, int(self._ends[-1]), dtype=torch.int32, pin_memory=True)

    def make(self) -> None:
        """It is known how much has come."""
        if not len(self._rows):
            return
        if self._guess is not None:
            self._guess(self._next)
        slots, starts, where, ends = torch.empty(
            4, self._told.shape[1], dtype=torch.int32, device=self._columns.device
        )
        self._state.place(self._columns, (slots, starts, where, ends))
        drafts.tell(slots, starts, ends, self._state.tokens, self._told)

    def brought(self) -> list[bytes]:
        """``StepResult.proposed``. The step is over."""
        found = [b""] * self._count
        if len(self._rows):
            for row, first, end in zip(self._rows.tolist(), [0, *self._ends.tolist()], self._ends.tolist()):
                tokens, places = self._told.numpy()[:, first + 1 : end]
                found[row] = tokens[places > 0].tobytes()
        return found if any(found) else []


def _behind(plan: StepPlan, rows: NDArray[np.int_]) -> StepPlan:
    """A plan of these rows, which begin behind the pending token of ``plan``, or further on."""
    part = rows_of(plan, rows)
    starts = column(part.starts) + 1
    return replace(part, starts=starts.tobytes(), q_lens=np.ones_like(starts).tobytes())


class Told(Verify):
    """A step whose ``plan`` tells its rows what they guess. ``proposals``: None on stages before the
    last."""

    def __init__(self, state: DeviceDrafts, plan: StepPlan, proposals: Proposals | None) -> None:
        plan, self._trials = with_told(plan), None
        if state.host.unit is not None:
            plan, self._trials = trials(plan, state.host.unit)
        super().__init__(state, plan)
        self._proposals = proposals

    def guess(self, ids: Tensor, slots: Tensor, starts: Tensor, where: Tensor, ends: Tensor) -> None:
        """Nothing is to be corrected."""
        self._ids, self._starts, self._where, self._ends = ids, starts, where, ends

    def hear(self, positions: Int32s) -> tuple[Int32s, Int32s]:
        rows = slice(self._leading)
        return positions, self._state.host.tokens[
            column(self.plan.slots)[rows], column(self.plan.starts)[rows]
        ]

    def link(self, states: DeviceStates) -> None:
        if self._trials is None or not len(self._trials.rows):
            return
        assert states.runs is not None
        rows, *columns = upload(np.stack(self._trials))
        for column_of, values in zip((states.reads, states.writes, states.runs), columns):
            column_of.index_copy_(0, rows.long(), values)

    def accept(self, out: Tensor) -> None:
        super().accept(out)
        if self._proposals is not None:
            self._proposals.make()

    def fold(self, result: StepResult, samples: Samples) -> None:
        super().fold(result, samples)
        if self._proposals is not None:
            result.proposed = self._proposals.brought()

"""Guesses of Medusa's heads, all from what the target has made of the last token that it has read."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import DRAW
from sgla.kernels.cpu.program import ProgramLimits
from sgla.messages import NewRow, StepPlan
from sgla.model.medusa import Medusa, MedusaHead
from sgla.worker.batch import Columns, Wanted, build
from sgla.worker.draft_head import StepHidden
from sgla.worker.drafts import Guessing
from sgla.worker.forward import compiled
from sgla.worker.pace import Pace
from sgla.worker.state import Int32s, SlotTables, column


class MedusaForward:
    """The heads' forward passes, of one row a slot."""

    def __init__(self, medusa: Medusa, limits: ProgramLimits, threads: int, native: bool) -> None:
        self._medusa, self._given = medusa, torch.empty(0)
        self._heads = [
            compiled(partial(self._forward, head), limits, threads, native)[0] for head in medusa.heads
        ]

    @property
    def count(self) -> int:
        return len(self._heads)

    def __call__(self, head: int, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Logits float32 [S, V] of hidden states [S, d], valid until the next call."""
        self._given = hidden
        return self._heads[head](batch)

    def _forward(self, head: MedusaHead, batch: ForwardBatch) -> Tensor:
        hidden = ops.arriving(self._give, batch.ids, self._medusa.width, torch.float32)
        return head(ops.gather(hidden, batch.sample_rows))

    def _give(self, out: Tensor) -> None:
        out.copy_(self._given)


class MedusaDrafts:
    """``target``: hidden states of the target, of the tokens of a step."""

    def __init__(
        self, tables: SlotTables, sampler: Guessing, forward: MedusaForward, target: StepHidden, pace: Pace
    ) -> None:
        self._tables, self._sampler, self._forward = tables, sampler, forward
        self._target, self._pace = target, pace
        self.took, self.learn = pace.step, pace.learn
        self._last: dict[int, Tensor] = {}  # of a slot: the state of its last token

    def admit(self, new: NewRow) -> None:
        self._pace.admit(new.slot)
        self._last.pop(new.slot, None)

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        if not plan.drafts:
            return None
        self._sampler.forget_guesses()
        starts, q_lens, counts = self._pace.begin(plan, self._tables)
        counts, slots = np.minimum(counts, self._forward.count), column(plan.slots)
        for head in range(int(counts.max(initial=0))):
            going = np.flatnonzero(counts > head)
            rows, ones = slots[going], np.ones(len(going), np.int32)
            with self._pace.guessing(len(going)):
                columns = Columns(rows, starts[going], ones, np.arange(len(going), dtype=np.int32))
                hidden = torch.stack([self._last[slot] for slot in rows.tolist()])
                logits = self._forward(head, hidden, build(columns, self._tables))
                places = starts[going] + head + 1
                self._sampler.guess(logits.numpy(), rows, places, np.empty(0, DRAW))
        return starts, (q_lens + counts).astype(np.int32)

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        brought = columns.q_lens.copy()
        brought[wanted.rows[wanted.first]] -= wanted.runs - counts
        hidden, ends = self._target.take(), np.cumsum(columns.q_lens)
        for row in np.flatnonzero(brought).tolist():
            last = int(ends[row] - columns.q_lens[row] + brought[row]) - 1
            self._last[int(columns.slots[row])] = hidden[last].clone()

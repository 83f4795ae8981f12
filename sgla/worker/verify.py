"""Rows that guess on a GPU. Each token that a row may verify is a decode row of the same slot, so that every
kernel for decode rows serves; where these begin, what is guessed and how much of it is right is decided on the
device, which is steps ahead of the host."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import astuple, replace
from torch import Tensor

from sgla.kernels.triton import drafts
from sgla.messages import SAMPLE, VERIFIED, Failed, NewRow, StepPlan, StepResult
from sgla.sampling.runs import ragged
from sgla.sampling.sampler import Samples
from sgla.worker.device_state import DeviceTables, upload
from sgla.worker.drafts import FIRST, LONGEST, SHORTEST
from sgla.worker.state import Int32s, column


class DeviceDrafts:
    """What ``NGrams`` and ``SlotTables`` know of each slot, on the GPU: int32[slots + 1] each."""

    def __init__(self, tables: DeviceTables) -> None:
        self.tokens = tables.tokens
        self.padding = tables.tokens.shape[0] - 1
        self.computed, self.limits, self.trusts = torch.zeros(
            3, self.padding + 1, dtype=torch.int32, device="cuda"
        )

    def admit(self, rows: list[NewRow]) -> None:
        """Requests take slots."""
        slots, limits = upload(np.array([[new.slot, new.limit] for new in rows]).T)
        self.limits[slots.long()] = limits
        self.trusts.index_fill_(0, slots.long(), FIRST)

    def spread(self, plan: StepPlan) -> Verify:
        return Verify(self, plan)


class Verify:
    """A step whose rows may guess. ``plan``: it has a row for each token that a row of the step may verify, at the
    latest place where that can be."""

    _ids: Tensor
    _where: Tensor
    _ends: Tensor

    def __init__(self, state: DeviceDrafts, plan: StepPlan) -> None:
        self.plan, self._state = plan, state
        slots, flags = column(plan.slots), np.frombuffer(plan.flags, np.uint8)
        most = column(plan.drafts) if plan.drafts else np.full(len(slots), -1, np.int32)
        spans = np.maximum(most, 0) + 1
        self._rows = np.repeat(np.arange(len(slots)), spans)  # of the step
        sampled = np.flatnonzero(flags & SAMPLE)
        self._runs = spans[sampled]
        self._first = (np.cumsum(self._runs) - self._runs).astype(np.int32)
        guessing = np.flatnonzero(most >= 0)
        self._leading = int(spans[: guessing[-1] + 1].sum()) if len(guessing) else 0  # rows up to the last that guess
        self._counts = torch.ones(2, len(sampled), dtype=torch.int32, pin_memory=True)
        if len(sampled):
            self._columns = upload(np.stack([slots[sampled], most[sampled], self._first]))
        if self._leading:
            offsets = np.arange(len(self._rows)) - np.repeat(np.cumsum(spans) - spans, spans)
            q_lens = np.where(most < 0, column(plan.q_lens), 1)
            self.plan = replace(
                plan,
                slots=slots[self._rows].tobytes(),
                starts=(column(plan.starts)[self._rows] + offsets).astype(np.int32).tobytes(),
                q_lens=q_lens[self._rows].astype(np.int32).tobytes(),
                flags=flags[self._rows].tobytes(),
                drafts=b"",
            )

    def guess(self, ids: Tensor, slots: Tensor, starts: Tensor, where: Tensor, ends: Tensor) -> None:
        """The columns of ``plan`` are on the GPU: correct those of rows that guess, which are the first of its
        tokens, whose input is going to be in ``ids``, and of its samples. See ``kernels/triton/drafts.py``."""
        self._ids, self._where, self._ends = ids, where, ends
        state = self._state
        if self._leading:
            drafts.guess(
                self._columns, state.tokens, state.computed, state.limits, state.trusts, slots, starts, where,
                ends, state.padding, (LONGEST, SHORTEST), VERIFIED,
            )  # fmt: skip

    @property
    def guesses(self) -> bool:
        """Some of its rows may guess."""
        return self._leading > 0

    def restore(self) -> None:
        """Put the guesses back into the token table, where a graph has put what it has drawn: rules read them."""
        if self._leading:
            slots, ends = self._where[: self._leading].long(), self._ends[: self._leading].long()
            self._state.tokens[slots, ends - 1] = self._ids[: self._leading]

    def accept(self, out: Tensor) -> None:
        """All rows have drawn."""
        state = self._state
        if len(self._runs):
            drafts.accept(
                self._columns, self._ids, out, self._ends, state.computed, state.trusts, self._counts, VERIFIED
            )

    def fold(self, result: StepResult, samples: Samples) -> None:
        """Make the result of ``plan``, which has one sample of each row, that of the step, which is done."""
        counts, guessed = self._counts.numpy()
        of, rows = np.repeat(np.arange(len(self._runs)), self._runs), self._rows
        samples = samples._replace(
            forced={int(of[i]): run for i, run in samples.forced.items()},
            known={int(of[i]) for i in samples.known},
        )
        result.tokens, result.counts = ragged(samples, self._first, counts)
        if guessed.any():
            result.guessed = guessed.tobytes()
        if self._leading:
            # Rows with several samples are the first: their samples have the numbers of their rows.
            wrong = set(np.flatnonzero(np.arange(len(of)) - self._first[of] >= counts[of]).tolist())
            result.logprobs = [block for block in result.logprobs if block.prompt or block.row not in wrong]
            for block in result.logprobs:
                block.row = int(rows[block.row])
            result.failed = [
                Failed(int(rows[row]), why, fault) for row, why, fault in map(astuple, result.failed) if row not in wrong
            ]

"""Drafts of layers that read hidden states of the target: those of a checkpoint itself, which guess further
tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2), and EAGLE-3's (arXiv 2503.01840).

At position ``p`` such a head reads what the target made of token ``p``, and token ``p + 1``, and guesses the
one behind that. Behind each step it reads all that the target has read, with the tokens that have come; that
brings the first guess of the next step. Further ones it makes of its own states, before the next step, and
what these leave in its KV is overwritten by what the target says of the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import DRAW
from sgla.kernels.cpu.program import ProgramLimits
from sgla.kernels.ops import KVLayer
from sgla.messages import NewRow, StepPlan
from sgla.model.predictor import Head
from sgla.worker.batch import Columns, Wanted, build
from sgla.worker.drafts import Guessing
from sgla.worker.forward import KeptHidden, compiled
from sgla.worker.pace import Pace
from sgla.worker.state import Int32s, SlotTables, column

WAITING = 32  # tokens of a slot that may be unread


class StepHidden:
    """Hidden states of all tokens of a step at one place of the target's forward pass, in as many parts as
    the step has."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def hook(self, x: Tensor) -> None:
        self._parts.append(x.float().clone())  # a program's memory has something else after that

    def take(self) -> Tensor:
        """float32 [T, d]"""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


class HeadForward:
    """A head's forward pass, of ``tokens`` at most. ``kv``: of its layers."""

    def __init__(
        self, head: Head, kv: list[KVLayer], limits: ProgramLimits, threads: int, native: bool
    ) -> None:
        self.head, self.tokens = head, limits.tokens
        self._kept, self._given = KeptHidden(), torch.empty(0)

        def forward(batch: ForwardBatch) -> Tensor:
            tokens = head.embed(batch.ids)
            hidden, shown = head.forward(tokens, ops.call(self._give, tokens, head.width), batch, kv)
            rows = ops.tap(self._kept.keep, ops.gather(hidden, batch.sample_rows))
            return head.out(rows if shown is hidden else ops.gather(shown, batch.sample_rows))

        def read(batch: ForwardBatch) -> Tensor:
            return head.read(ops.call(self._give, head.embed(batch.ids), head.target_width))

        self._forward, _ = compiled(forward, limits, threads, native)
        fused = head.target_width != head.width
        self._read = compiled(read, limits, threads, native)[0] if fused else None

    def read(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """What the head makes of ``hidden`` [T, *] of the target, to begin with: [T, width]."""
        if self._read is None:
            return hidden
        self._given = hidden
        return self._read(batch).clone()

    def __call__(self, given: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Logits float32 [S, V], valid until the next call, and hidden states [S, width]."""
        self._given = given
        return of_target(self.head, self._forward(batch)), self._kept.hidden

    def _give(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self._given)


def of_target(head: Head, logits: Tensor) -> Tensor:
    """Logits of a head as those of all tokens of its target: float32 ``[S, *]`` -> ``[S, vocab]``."""
    if head.ids is None:
        return logits
    whole = logits.new_full((len(logits), head.vocab), -torch.inf)
    return whole.index_copy_(1, head.ids, logits)


class ReadingDrafts(ABC):
    """``target``: hidden states of the target, of the tokens of a step, side by side. What has not been read
    of a slot waits until the slot guesses, or until it is much. ``most``: tokens that are read at a time."""

    def __init__(
        self, tables: SlotTables, sampler: Guessing, most: int, target: Sequence[StepHidden], pace: Pace
    ) -> None:
        self._tables, self._sampler, self._most, self._target = tables, sampler, most, target
        self._pace = pace
        slots = len(tables.limit)
        self._unread: list[list[Tensor]] = [[] for _ in range(slots)]  # states of the target
        self._starts, self._counts = np.zeros(
            (2, slots), np.int32
        )  # the place of the first one, and how many

    def admit(self, new: NewRow) -> None:
        self._pace.admit(new.slot)
        self._unread[new.slot], self._counts[new.slot] = [], 0

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        if not plan.drafts:
            return None
        self._sampler.forget_guesses()
        starts, q_lens, counts = self._pace.begin(plan, self._tables)
        going = np.flatnonzero(counts)
        if len(going):
            self._guess_of(column(plan.slots)[going], starts[going], counts[going])
        return starts, (q_lens + counts).astype(np.int32)

    @abstractmethod
    def _guess_of(self, slots: Int32s, starts: Int32s, counts: Int32s) -> None:
        """Guess so many tokens, one at least, behind the pending ones at ``starts``."""

    @abstractmethod
    def _take(self, columns: Columns, given: Tensor) -> None:
        """Read tokens of which the target has made ``given``; its ``logits`` are those of the last of each
        row, if nothing is left."""

    def took(self, tokens: int, seconds: float) -> None:
        self._pace.step(tokens, seconds)

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        self._pace.learn(slots, guessed, right)

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        brought = columns.q_lens.copy()
        brought[wanted.rows[wanted.first]] -= wanted.runs - counts
        hidden, ends = torch.cat([one.take() for one in self._target], 1), np.cumsum(columns.q_lens)
        for row in np.flatnonzero(brought).tolist():
            slot, first = int(columns.slots[row]), int(ends[row] - columns.q_lens[row])
            if not self._counts[slot]:
                self._starts[slot] = columns.starts[row]
            self._unread[slot].append(hidden[first : first + int(brought[row])])
            self._counts[slot] += brought[row]
        many = columns.slots[self._counts[columns.slots] > WAITING]
        if len(many):
            self._read(many, 1)

    def _read(self, slots: Int32s, left: int) -> None:
        """Read what is unread of ``slots``, but for the last tokens, ``left`` of each."""
        while len(slots):
            spans = self._counts[slots] - left
            fits = max(1, int((spans.cumsum() <= self._most).sum()))
            self._read_some(slots[:fits], spans[:fits], left)
            slots = slots[fits:]

    def _read_some(self, slots: Int32s, spans: Int32s, left: int) -> None:
        whole = [torch.cat(self._unread[slot]) for slot in slots.tolist()]
        given = torch.cat([states[:span] for states, span in zip(whole, spans.tolist())])
        logits = np.cumsum(spans, dtype=np.int32) - 1
        self._take(Columns(slots, self._starts[slots], spans, logits[: 0 if left else None]), given)
        for slot, states, span in zip(slots.tolist(), whole, spans.tolist()):
            self._unread[slot] = [states[span:].clone()] if left else []
        self._starts[slots] += spans
        self._counts[slots] = left


class HeadDrafts(ReadingDrafts):
    """A token at a time: what has waited brings the first guess."""

    def __init__(
        self,
        tables: SlotTables,
        sampler: Guessing,
        forward: HeadForward,
        target: Sequence[StepHidden],
        pace: Pace,
    ) -> None:
        super().__init__(tables, sampler, forward.tokens, target, pace)
        self._forward = forward
        # Of the token behind which the next guess is.
        self._hidden = torch.zeros(len(tables.limit), forward.head.width)

    def _guess_of(self, slots: Int32s, starts: Int32s, counts: Int32s) -> None:
        with self._pace.reading(int(self._counts[slots].sum())):
            self._read(slots, 0)
        for more in range(1, int(counts.max())):
            going = np.flatnonzero(counts > more)
            rows, at = slots[going], starts[going] + more - 1
            every = np.arange(len(going), dtype=np.int32)
            with self._pace.guessing(len(going)):
                self._guess(Columns(rows, at, np.ones_like(at), every), self._hidden[rows])

    def _take(self, columns: Columns, given: Tensor) -> None:
        self._guess(columns, given, True)

    def _guess(self, columns: Columns, given: Tensor, from_target: bool = False) -> None:
        """Read the tokens behind those of ``columns``, of which ``given`` is known,
        and guess those that are two places behind its ``logits``."""
        batch = self._batch(columns)
        if from_target:
            given = self._forward.read(given, batch)
        logits, hidden = self._forward(given, batch)
        if not len(columns.logits):
            return
        slots = np.repeat(columns.slots, columns.q_lens)[columns.logits]
        self._hidden[torch.from_numpy(slots).long()] = hidden
        places = batch.positions.numpy()[columns.logits] + 2
        self._sampler.guess(logits.numpy(), slots, places, np.empty(0, DRAW))

    def _batch(self, columns: Columns) -> ForwardBatch:
        """With the tokens behind those of ``columns``. Behind a prompt without outputs anything may stand."""
        batch = build(columns, self._tables)
        slots = np.repeat(columns.slots, columns.q_lens)
        behind = self._tables.tokens[slots, batch.positions.numpy() + 1]
        batch.ids = torch.from_numpy(behind.clip(0, self._forward.head.vocab - 1))
        return batch

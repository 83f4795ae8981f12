"""Drafts of DFlash's heads: a block of guesses at a time. A head keeps k and v of what the target has made of
each token of a text, at the token's own place. Each token of a block is a row of its own, which sees all of
it. What a block leaves in the pages is overwritten by what the target says of the same places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import DRAW
from sgla.kernels.cpu.program import ProgramLimits
from sgla.kernels.ops import Layer
from sgla.messages import VERIFIED
from sgla.model.dflash import DFlash
from sgla.worker.batch import Columns, build
from sgla.worker.draft_head import ReadingDrafts, StepHidden
from sgla.worker.drafts import Guessing
from sgla.worker.forward import compiled
from sgla.worker.pace import Pace
from sgla.worker.state import Int32s, SlotTables


class BlockForward:
    """A head's forward passes: of at most ``tokens`` of the text, and of blocks."""

    def __init__(self, head: DFlash, kv: list[Layer], tokens: int, threads: int, native: bool) -> None:
        self.head, self.tokens, self._given = head, tokens, torch.empty(0)

        def keep(batch: ForwardBatch) -> Tensor:
            given = ops.call(self._give, head.embed(batch.ids), head.target_width)
            return head.keep(given, batch, kv)

        def write(batch: ForwardBatch) -> Tensor:
            return head.out(head.forward(batch, kv, batch.sample_rows))

        self._keep, _ = compiled(keep, ProgramLimits(tokens, 1), threads, native)
        self.write, _ = compiled(write, ProgramLimits(VERIFIED, VERIFIED), threads, native)

    def keep(self, given: Tensor, batch: ForwardBatch) -> None:
        """Of tokens of the text [T, target_width]."""
        self._given = given
        self._keep(batch)

    def _give(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self._given)


class BlockDrafts(ReadingDrafts):
    """See ``ReadingDrafts``."""

    def __init__(
        self,
        tables: SlotTables,
        sampler: Guessing,
        forward: BlockForward,
        target: Sequence[StepHidden],
        pace: Pace,
    ) -> None:
        super().__init__(tables, sampler, forward.tokens, target, pace)
        self._forward = forward

    def _take(self, columns: Columns, given: Tensor) -> None:
        self._forward.keep(given, build(columns._replace(logits=columns.logits[:0]), self._tables))

    def _guess_of(self, slots: Int32s, starts: Int32s, counts: Int32s) -> None:
        with self._pace.reading(int(self._counts[slots].sum())):
            self._read(slots, 0)
            spans = counts + 1
            ahead = (np.arange(spans.sum()) - np.repeat(spans.cumsum() - spans, spans)).astype(np.int32)
            rows, places = np.repeat(slots, spans), np.repeat(starts, spans) + ahead
            guesses = np.flatnonzero(ahead).astype(np.int32)
            batch = build(Columns(rows, places, np.ones_like(rows), guesses), self._tables)
            batch.kv_len = torch.from_numpy(np.repeat(starts + spans, spans))
            batch.ids[torch.from_numpy(guesses).long()] = self._forward.head.mask
            logits = self._forward.write(batch).numpy()
            ahead, rows, places = ahead[guesses], rows[guesses], places[guesses]
            for place in range(1, int(counts.max()) + 1):  # so that a grammar goes ahead with them
                own = ahead == place
                self._sampler.guess(logits[own], rows[own], places[own], np.empty(0, DRAW))

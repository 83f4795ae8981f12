"""Drafts of another model, which reads all that its target reads (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023). It draws with the target's noise, so that a draft is right
where both draw the same token, and no rejection is needed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import DRAW
from sgla.messages import SAMPLE, NewRow, StepPlan
from sgla.worker.batch import Columns, Wanted, build
from sgla.worker.drafts import Guessing
from sgla.worker.forward import Forward
from sgla.worker.pace import Pace
from sgla.worker.state import Int32s, SlotTables, column


def with_vocab(forward: Forward, own: int, vocab: int) -> Forward:
    """``forward`` of a model with ``own`` tokens, as if it had ``vocab``: the others are none of its guesses,
    and it takes its last one for them."""
    if own == vocab:
        return forward

    def run(batch: ForwardBatch) -> Tensor:
        batch.ids, batch.draws = batch.ids.clamp(max=own - 1), np.empty(0, DRAW)
        logits = forward(batch)
        whole = logits.new_full((len(logits), vocab), -torch.inf)
        whole[:, : min(own, vocab)] = logits[:, :vocab]
        return whole

    return run


class ModelDrafts:
    """``forward`` is that of the model that guesses; it writes its KV to the pages that the target's layers
    have, so what the target finds in the prefix tree is there for both. ``spare``: tokens that it may
    read in a step beside those of the target."""

    def __init__(
        self, tables: SlotTables, sampler: Guessing, forward: Forward, pace: Pace, spare: int
    ) -> None:
        self._tables, self._sampler, self._forward, self._pace = tables, sampler, forward, pace
        self._read = np.zeros(
            len(tables.limit), np.int32
        )  # tokens of slots that it knows; -1: all there were
        self._spare = spare

    def admit(self, new: NewRow) -> None:
        self._read[new.slot] = -1
        self._pace.admit(new.slot)

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        """Reads the tokens of the step, and of rows with drafts as many more as it guesses, but for the last
        one, which the next step reads if it was right. Where there are rows of one token alone and none
        guesses, reading can wait."""
        slots = column(plan.slots)
        self._sampler.forget_guesses()
        starts, q_lens, counts = self._pace.begin(plan, self._tables)
        read, guessing = self._read[slots], np.flatnonzero(counts)
        behind = np.where(read < 0, 0, np.maximum(starts - read, 0))
        alone = plan.flags == bytes([SAMPLE]) * len(slots) and not (plan.new or counts.any())
        few = alone and bool((q_lens == 1).all()) and int(behind.sum()) + len(slots) <= self._spare
        if self._pace.adaptive and few:
            return (starts, q_lens) if plan.drafts else None
        behind[behind.cumsum() > self._spare] = 0
        self._read[slots] = starts + q_lens + np.maximum(counts - 1, 0)
        begins, spans = starts - behind, q_lens + behind
        logits = np.cumsum(spans, dtype=np.int32)[guessing] - 1
        with self._pace.reading(int(spans.sum())):
            self._draw(Columns(slots, begins, spans, logits), slots[guessing], starts[guessing] + 1)
        for more in range(1, int(counts.max(initial=0))):
            going = np.flatnonzero(counts > more)
            at, ones = starts[going] + more, np.ones(len(going), np.int32)
            every = np.arange(len(going), dtype=np.int32)
            with self._pace.guessing(len(going)):
                self._draw(Columns(slots[going], at, ones, every), slots[going], at + 1)
        return (starts, (q_lens + counts).astype(np.int32)) if plan.drafts else None

    def took(self, tokens: int, seconds: float) -> None:
        self._pace.step(tokens, seconds)

    def learn(self, slots: Int32s, guessed: Int32s, right: Int32s) -> None:
        self._pace.learn(slots, guessed, right)

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        """What it has read of wrong guesses is none of the text."""
        slots = wanted.slots[wanted.first]
        self._read[slots] = np.minimum(self._read[slots], self._tables.computed[slots])

    def _draw(self, columns: Columns, slots: Int32s, positions: Int32s) -> None:
        """Read the tokens of ``columns``, and guess those at ``positions`` of ``slots``."""
        batch = build(columns, self._tables)
        batch.draws = self._sampler.draws(slots, positions)
        logits = self._forward(batch)
        self._sampler.guess(logits.numpy(), slots, positions, batch.draws)

"""Drafts of another model, which reads all that its target reads (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023). It draws with the target's noise, so that a draft is right
where both draw the same token, and no rejection is needed."""

from __future__ import annotations

import numpy as np

from sgla.messages import StepPlan
from sgla.sampling import Sampler
from sgla.worker.batch import Columns, Wanted, build
from sgla.worker.forward import Forward
from sgla.worker.pace import Pace
from sgla.worker.state import Int32s, SlotTables, column

NEW = np.iinfo(np.int32).max


class ModelDrafts:
    """``forward`` is that of the model that guesses; it writes its KV to the pages that the target's layers
    have, so what the target finds in the prefix tree is there for both."""

    def __init__(self, tables: SlotTables, sampler: Sampler, forward: Forward, pace: Pace) -> None:
        self._tables, self._sampler, self._forward, self._pace = tables, sampler, forward, pace
        # Of each slot, tokens with its KV: at most one less than the target has. NEW: as many as that.
        self._read = np.full(len(tables.limit), NEW, np.int32)

    def admit(self, slot: int) -> None:
        self._read[slot] = NEW
        self._pace.admit(slot)

    def guess(self, plan: StepPlan) -> tuple[Int32s, Int32s] | None:
        """Reads the tokens of the step, and of rows with drafts as many more as it guesses, but for the last
        one, which the next step reads if it was right."""
        slots = column(plan.slots)
        self._sampler.forget_guesses()
        starts, q_lens, counts = self._pace.begin(plan, self._tables)
        behind, guessing = (self._read[slots] == starts - 1).astype(np.int32), np.flatnonzero(counts)
        begins, spans = starts - behind, q_lens + behind
        logits = np.cumsum(spans, dtype=np.int32)[guessing] - 1
        self._draw(Columns(slots, begins, spans, logits), slots[guessing], starts[guessing] + 1)
        for more in range(1, int(counts.max(initial=0))):
            going = np.flatnonzero(counts > more)
            at, ones = starts[going] + more, np.ones(len(going), np.int32)
            every = np.arange(len(going), dtype=np.int32)
            with self._pace.guessing(len(going)):
                self._draw(Columns(slots[going], at, ones, every), slots[going], at + 1)
        self._read[slots] = starts + np.maximum(q_lens, counts)
        return (starts, (q_lens + counts).astype(np.int32)) if plan.drafts else None

    def took(self, tokens: int, seconds: float) -> None:
        self._pace.step(tokens, seconds)

    def follow(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        """It has read all that came, or does so with the next step."""
        self._pace.learn(wanted.slots[wanted.first], wanted.runs - 1, counts - 1)

    def _draw(self, columns: Columns, slots: Int32s, positions: Int32s) -> None:
        """Read the tokens of ``columns``, and guess those at ``positions`` of ``slots``."""
        batch = build(columns, self._tables)
        batch.draws = self._sampler.draws(slots, positions)
        logits = self._forward(batch)
        self._sampler.guess(logits.numpy(), slots, positions, batch.draws)

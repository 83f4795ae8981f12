"""Medusa's heads on a GPU, which guess from the hidden state of the last token that their target has read.
The rules are those of ``medusa.py``."""

from __future__ import annotations

import numpy as np
import torch

from sgla.kernels.dispatch import using
from sgla.kernels.ops import Layer
from sgla.kernels.triton import drafts
from sgla.messages import StepPlan
from sgla.model.medusa import Medusa
from sgla.worker.chains import ROWS, Chains
from sgla.worker.device_state import upload
from sgla.worker.gpu_memory import GRAPH_LAYER
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.state import Int32s, column
from sgla.worker.target_hidden import TargetHidden
from sgla.worker.verify import DeviceDrafts


class MedusaChains(Chains):
    """A row guesses ``most`` tokens, and no more than there are heads. They keep nothing of a text."""

    shift, reads_prompts = 1, True

    def __init__(
        self,
        medusa: Medusa,
        target: GpuSteps,
        state: DeviceDrafts,
        most: int,
        adaptive: bool,
        hidden: TargetHidden,
    ) -> None:
        captures = target.attention.captures
        super().__init__(target, state, min(most, len(medusa.heads)), adaptive, captures)
        self._heads, self._hidden = medusa.heads, hidden
        self._given = torch.zeros(ROWS[-1], medusa.width, dtype=hidden.latest.dtype, device="cuda")

    def take(self, kv: list[Layer]) -> None:
        assert not kv

    @property
    def graph_bytes(self) -> int:
        steps = sum(count for _, count in self.pairs) if self._captures else 0
        return steps * GRAPH_LAYER

    def _admit(self, plan: StepPlan) -> None:
        self._raise_floors(plan)

    def follow(self, plan: StepPlan, deep: int) -> None:
        most = column(plan.drafts) if plan.drafts else np.zeros(0, np.int32)
        guessing = most > 0
        if guessing.any():
            rows = column(plan.slots)[guessing], most[guessing]
            self._guess(*rows, self._pair(*rows), np.zeros_like(rows[1]))

    def behind(self, slots: Int32s, starts: Int32s, q_lens: Int32s, first: Int32s) -> None:
        at, d_slots, positions = upload(np.stack([first + q_lens - 1, slots, starts + q_lens - 1]))
        self._hidden.keep(d_slots, positions, at.long())
        self._floors.index_copy_(0, d_slots.long(), positions)

    def _chain(self, size: int, count: int) -> None:
        target, computed, limits = self._target, self._state.computed, self._state.limits
        rows, most, _ = self._columns[:, :size]
        slots, starts, ends = self._slots[:size], self._starts[:size], self._ends[:size]
        given, read = self._given[:size], (slots, starts, ends, self._padding)
        for ahead, head in enumerate(self._heads[:count]):
            drafts.go_on(rows, most, computed, limits, self._floors, ahead, self.shift, *read)
            if not ahead:
                drafts.take(given, self._hidden.ring, slots, starts)
            with using(target.ops):
                logits = head.part(given)
            target.sampler.guess(logits, rows, ends, self._out[:size], head.out.own.start)

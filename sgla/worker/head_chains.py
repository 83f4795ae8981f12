"""Heads that guess on a GPU from hidden states of their target, which never leave it. The rules are those of
``draft_head.py``, but that a head reads what a step has brought in front of the next one, at the beginning of
a chain: then all is known of it, and where no row guesses nothing is read. Prompts it reads behind the step
that did."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgla.attention import DeviceBatch
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.gpu import RecordedForward
from sgla.kernels.ops import Layer
from sgla.kernels.triton import drafts
from sgla.kernels.triton.sampling import Exact
from sgla.layers.vocab import LMHead
from sgla.messages import StepPlan
from sgla.model.base import CausalLM, Decoder
from sgla.model.predictor import Head
from sgla.model.spec import ModelSpec
from sgla.worker.batch import eager_order
from sgla.worker.chains import ROWS
from sgla.worker.device_state import upload
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.model_chains import ModelChains
from sgla.worker.state import Int32s
from sgla.worker.target_hidden import TargetHidden
from sgla.worker.verify import DeviceDrafts


class Hand:
    """``given``: hidden states that the next step reads, [at least T, *]; ``kept`` [rows, width]: those that
    it makes of the tokens whose logits are wanted; ``shown``: what these logits are made of, if that is
    something else and wanted, too (``show_rows``)."""

    given: Tensor
    shown: Tensor | None = None

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self.kept = torch.zeros(rows, width, dtype=dtype, device="cuda")

    def show_rows(self, rows: int) -> None:
        self.shown = self.kept.new_zeros(rows, self.kept.shape[1])

    def give(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.given[: len(out)])

    def keep(self, x: Tensor) -> None:
        self.kept[: len(x)].copy_(x)

    def show(self, x: Tensor) -> Tensor:
        if self.shown is None:
            return x
        return ops.inplace(self._show, x)

    def _show(self, x: Tensor) -> None:
        assert self.shown is not None
        self.shown[: len(x)].copy_(x)


class HeadModel(CausalLM):
    """``head`` as a model of the tokens behind those of which hidden states are given: by its target, if it
    ``reads``, or of its own. ``spec``: of its layer."""

    def __init__(self, head: Head, target: Decoder, spec: ModelSpec, hand: Hand, reads: bool) -> None:
        self.spec, self.shard, self.positions = spec, target.shard.of_guesses, target.positions
        self.embed, self.lm_head = target.embed, head.out
        self._head, self._hand, self._reads = head, hand, reads

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        head, hand = self._head, self._hand
        tokens = head.embed(batch.ids)
        hidden = ops.call(hand.give, tokens, head.target_width if self._reads else head.width)
        hidden = head.read(hidden) if self._reads else hidden
        hidden, shown = head.forward(tokens, hidden, batch, kv)  # type: ignore[arg-type]
        alike = shown is hidden
        if rows is not None:
            hidden = ops.gather(hidden, rows)
            shown = hidden if alike else ops.gather(shown, rows)
        hidden = ops.inplace(hand.keep, hidden)
        return hidden if alike else hand.show(shown)


class HeadChains(ModelChains):
    """``steps``: of the head behind the first guess; ``first``: the model that reads the target's ``hidden``
    states. ``ids``: of the head; ``exact``: what its output layer was rounded of."""

    shift, reads_prompts = 1, True

    def __init__(
        self,
        steps: GpuSteps,
        target: GpuSteps,
        state: DeviceDrafts,
        most: int,
        adaptive: bool,
        first: CausalLM,
        hand: Hand,
        hidden: TargetHidden,
        ids: Tensor | None,
        exact: LMHead | None = None,
    ) -> None:
        super().__init__(steps, target, state, most, adaptive)
        self._first_model, self._hand, self._hidden = first, hand, hidden
        room, width = len(self._slots), hidden.latest.shape[1]
        self._taken = torch.zeros(room, width, dtype=hidden.latest.dtype, device="cuda")
        self._ids_of = None if ids is None else ids.cuda()
        vocab = target.model.spec.vocab
        if self._ids_of is not None:
            self._whole = torch.full((ROWS[-1], vocab), -torch.inf, device="cuda")

        self._exact_weight, self._exact_rows = None if exact is None else exact.weight.data, None
        if exact is not None and self._ids_of is not None:
            ids = self._ids_of[exact.own.start : exact.own.stop]
            self._exact_rows = torch.zeros(vocab, dtype=torch.int32, device="cuda")
            self._exact_rows[ids] = torch.arange(len(ids), dtype=torch.int32, device="cuda")

    def take(self, kv: list[Layer]) -> None:
        super().take(kv)
        self._reading = RecordedForward(self._first_model, kv, self.steps.ops)

    def _rehearse(self) -> None:
        self._hand.given = self._hidden.latest
        super()._rehearse()

    def _sizes(self, most: int) -> list[int]:
        return self._reading.sizes(most)

    def _width(self, count: int) -> int:
        return count + 1

    def _left(self, most: Int32s) -> Int32s:
        return most

    def _admit(self, plan: StepPlan) -> None:
        """There are no hidden states of what new rows find in the prefix tree."""
        super()._admit(plan)
        self._raise_floors(plan)

    def _read_on(self, slots: Int32s, starts: Int32s, q_lens: Int32s) -> None:
        """Prompts are read behind their step; what is unread before that is left out."""
        self._unread[slots] = 0

    def _catch_up(self, slots: Int32s, starts: Int32s, width: int) -> None:
        self._unread[slots] = np.minimum(self._unread[slots], self._hidden.reach)
        super()._catch_up(slots, starts, width)

    def behind(self, slots: Int32s, starts: Int32s, q_lens: Int32s, first: Int32s) -> None:
        last, ends = first + q_lens - 1, starts + q_lens - 1
        turned = self.steps.tables.turned(slots, ends)
        at, d_slots, positions, places = upload(np.stack([last, slots, ends, turned]))
        self._hidden.keep(d_slots, places, at.long())
        self._floors.index_copy_(0, d_slots.long(), positions)
        order = eager_order(starts, q_lens)
        at = np.concatenate([np.arange(first[i], first[i] + q_lens[i]) for i in order])
        self._hand.given = self._hidden.latest[upload(at).long()]
        self._extend(slots, starts, q_lens)

    def _extend(self, slots: Int32s, starts: Int32s, q_lens: Int32s) -> None:
        order = eager_order(starts, q_lens)
        batch = self.steps.extend_batch(slots[order], starts[order], q_lens[order], shift=self.shift)
        self._reading.hidden(batch, self._q_start[:1])

    def _read_few(self, batch: DeviceBatch) -> None:
        self._take(batch)
        self._reading.hidden(batch, self._q_start[:1])

    def _take(self, batch: DeviceBatch) -> None:
        self._hand.given = self._taken[: batch.tokens]
        drafts.take(self._hand.given, self._hidden.ring, batch.slots, batch.positions)

    def _first(self, batch: DeviceBatch, last: Tensor, out: Tensor) -> Tensor:
        self._take(batch)
        return self._reading.step(batch, last, out).logits

    def _further(self, batch: DeviceBatch, out: Tensor) -> Tensor:
        self._hand.given = self._hand.kept
        return super()._further(batch, out)

    def _of_target(self, logits: Tensor) -> tuple[Tensor, int]:
        own = self._first_model.lm_head.own
        if self._ids_of is None:
            return logits, own.start
        whole = self._whole[: len(logits)]
        return whole.index_copy_(1, self._ids_of[own.start : own.stop], logits), 0

    def _exact(self, count: int) -> Exact | None:
        if self._exact_weight is None:
            return None
        made_of = self._hand.kept if self._hand.shown is None else self._hand.shown
        return Exact(made_of[:count], self._exact_weight, self._exact_rows)

"""DFlash's heads on a GPU: a chain reads the latest tokens of a row as any head does (``head_chains.py``),
and then a block at once. The rules are those of ``blocks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import Layer
from sgla.kernels.triton import drafts, step
from sgla.layers.vocab import LMHead
from sgla.model.base import CausalLM, Decoder
from sgla.model.dflash import DFlash
from sgla.model.spec import ModelSpec
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.head_chains import Hand, HeadChains
from sgla.worker.target_hidden import TargetHidden
from sgla.worker.verify import DeviceDrafts


class BlockModel(CausalLM):
    """``head`` as a model that keeps tokens of which hidden states are given, if it ``reads``, or of blocks.
    ``spec``: of its layers."""

    def __init__(self, head: DFlash, target: Decoder, spec: ModelSpec, hand: Hand, reads: bool) -> None:
        self.spec, self.shard, self.positions = spec, target.shard.of_guesses, target.positions
        self.embed, self.lm_head = target.embed, head.out
        self._head, self._hand, self._reads = head, hand, reads

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        head = self._head
        if not self._reads:
            assert rows is not None
            return self._hand.show(head.forward(batch, kv, rows))
        given = ops.call(self._hand.give, head.embed(batch.ids), head.target_width)
        made = head.keep(given, batch, kv)
        return made if rows is None else ops.gather(made, rows)


class BlockChains(HeadChains):
    """``steps``: of blocks; ``first``: what reads the target's ``hidden`` states. ``mask``: of the head."""

    def __init__(
        self,
        steps: GpuSteps,
        target: GpuSteps,
        state: DeviceDrafts,
        most: int,
        adaptive: bool,
        first: BlockModel,
        hand: Hand,
        hidden: TargetHidden,
        mask: int,
        exact: LMHead | None = None,
    ) -> None:
        super().__init__(steps, target, state, most, adaptive, first, hand, hidden, None, exact)
        room = len(self._slots)
        self._mask = mask
        self._until, self._where, self._places, self._drawn = torch.zeros(
            4, room, dtype=torch.int32, device="cuda"
        )
        self._guesses: dict[tuple[int, int], Tensor] = {}  # of blocks: which tokens stand for guesses
        for size, count in self.pairs:
            every = self._q_start[: size * (count + 1)].view(size, count + 1)
            self._guesses[size, count] = every[:, 1:].flatten()

    def _chain(self, size: int, count: int) -> None:
        state, (rows, most, _) = self._state, self._columns[:, :size]
        slots, starts = self._slots[: size * (count + 1)], self._starts[: size * (count + 1)]
        known = state.computed, state.limits
        drafts.go_on(
            rows, most, *known, self._floors, 0, self.shift, slots, starts, self._ends[:size], self._padding
        )
        self._read_few(self._batch(slots, starts))
        until, where = self._until[: len(slots)], self._where[: size * count]
        places, drawn = self._places[: size * count], self._drawn[: size * count]
        drafts.block(rows, most, *known, slots, starts, until, where, places, self._padding)
        batch, last = self._block(slots, starts, until, size), self._guesses[size, count]
        logits = self.steps.forward.step(batch, last, self.steps.logits[: size * count]).logits
        own, begin = self._of_target(logits)
        self._target.sampler.guess(own, where, places, drawn, begin, self._exact(size * count))

    def _block(self, slots: Tensor, starts: Tensor, until: Tensor, size: int) -> DeviceBatch:
        """Tokens of blocks, each of which sees ``until`` int32[*]."""
        batch = self._batch(slots, starts, shift=0)
        batch.kv_len.copy_(until)
        for window, tiles in batch.cum.items():
            step.count_tiles(batch.kv_len, tiles, attention.TILE, window)
        batch.ids.view(size, -1)[:, 1:] = self._mask
        return batch

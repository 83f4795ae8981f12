"""When the tokens of a transcription were said: how much some heads attend to each place of a window, of a
request that reads the text again (``RowSampling.pool``, with how many of its tokens are no text, and how many
frames the window has)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.sampling.warp import places_of
from sgla.worker.features import threads
from sgla.worker.state import Int32s


class Aligner:
    """``heads``: pairs of a layer and a head; ``width``: of the median; ``asked``: by slot, of requests that
    want times."""

    def __init__(self, heads: Sequence[Sequence[int]], width: int, asked: Mapping[int, Int32s]) -> None:
        self.heads: dict[int, list[int]] = {}
        for layer, head in heads:
            self.heads.setdefault(layer, []).append(head)
        self._width, self._asked = width, asked
        self._weights: dict[tuple[int, int], list[Tensor]] = {}  # by slot and layer, of the tokens so far

    def reads(self, batch: ForwardBatch) -> bool:
        return bool(self._asked) and any(slot in self._asked for slot in batch.slots.tolist())

    def take(self, layer: int, q: Tensor, keys: Tensor, batch: ForwardBatch, scale: float) -> None:
        """``q`` [T, H * hd] of all tokens of a step; ``keys`` [slots, H, N, hd]."""
        starts = batch.q_start.tolist()
        for slot, first, end in zip(batch.slots.tolist(), starts, starts[1:]):
            if slot not in self._asked or layer not in self.heads:
                continue
            own = self.heads[layer]
            queries = q[first:end].unflatten(1, (keys.shape[1], -1)).transpose(0, 1)[own].float()
            scores = queries @ keys[slot, own].float().transpose(1, 2) * scale
            self._weights.setdefault((slot, layer), []).append(scores.softmax(-1))

    def admit(self, slot: int) -> None:
        for layer in self.heads:
            self._weights.pop((slot, layer), None)

    def places(self, slot: int) -> NDArray[np.float32]:
        """float32[n]: where each token of the text begins."""
        skipped, frames = self._asked[slot].tolist()
        parts = [torch.cat(self._weights.pop((slot, layer)), 1) for layer in self.heads]
        return places_of(torch.cat(parts)[:, skipped:, : frames // 2], self._width).astype(np.float32)


class AlignedForward:
    """A forward pass that is ``plain`` for steps without such requests, and ``eager`` for others."""

    def __init__(
        self,
        plain: Callable[[ForwardBatch], Tensor],
        eager: Callable[[ForwardBatch], Tensor],
        aligner: Aligner,
        watch: Callable[[Aligner | None], None],
        count: int,
    ) -> None:
        self._plain, self._eager, self._aligner = plain, eager, aligner
        self._watch, self._count = watch, count

    def __call__(self, batch: ForwardBatch) -> Tensor:
        if not self._aligner.reads(batch):
            return self._plain(batch)
        self._watch(self._aligner)
        try:
            with threads(self._count):
                return self._eager(batch)
        finally:
            self._watch(None)

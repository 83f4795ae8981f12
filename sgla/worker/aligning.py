"""When the tokens of a transcription were said: how much some heads attend to each place of a window, of a
request that reads the text again (``RowSampling.pool``, with how many of its tokens are no text, and how many
frames the window has)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.sampling.warp import matrix_of, places_in
from sgla.worker.features import threads
from sgla.worker.state import Int32s


class Said(NamedTuple):
    """``matrix``: that of ``matrix_of``, where the model is."""

    matrix: Tensor

    def numpy(self) -> NDArray[np.float32]:
        """float32[tokens]: the place where each begins; of a matrix on the host."""
        return places_in(self.matrix).astype(np.float32)


class Aligner:
    """``heads``: pairs of a layer and a head; ``width``: of the median; ``asked``: by slot, of requests that
    want times."""

    def __init__(self, heads: Sequence[Sequence[int]], width: int, asked: Mapping[int, Int32s]) -> None:
        self.heads: dict[int, list[int]] = {}
        for layer, head in heads:
            self.heads.setdefault(layer, []).append(head)
        self._width, self._asked = width, asked
        self._rows: list[tuple[int, int, int]] = []  # of the step: slot, first and last token
        self._weights: dict[tuple[int, int], list[Tensor]] = {}  # by slot and layer, of the tokens so far

    def begin(self, slots: Int32s, q_lens: Int32s) -> bool:
        """Whether a step with these rows reads texts whose times are wanted."""
        ends = np.cumsum(q_lens)
        rows = zip(slots.tolist(), (ends - q_lens).tolist(), ends.tolist())
        self._rows = [row for row in rows if row[0] in self._asked]
        return bool(self._rows)

    def take(self, layer: int, q: Tensor, keys: Tensor, batch: ForwardBatch, scale: float) -> None:
        """``q`` [T, H * hd] of all tokens of a step; ``keys`` [slots, H, N, hd]."""
        for slot, first, end in self._rows if layer in self.heads else []:
            own = self.heads[layer]
            queries = q[first:end].unflatten(1, (keys.shape[1], -1)).transpose(0, 1)[own].float()
            scores = queries @ keys[slot, own].float().transpose(1, 2) * scale
            self._weights.setdefault((slot, layer), []).append(scores.softmax(-1))

    def admit(self, slot: int) -> None:
        for layer in self.heads:
            self._weights.pop((slot, layer), None)

    def said(self, slot: int) -> Said:
        """When the text of a slot was said, which has been read."""
        skipped, frames = self._asked[slot].tolist()
        parts = [torch.cat(self._weights.pop((slot, layer)), 1) for layer in self.heads]
        return Said(matrix_of(torch.cat(parts)[:, skipped:, : frames // 2], self._width))


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
        if not self._aligner.begin(batch.slots.numpy(), batch.q_start.diff().numpy()):
            return self._plain(batch)
        self._watch(self._aligner)
        try:
            with threads(self._count):
                return self._eager(batch)
        finally:
            self._watch(None)

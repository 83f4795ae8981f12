"""Hidden states of a target on a GPU, which a draft head reads (``draft_head.py``): those of all tokens of
its latest step, and of the latest tokens of each slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.triton import drafts
from sgla.model.base import Decoder
from sgla.worker.hooked import show

REACH = 32  # tokens of a slot, at least


class TargetHidden:
    """``latest`` [tokens, parts * width]; ``ring`` [slots, *, parts * width], which has the latest ``reach``
    tokens of each slot. A step of the target writes both. ``layers``: of the target, whose inputs they
    are; without any they are the final ones, which its steps put into ``final``."""

    def __init__(
        self, target: Decoder, layers: Sequence[int], tokens: int, slots: int, most: int, dtype: torch.dtype
    ) -> None:
        self.layers, width = layers, target.spec.hidden * max(len(layers), 1)
        size = max(REACH, 1 << (2 * most + 2).bit_length())
        self.reach = size - most - 2  # a step may have overwritten the others
        self.latest = torch.zeros(tokens, width, dtype=dtype, device="cuda")
        self.ring = torch.zeros(slots, size, width, dtype=dtype, device="cuda")
        self.final = None if layers else self.latest
        if layers:
            parts = self.latest.split(target.spec.hidden, 1)
            show(target, layers, [partial(ops.copied, to=columns) for columns in parts])

    def keep(self, slots: Tensor, positions: Tensor, at: Tensor | None = None) -> None:
        """Of the first tokens of the latest step, or of those ``at`` int64[N]: their slots and positions,
        int32[N]."""
        values = self.latest[: len(slots)] if at is None else self.latest[at]
        drafts.keep(values, self.ring, slots, positions)

"""Hidden states of a target on a GPU, which a draft head reads (``draft_head.py``): those of all tokens of
its latest step, and of the latest tokens of each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sgla.kernels.triton import drafts
from sgla.model.base import Decoder
from sgla.worker.hooked import Hooked

REACH = 32  # tokens of a slot, at least


class TargetHidden:
    """``latest`` [tokens, parts * width]; ``ring`` [slots, *, parts * width], which has the latest ``reach``
    tokens of each slot. A step of the target writes both. ``layers``: of the target, whose inputs they
    are; without any they are the final ones (``hook``)."""

    hook: Callable[[Tensor], None] | None = None

    def __init__(
        self, target: Decoder, layers: Sequence[int], tokens: int, slots: int, most: int, dtype: torch.dtype
    ) -> None:
        self._width, self.layers = target.spec.hidden, layers
        width = self._width * max(len(layers), 1)
        size = max(REACH, 1 << (2 * most + 2).bit_length())
        self.reach = size - most - 2  # a step may have overwritten the others
        self.latest = torch.zeros(tokens, width, dtype=dtype, device="cuda")
        self.ring = torch.zeros(slots, size, width, dtype=dtype, device="cuda")
        for part, layer in enumerate(layers):
            target.blocks[layer] = Hooked(target.blocks[layer], self._hook(part))
        if not layers:
            self.hook = self._hook(0)

    def _hook(self, part: int) -> Callable[[Tensor], None]:
        columns = self.latest[:, part * self._width : (part + 1) * self._width]

        def hook(x: Tensor) -> None:
            columns[: len(x)].copy_(x)

        return hook

    def keep(self, slots: Tensor, positions: Tensor, at: Tensor | None = None) -> None:
        """Of the first tokens of the latest step, or of those ``at`` int64[N]: their slots and positions,
        int32[N]."""
        values = self.latest[: len(slots)] if at is None else self.latest[at]
        drafts.keep(values, self.ring, slots, positions)

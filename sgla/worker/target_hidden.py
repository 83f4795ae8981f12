"""What a target on a GPU tells of its tokens to a head that guesses (``draft_head.py``): hidden states of all
tokens of its latest step, and of the latest tokens of each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sgla.kernels.triton import drafts
from sgla.model.base import Decoder
from sgla.worker.telling import Telling

REACH = 32  # tokens of a slot, at least


class Told:
    """``latest`` [tokens, parts * width]; ``ring`` [slots, *, parts * width], which has the latest ``reach``
    tokens of each slot. A step of the target writes both. ``layers``: of the target, whose inputs it tells;
    without any it tells what it makes of all tokens (``tell``)."""

    tell: Callable[[Tensor], None] | None = None

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
            target.blocks[layer] = Telling(target.blocks[layer], self._teller(part))
        if not layers:
            self.tell = self._teller(0)

    def _teller(self, part: int) -> Callable[[Tensor], None]:
        columns = self.latest[:, part * self._width : (part + 1) * self._width]

        def tell(x: Tensor) -> None:
            columns[: len(x)].copy_(x)

        return tell

    def keep(self, slots: Tensor, positions: Tensor, at: Tensor | None = None) -> None:
        """Of the first tokens of the latest step, or of those ``at`` int64[N]: their slots and positions,
        int32[N]."""
        values = self.latest[: len(slots)] if at is None else self.latest[at]
        drafts.keep(values, self.ring, slots, positions)

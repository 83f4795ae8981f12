"""A look at what goes into a layer as an op, so that it is recorded with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.model.base import Block


class Hooked:
    """A block whose input, a hidden state, goes through ``look`` first, an op that returns it:
    ``ops.copied``, or on a CPU ``ops.tap``."""

    def __init__(self, block: Block, look: Callable[[Tensor], Tensor]) -> None:
        self._block, self._look = block, look

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = self._look(x if h is None else ops.add(h, x))
        return self._block(x, None, batch, kv, rows)

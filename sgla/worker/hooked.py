"""A layer that tells what goes into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.model.base import Block


class Telling:
    """A block that tells what it is given."""

    def __init__(self, block: Block, tell: Callable[[Tensor], None]) -> None:
        self._block, self._tell = block, tell

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = ops.inplace(self._tell, x if h is None else ops.add(h, x))
        return self._block(x, None, batch, kv, rows)

"""A forward hook as an op, so that it is recorded with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.model.base import Block


class Hooked:
    """A block that gives its input, a hidden state, to ``hook`` first. ``how``: ``ops.inplace``, or on a CPU
    ``ops.tap``."""

    def __init__(
        self,
        block: Block,
        hook: Callable[[Tensor], None],
        how: Callable[[Callable[[Tensor], None], Tensor], Tensor] = ops.inplace,
    ) -> None:
        self._block, self._hook, self._how = block, hook, how

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = self._how(self._hook, x if h is None else ops.add(h, x))
        return self._block(x, None, batch, kv, rows)

"""The inputs of linear layers whose weights have their columns in another order (GPTQ's act-order)."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from sgla.errors import WeightError
from sgla.layers.build import Build, Share
from sgla.quant.quants import Grouped
from sgla.quant.weight import SourceTensor


class Gather:
    """``order``: which input channel each of the ``k`` columns of a weight has, int64 ``[k]``, as the files
    of all layers that are multiplied as one say."""

    def __init__(self, k: int) -> None:
        self.order = torch.arange(k)
        self._known: Tensor | None = None
        self._lock = Lock()  # several threads load

    def __call__(self, x: Tensor) -> Tensor:
        """x ``[T, k]`` in the order of the columns."""
        return x.index_select(1, self.order)

    def sort(self, source: Share) -> Share:
        """Raises WeightError where layers that are multiplied as one differ."""
        order, found = _sorted(source)
        with self._lock:
            if self._known is None:
                self._known = order
                self.order.copy_(order)
            elif not torch.equal(self._known, order):
                raise WeightError(
                    "layers that are multiplied as one have their inputs in different orders (g_idx); "
                    "--quantization none computes them in --dtype"
                )
        return cast(Share, found)


def gathering(build: Build, k: int, *modules: str) -> Gather | None:
    """What layers that are multiplied as one and have all of their ``k`` inputs need, if anything."""
    packed = build.kind_of(*modules, gathers=True) != build.plain
    return Gather(k) if packed and build.scattered(*modules) else None


def _sorted(source: SourceTensor) -> tuple[Tensor, SourceTensor]:
    """What is behind views of rows, sorted, and its order."""
    if isinstance(source, Grouped) and source.order is not None:
        return source.sorted()
    inner: SourceTensor | None = getattr(source, "source", None)
    if inner is None:
        return torch.arange(source.shape[1], device="cpu"), source
    order, found = _sorted(inner)
    return order, replace(cast(Any, source), source=found)

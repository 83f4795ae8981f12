"""Weights in floating point."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor

from sgla.quant.weight import SourceTensor, Weight


class Plain(Weight):
    """One tensor ``[n, k]``."""

    native = True
    dtype: ClassVar[torch.dtype]

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        return cls(*dense.shape, dense.to(cls.dtype))

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        return tensors[0]

    @classmethod
    def read(cls, source: SourceTensor, rows: range, columns: range | None) -> Self:
        values = source.dense(rows)
        return cls.pack(values if columns is None else values[:, columns.start : columns.stop])

    def columns(self, start: int, stop: int) -> Self:
        return type(self)(self.n, stop - start, self.data[:, start:stop])


class F32(Plain):
    kind, dtype = "f32", torch.float32


class BF16(Plain):
    kind, dtype = "bf16", torch.bfloat16

"""Weights in 8-bit floating point with a scale for each output channel."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from sgla.quant.weight import Weight

MAX = 448.0


class E4M3(Weight):
    """e4m3 numbers (arXiv 2209.05433) ``[n, k]``, float32 scales ``[n]``. Kernels for GPUs alone."""

    kind = "fp8"

    @classmethod
    def pack(cls, dense: Tensor) -> Self:
        w = dense.float()
        scale = w.abs().amax(1).clamp_min(1e-30) / MAX
        return cls(*w.shape, (w / scale[:, None]).clamp_(-MAX, MAX).to(torch.float8_e4m3fn), scale)

    @classmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        numbers, scale = tensors
        return numbers.float() * scale[:, None]

    def columns(self, start: int, stop: int) -> Self:
        numbers, scale = self.tensors
        return type(self)(self.n, stop - start, numbers[:, start:stop], scale)

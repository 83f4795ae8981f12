"""Normalization over the width."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.layers.build import Build


class RMSNorm:
    """``x / rms(x) * (w + offset)``; Gemma's checkpoints store w with offset 1."""

    def __init__(self, build: Build, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = build.vector(f"{name}.weight", size, offset=offset)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(h), h)`` with ``h = residual + x``, or x alone at the start of the residual stream."""
        if residual is None:
            return self(x), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """``(x - mean) / deviation * (w + offset) + b``; without ``bias`` b is 0."""

    def __init__(
        self, build: Build, name: str, size: int, eps: float, offset: float = 0.0, bias: bool = True
    ) -> None:
        self.weight = build.vector(f"{name}.weight", size, offset=offset)
        self.bias = build.vector(f"{name}.bias", size) if bias else torch.zeros(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As that of ``RMSNorm``."""
        h = x if residual is None else ops.add(residual, x)
        return self(h), h


Norm = RMSNorm | LayerNorm

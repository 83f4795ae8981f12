"""Normalization over the width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgla.dist import Shard
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


class SplitRMSNorms:
    """RMSNorm of several vectors of a token, each over its whole width, of which each rank has some columns.

    ``parts``: of each the name, the width, this rank's columns, and on how many ranks each of them is."""

    def __init__(
        self, build: Build, parts: Sequence[tuple[str, int, range, int]], eps: float, offset: float = 0.0
    ) -> None:
        self.weights = [build.vector(f"{n}.weight", width, own, offset) for n, width, own, _ in parts]
        self.shares = torch.tensor([1 / (width * ranks) for _, width, _, ranks in parts])
        self.shard: Shard = build.shard
        self.eps = eps

    def __call__(self, *vectors: Tensor) -> list[Tensor]:
        """Each ``[T, this rank's columns]``; the sums of squares go round as one message."""
        if self.shard.size == 1:
            return [ops.rms_norm(x, weight, self.eps) for x, weight in zip(vectors, self.weights)]
        squares = torch.stack([x.float().square().sum(1) for x in vectors], dim=1) * self.shares
        factors = torch.rsqrt(ops.all_reduce(squares, self.shard) + self.eps).unbind(1)
        return [
            (x.float() * factor[:, None] * weight).to(x.dtype)
            for x, factor, weight in zip(vectors, factors, self.weights)
        ]


Norm = RMSNorm | LayerNorm

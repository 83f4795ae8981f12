"""Normalization over the width."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from sgla.dist import Shard
from sgla.kernels import ops
from sgla.layers.build import Build, StackPart
from sgla.quant.weight import SourceTensor


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
        if residual is None:
            return self(x), x
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


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

    def beside(self, x: Tensor) -> Tensor:
        """``x [T, n]``, whose first columns are the two vectors; the others stay as they are."""
        if self.shard.size == 1:
            first, second = self.weights
            return ops.rms_norm_beside(x, first, second, self.eps)
        widths = [len(weight) for weight in self.weights]
        *vectors, rest = x.split([*widths, x.shape[1] - sum(widths)], dim=1)
        return torch.cat([*self(*vectors), rest], dim=1)


class HeadLayerNorms:
    """LayerNorm without a bias of heads with ``dim`` values, each of which has weights of its own.

    ``parts``: of several vectors of a token the name, all heads, and this rank's. A checkpoint has the
    weights of each head (``name.0.weight`` and so on) or those of all (``name.weight``). ``order``: in which
    the values of a head come, where it is not the checkpoint's."""

    def __init__(
        self,
        build: Build,
        parts: Sequence[tuple[str, int, range]],
        dim: int,
        eps: float,
        order: Tensor | None = None,
    ) -> None:
        self.weight = torch.zeros(sum(len(own) for _, _, own in parts), dim)
        self.eps, first = eps, 0
        for name, heads, own in parts:
            names = [f"{name}.{head}.weight" for head in range(heads)]
            build.stacks[f"{name}.weight"] = (
                (heads, dim),
                [StackPart(each, head, range(dim)) for head, each in enumerate(names)],
            )
            for head, each in enumerate(names):
                at = first + head - own.start if head in own else None
                build.declare(each, (dim,), partial(self._take, at, order))
            first += len(own)

    def _take(self, at: int | None, order: Tensor | None, source: SourceTensor) -> None:
        if at is not None:
            weight = source.dense()
            self.weight[at].copy_(weight if order is None else weight[order.to(weight.device)])

    def __call__(self, x: Tensor) -> Tensor:
        """``x [T, n]``, whose first columns are those heads; the others stay as they are."""
        heads, rest = x.split([self.weight.numel(), x.shape[1] - self.weight.numel()], dim=1)
        heads = heads.unflatten(1, self.weight.shape).float()
        normed = layer_norm(heads, self.weight.shape[1:], eps=self.eps) * self.weight
        return torch.cat([normed.to(x.dtype).flatten(1), rest], dim=1)


Norm = RMSNorm | LayerNorm

"""Hyper-connections (mHC, arXiv 2512.24880): the residual stream is several wide. A layer reads a sum of the
streams and adds what it makes to each, after they have been mixed; how, it makes of the streams."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.hyper import stream_weights
from sgla.layers.build import Build
from sgla.layers.spec import HyperConnections
from sgla.quant.weight import SourceTensor


class Taken(NamedTuple):
    """What a layer reads, x ``[T, d]``, and how the streams take what it makes: float32 ``writes [T, n]`` and
    ``mixed [T, n, n]``, or None where they stay as they are."""

    x: Tensor
    writes: Tensor
    mixed: Tensor | None = None

    def of(self, rows: Tensor) -> Taken:
        """Of these tokens, int64[S]."""
        mixed = None if self.mixed is None else self.mixed[rows]
        return Taken(self.x[rows], self.writes[rows], mixed)


class Streams:
    """Those of one layer: streams are ``[T, n * d]``. ``names``: of the matrix, base and scales in files."""

    def __init__(
        self, build: Build, names: tuple[str, str, str], hidden: int, hyper: HyperConnections, eps: float
    ) -> None:
        (matrix, base, scale), mixes = names, hyper.iterations > 0
        width = (2 + hyper.streams * mixes) * hyper.streams
        self.matrix = values(build, matrix, (width, hyper.streams * hidden))
        self.base, self.scale = build.vector(base, width), build.vector(scale, 2 + mixes)
        self.hyper, self.eps = hyper, eps

    def read(self, h: Tensor) -> Taken:
        n, iterations, eps, magnitude = self.hyper
        x = projected(h, self.matrix, self.eps)
        if not iterations:
            reads, writes = (x.unflatten(1, (2, n)) * self.scale[:, None] + self.base.view(2, n)).unbind(1)
            return Taken(collapsed(h, reads.sigmoid() + eps), magnitude * writes.sigmoid() + eps)
        x = stream_weights(x, self.scale, self.base, n, iterations, eps)
        reads, writes, mixed = x.split([n, n, n * n], 1)
        return Taken(collapsed(h, reads), writes, mixed.unflatten(1, (n, n)))

    def write(self, h: Tensor, taken: Taken, made: Tensor) -> Tensor:
        """The streams behind the layer, which has ``made`` ``[T, d]``."""
        streams = h.unflatten(1, (self.hyper.streams, -1)).float()
        mixed = streams if taken.mixed is None else taken.mixed.transpose(1, 2) @ streams
        return (mixed + taken.writes[..., None] * made[:, None].float()).flatten(1).to(h.dtype)


class Collapse:
    """One stream behind the last layer: ``[T, n * d] -> [T, d]``."""

    def __init__(
        self, build: Build, names: tuple[str, str, str], hidden: int, hyper: HyperConnections, eps: float
    ) -> None:
        matrix, base, scale = names
        self.matrix = values(build, matrix, (hyper.streams, hyper.streams * hidden))
        self.base, self.scale = build.vector(base, hyper.streams), build.vector(scale, 1)
        self.hyper, self.eps = hyper, eps

    def __call__(self, h: Tensor) -> Tensor:
        reads = torch.sigmoid(projected(h, self.matrix, self.eps) * self.scale + self.base)
        return collapsed(h, reads + self.hyper.eps)


def projected(h: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """float32 ``[T, *]``, of all streams together with an RMSNorm."""
    flat = h.float()
    return F.linear(flat, matrix) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)


def collapsed(h: Tensor, reads: Tensor) -> Tensor:
    """``[T, d]``: the sum of the streams, each times its number in ``reads`` ``[T, n]``."""
    streams = h.unflatten(1, (reads.shape[1], -1))
    return (reads[:, None] @ streams.float())[:, 0].to(h.dtype)


def values(build: Build, name: str, shape: tuple[int, int], order: Tensor | None = None) -> Tensor:
    """A float32 matrix ``name``, too small for a storage of its own. ``order``: of the columns of each
    head."""
    made = torch.zeros(shape)

    def take(source: SourceTensor) -> None:
        found = source.dense(range(shape[0]))
        made.copy_(found if order is None else found.unflatten(1, (-1, len(order)))[..., order].flatten(1))

    build.declare(name, shape, take)
    return made

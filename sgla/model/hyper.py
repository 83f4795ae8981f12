"""Hyper-connections (mHC, arXiv 2512.24880): the residual stream is several wide. A layer reads a sum of the
streams and adds what it makes to each, after they have been mixed; how, it makes of the streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.hyper import stream_weights
from sgla.layers.build import Build
from sgla.layers.spec import HyperConnections
from sgla.model.base import Decoder, Norm
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


@dataclass(eq=False)
class Block:
    """One layer: streams ``[T, n * d] -> [T, n * d]``, of ``rows`` alone once every token has left what
    ``kv`` keeps of it. ``attention`` has what brings back to the width apart, as ``out``. ``hashed``: int64
    ``[vocab, top_k]``, the experts that tokens have; None: the mixture chooses them, or there is none."""

    around_attention: Streams
    attention_norm: Norm
    attention: Any
    around_mlp: Streams
    mlp_norm: Norm
    mlp: Any
    hashed: Tensor | None = None

    def __call__(self, h: Tensor, batch: ForwardBatch, kv: Any, rows: Tensor | None) -> Tensor:
        taken = self.around_attention.read(h)
        seen, ids = self.attention(self.attention_norm(taken.x), batch, kv), batch.ids
        if rows is not None:
            seen, h = ops.gather(seen, rows), ops.gather(h, rows)
            taken, ids = taken.of(rows.long()), ids[rows.long()]
        h = self.around_attention.write(h, taken, self.attention.out(seen))
        taken = self.around_mlp.read(h)
        x = self.mlp_norm(taken.x)
        made = self.mlp(x) if self.hashed is None else self.mlp(x, fixed=self.hashed[ids.long()])
        return self.around_mlp.write(h, taken, made)


def through(
    model: Decoder, collapse: Collapse, batch: ForwardBatch, kv: Sequence[Any], rows: Tensor | None
) -> Tensor:
    """``forward`` of a model of such blocks, of which each has its part of ``kv``."""
    blocks = cast(list[Block], model.blocks)
    h: Tensor = model.embed(batch.ids).repeat(1, collapse.hyper.streams)
    for block, layer in zip(blocks, kv):
        h = block(h, batch, layer, rows if block is blocks[-1] else None)
    return model.norm.add(collapse(h), None)[0]


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

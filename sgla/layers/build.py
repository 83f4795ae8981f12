"""What layers are built with, and how they take their part of the checkpoint.

A layer declares the checkpoint tensors it wants under their HF names, each with its full shape and a function
that takes this rank's part. ``model/load.py`` streams the tensors through that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.quant.weight import SourceTensor, Weight, storage

CHUNK = 1 << 22  # values decoded at a time, so that loading needs little memory beyond the final weights


@dataclass(frozen=True)
class Share:
    """A SourceTensor of which ``fill`` takes every ``count``-th piece from number ``index`` on: a large one
    is filled by several threads."""

    source: SourceTensor
    index: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def dense(self, rows: range | None = None) -> Tensor:
        return self.source.dense(rows)

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return self.source.weight(kind, rows, columns)


@dataclass(frozen=True)
class Reordered:
    """A SourceTensor with the rows of each head, ``len(order)`` of them, in another order:
    place ``i`` has row ``order[i]``."""

    source: SourceTensor
    order: Tensor  # int64

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def dense(self, rows: range | None = None) -> Tensor:
        heads, index = self._heads(rows or range(self.shape[0]))
        return self.source.dense(heads)[index]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        heads, index = self._heads(rows)
        return self.source.weight(kind, heads, columns).pick(index)

    def _heads(self, rows: range) -> tuple[range, Tensor]:
        """The rows of all heads that ``rows`` lie in, and which of them they are."""
        size = len(self.order)
        first, last = rows.start // size, -(-rows.stop // size)
        index = (torch.arange(last - first, device="cpu")[:, None] * size + self.order.cpu()).flatten()
        start = rows.start - first * size
        return range(first * size, last * size), index[start : start + len(rows)]


@dataclass(frozen=True)
class Slot:
    """A place for one checkpoint tensor of ``shape``; ``take`` stores this rank's part of it."""

    shape: tuple[int, ...]
    take: Callable[[SourceTensor], None]


class Part(NamedTuple):
    """The declared tensor ``name`` inside another one:
    ``stack[expert][rows]``, or ``rows`` of a matrix or vector."""

    name: str
    expert: int
    rows: range


@dataclass
class Build:
    """``kind`` is the format of linear weights, ``vocab_kind`` that of embedding and output layer.

    ``plain`` is the format of weights that are never quantized. ``stacks`` names tensors that a checkpoint
    may have instead of several declared ones: name -> shape and parts. ``kinds``: formats of the tensors that
    differ from the others.
    """

    shard: Shard = field(default_factory=Shard)
    kind: str = "f32"
    vocab_kind: str = "f32"
    plain: str = "f32"
    table: dict[str, Slot] = field(default_factory=dict)
    stacks: dict[str, tuple[tuple[int, ...], list[Part]]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)

    def kind_of(self, name: str) -> str:
        """The format of the linear layer that has the tensor ``name``."""
        return self.kinds.get(name, self.kind)

    def vocab_kind_of(self, name: str) -> str:
        """The same of embedding and output layer."""
        return self.kinds.get(name, self.vocab_kind)

    def declare(self, name: str, shape: tuple[int, ...], take: Callable[[SourceTensor], None]) -> None:
        assert name not in self.table, name
        self.table[name] = Slot(shape, take)

    def vector(self, name: str, size: int, part: range | None = None, offset: float = 0.0) -> Tensor:
        """A float32 vector holding ``part`` (default: all) of the checkpoint's ``name``, plus ``offset``."""
        vector = torch.zeros(size if part is None else len(part))

        def take(source: SourceTensor) -> None:
            vector.copy_(source.dense(part)).add_(offset)

        self.declare(name, (size,), take)
        return vector


def empty_weight(n: int, k: int, kind: str) -> Weight:
    """An uninitialized Weight ``[n, k]``."""
    return storage(kind).empty(n, k)


def fill(
    weight: Weight,
    at: int,
    source: SourceTensor,
    rows: range,
    columns: range | None = None,
    order: Tensor | None = None,
) -> None:
    """Put ``source[rows, columns]`` into the rows of ``weight`` from ``at`` on,
    those of each head in another ``order``."""
    step = max(1, CHUNK // source.shape[1])
    starts = range(rows.start, rows.stop, step)
    if isinstance(source, Share):
        starts = starts[source.index :: source.count]
    if order is not None:
        source = Reordered(source, order)
    for start in starts:
        taken = range(start, min(start + step, rows.stop))
        weight.put(taken, columns, source, at + start - rows.start)

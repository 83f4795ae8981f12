"""What layers are built with, and how they take their part of the checkpoint.

A layer declares the checkpoint tensors it wants under their HF names, each with its full shape and a function
that takes this rank's part. ``model/load.py`` streams the tensors through that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.errors import ConfigError
from sgla.quant import GROUP, LEVELS, Kind, Weight, pack

CHUNK = 1 << 22  # values decoded at a time, so that loading needs little memory beyond the final weights


class SourceTensor(Protocol):
    """One tensor of a checkpoint, read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dense(self, rows: range | None = None) -> Tensor:
        """Any floating-point type; ``rows`` of the first dim, or everything."""
        ...

    def weight(self, kind: Kind, rows: range, columns: range | None = None) -> Weight:
        """Rows, or a part of their columns, in the format ``kind``; without a detour over floats where the
        file has that format. Scales are those of whole rows."""
        ...


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

    def weight(self, kind: Kind, rows: range, columns: range | None = None) -> Weight:
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

    def weight(self, kind: Kind, rows: range, columns: range | None = None) -> Weight:
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
    kind: Kind = "f32"
    vocab_kind: Kind = "f32"
    plain: Kind = "f32"
    table: dict[str, Slot] = field(default_factory=dict)
    stacks: dict[str, tuple[tuple[int, ...], list[Part]]] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    def kind_of(self, name: str) -> Kind:
        """The format of the linear layer that has the tensor ``name``."""
        return self.kinds.get(name, self.kind)

    def vocab_kind_of(self, name: str) -> Kind:
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


def empty_weight(n: int, k: int, kind: Kind) -> Weight:
    """An uninitialized Weight ``[n, k]``."""
    model = pack(torch.zeros(1, k), kind)
    parts = (
        None if t is None else t.new_empty(n, *t.shape[1:]) for t in (model.data, model.scale, model.minimum)
    )
    data, scale, minimum = parts
    assert data is not None
    return Weight(kind, n, k, data, scale, minimum)


def columns_of(weight: Weight, columns: range | None) -> Weight:
    """A part of the columns, or all; 8 bits are rounded again where they are cut inside of a group. Raises
    ConfigError if fewer cannot be cut there."""
    if columns is None or len(columns) == weight.k:
        return weight
    whole = columns.start % GROUP == 0 and (columns.stop % GROUP == 0 or columns.stop == weight.k)
    if weight.kind in ("int8", "q8_0") and not whole:
        return pack(weight.dequant()[:, columns.start : columns.stop], weight.kind)
    if weight.kind in LEVELS and not whole:
        raise ConfigError(
            f"{weight.kind} weights split over ranks in groups of {GROUP}; "
            "use another --tp or --quantization int8"
        )
    return weight.columns(columns.start, columns.stop)


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
        part = source.weight(weight.kind, taken, columns)
        place = weight.rows(at + start - rows.start, at + taken.stop - rows.start)
        for name in ("data", "scale", "minimum"):
            if (values := getattr(part, name)) is not None:
                getattr(place, name).copy_(values)

"""What layers are built with, and how they take their part of the checkpoint.

A layer declares the checkpoint tensors it wants under their HF names, each with its full shape and a function
that takes this rank's part. ``loading/load.py`` streams the tensors through that table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.errors import ConfigError
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.lora import Rows, Stack
from sgla.kernels.placement import Placement
from sgla.layers.adapters import AdapterPart, Adapters
from sgla.quant.formats import FORMATS, common
from sgla.quant.groups import GROUP
from sgla.quant.method import PLAIN, Method
from sgla.quant.weight import Make, SourceTensor, Weight, anywhere, storage

CHUNK = 1 << 22  # values decoded at a time, so that loading needs little memory beyond the final weights


@dataclass(frozen=True)
class Share:
    """A SourceTensor of which a place takes every ``count``-th piece from number ``index`` on: a large one is
    taken by several threads."""

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
class RowSlice:
    """``rows`` of a SourceTensor."""

    source: SourceTensor
    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.rows), *self.source.shape[1:]

    def dense(self, rows: range | None = None) -> Tensor:
        return self.source.dense(self._inside(rows))

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return self.source.weight(kind, self._inside(rows), columns)

    def _inside(self, rows: range | None) -> range:
        return self.rows if rows is None else self.rows[rows.start : rows.stop]


@dataclass(frozen=True)
class Crossed:
    """A SourceTensor that is stored as ``[input, output]``."""

    source: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1]

    def dense(self, rows: range | None = None) -> Tensor:
        whole = self.source.dense().t()
        return whole if rows is None else whole[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@dataclass(frozen=True)
class Values:
    """A SourceTensor of what has been read."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def dense(self, rows: range | None = None) -> Tensor:
        return self.tensor if rows is None else self.tensor[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


class Moves(Protocol):
    """A mixture with whole experts, of which some go to other ranks."""

    experts: int

    def move(self, placement: Placement) -> list[str]:
        """Have those that are here then; beginnings of the names of tensors that have to be read again."""


@dataclass(frozen=True)
class Slot:
    """A place for one checkpoint tensor of ``shape``; ``take`` stores this rank's part of it. ``check``
    raises ValueError for values that it cannot have, and stores nothing. ``give``: rows of it out of what is
    stored, float32 on the CPU, with NaN where other ranks have them; None: they cannot be told."""

    shape: tuple[int, ...]
    take: Callable[[Share], None]
    check: Callable[[SourceTensor], None] | None = None
    give: Callable[[range], Tensor] | None = None


class StackPart(NamedTuple):
    """The declared tensor ``name`` inside another one:
    ``stack[expert][rows]``, or ``rows`` of a matrix or vector."""

    name: str
    expert: int | None
    rows: range


@dataclass
class Build:
    """``kind`` is the storage of linear weights, ``vocab_kind`` that of embedding and output layer, ``plain``
    that of weights that are never quantized. ``kinds``: those of matrices that differ, by name.

    ``checkpoint``: the format of the file's linear layers, which are kept so if ``as_stored``. ``floats``:
    layers that it has in floating point, whatever it says; ``modules``: all that it has, if that is known.
    ``stacks`` names tensors that a checkpoint may
    have instead of several declared ones: name -> shape and parts. ``elsewhere``: makes the weights that do
    not lie where the others do, of a module, storage, n and k; ``make``: the tensors of all matrices that do.
    ``joined``: whether rows that several layers
    read are better multiplied by one kernel. ``device``: the kind that computes.
    ``cache_scales``: what the file says of k and v of a layer in 8 bits, by its number and ``k`` or ``v``.
    ``adapters``: where layers make room for adapters; None: nowhere. ``counts``: of mixtures, by name;
    ``mixtures``: those whose experts may go to other ranks, by layer.
    """

    shard: Shard = field(default_factory=Shard)
    kind: str = "f32"
    vocab_kind: str = "f32"
    plain: str = "f32"
    table: dict[str, Slot] = field(default_factory=dict)
    stacks: dict[str, tuple[tuple[int, ...], list[StackPart]]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Method = PLAIN
    as_stored: bool = False
    floats: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    elsewhere: Callable[[str, type[Weight], int, int], Weight | None] = lambda *_: None
    make: Make = anywhere
    joined: bool = False
    device: str = "cpu"
    cache_scales: dict[tuple[int, str], float] = field(default_factory=dict)
    adapters: Adapters | None = None
    counts: dict[str, ExpertCounts] = field(default_factory=dict)
    mixtures: dict[int, Moves] = field(default_factory=dict)

    def joins(self, *modules: str) -> bool:
        """Whether these layers are better one weight, and may be."""
        alike = len({self.method(module) is PLAIN for module in modules}) == 1
        return self.joined and not self.kinds and alike

    def method(self, module: str) -> Method:
        """How the checkpoint holds the linear layer ``module``."""
        quantized = self.checkpoint.covers(module) and module not in self.floats
        return self.checkpoint if quantized else PLAIN

    def empty(self, n: int, k: int, *modules: str, gathers: bool = False) -> Weight:
        """An uninitialized weight ``[n, k]`` for linear layers that are multiplied as one, in a storage that
        has the numbers of all. ``gathers``: see ``kind_of``."""
        kind = self.kind_of(*modules, gathers=gathers)
        made = self.elsewhere(modules[0], storage(kind), n, k)
        return storage(kind).empty(n, k, self.make) if made is None else made

    def empty_part(self, n: int, k: int, columns: range, *modules: str, gathers: bool = False) -> Weight:
        """One for ``columns`` of ``k`` input channels. Raises ConfigError where its storage cannot be cut so,
        before any weights are read."""
        if len(columns) < k:
            storage(self.kind_of(*modules, gathers=gathers)).pack(torch.zeros(1, k)).cut(columns)
        return self.empty(n, len(columns), *modules, gathers=gathers)

    def kind_of(self, *modules: str, gathers: bool = False) -> str:
        """The storage of linear layers that are multiplied as one. ``gathers``: they bring their inputs into
        the order that the file wants, without which it may be that of floating-point numbers."""
        if self.kinds:
            found = {self.kinds[name] for module in modules if (name := f"{module}.weight") in self.kinds}
            return common(found or {self.kind}, self.plain)
        if not self.as_stored:
            return self.kind
        if self.scattered(*modules) and not gathers:
            return self.plain
        stored = [module for module in modules if module in self.modules] or modules
        return common({self._kept(module) for module in stored}, self.plain)

    def inside(self, intermediate: int, *down: str) -> range:
        """This rank's part of what an MLP or the experts of a mixture have inside, without a cut in a group
        of the storage of ``down`` if each rank can have one. Raises ConfigError where it would have none."""
        shard = self.shard.of_others
        if intermediate < shard.size:
            raise ConfigError(
                f"the {intermediate} channels inside of {down[0]} cannot be split over {shard.size} ranks",
                param="tp",
            )
        group = FORMATS[self.kind_of(*down)].group
        enough = intermediate % group == 0 and intermediate >= group * shard.size
        return shard.range(intermediate, group if enough else GROUP)

    def scattered(self, *modules: str) -> bool:
        """Whether the file has any of these layers with channels in another order."""
        return self.as_stored and any(self.method(module).scattered(module) for module in modules)

    def _kept(self, module: str) -> str:
        """The storage of a layer by itself. A device that keeps some of a file's storages makes floats of the
        others."""
        kind = self.method(module).kept(module, self.device)
        choice = kind and self.device in self.checkpoint.devices
        return kind if kind and not (choice and self.device not in FORMATS[kind].devices) else self.plain

    def empty_vocab(self, n: int, k: int, module: str) -> Weight:
        """The same for embedding and output layer, which only CPUs keep as a file has them."""
        kind = self.kinds.get(f"{module}.weight") if self.device == "cpu" else None
        return storage(kind or self.vocab_kind).empty(n, k, self.make)

    def empty_plain(self, n: int, k: int) -> Weight:
        """One that is never quantized."""
        return storage(self.plain).empty(n, k, self.make)

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        take: Callable[[Share], None],
        check: Callable[[SourceTensor], None] | None = None,
        give: Callable[[range], Tensor] | None = None,
    ) -> None:
        assert name not in self.table, name
        self.table[name] = Slot(shape, take, check, give)

    def stack(
        self,
        k: int,
        parts: Sequence[AdapterPart],
        columns: range | None = None,
        embedding: bool = False,
    ) -> tuple[Stack | None, Rows | None]:
        """What adapters add to a linear layer, and the rows of a step; see ``Adapters.stack``."""
        if self.adapters is None:
            return None, None
        return self.adapters.stack(k, parts, columns, embedding), self.adapters.rows

    def stack_of(self, k: int, layers: Sequence[Gathered]) -> tuple[Stack | None, Rows | None]:
        """The same of a matrix whose rows were gathered from these layers."""
        pieces = [(at, rows, layer.name, layer.n) for layer in layers for rows, at in layer.pieces]
        parts: list[AdapterPart] = []
        for (name, n), behind in groupby(sorted(pieces, key=itemgetter(0)), itemgetter(2, 3)):
            own = [torch.arange(rows.start, rows.stop, device="cpu") for _, rows, *_ in behind]
            parts.append((name, n, torch.cat(own), None))
        return self.stack(k, parts)

    def table_stack(
        self, name: str, weight: Weight, vocab: int, own: range, embedding: bool
    ) -> tuple[Stack | None, Rows | None]:
        """The same for the embedding or the output layer, of whose ``weight`` this rank has the rows
        ``own``."""
        n, k = (weight.k, vocab) if embedding else (vocab, weight.k)
        made = self.stack(k, [(name, n, range(n) if embedding else own, None)], embedding=embedding)
        if made[0] is not None and self.adapters is not None:
            self.adapters.tables[name] = weight, own
        return made

    def vector(
        self, name: str, size: int, part: range | None = None, offset: float = 0.0, scale: float = 1.0
    ) -> Tensor:
        """A float32 vector holding ``part`` (default: all) of the checkpoint's ``name``, plus ``offset``,
        times ``scale``."""
        vector = torch.zeros(size if part is None else len(part))

        def take(source: SourceTensor) -> None:
            vector.copy_(source.dense(part)).add_(offset).mul_(scale)

        def give(rows: range) -> Tensor:
            return given(vector.div(scale).sub(offset), rows, part)

        self.declare(name, (size,), take, give=give)
        return vector


def fill(
    weight: Weight,
    at: int,
    source: Share,
    rows: range,
    columns: range | None = None,
    order: Tensor | None = None,
) -> None:
    """Put ``source[rows, columns]`` into the rows of ``weight`` from ``at`` on,
    those of each head in another ``order``."""
    step = max(1, CHUNK // source.shape[1] // 128) * 128  # rows that share scales come together
    tensor = source if order is None else Reordered(source, order)
    for start in range(rows.start, rows.stop, step)[source.index :: source.count]:
        taken = range(start, min(start + step, rows.stop))
        weight.put(taken, columns, tensor, at + start - rows.start)


def drawn(
    weight: Weight,
    at: int,
    wanted: range,
    shape: tuple[int, ...],
    rows: range,
    columns: range | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """What ``fill`` has put there, as ``Slot.give``: rows ``wanted`` of a matrix of ``shape``."""
    found = torch.full((len(wanted), shape[1]), torch.nan, device="cpu")
    there = range(max(wanted.start, rows.start), min(wanted.stop, rows.stop))
    if not there:
        return found
    own = torch.tensor(there, device="cpu")
    places = own - rows.start + at
    if order is not None:
        size, heads = len(order), own // len(order) * len(order)
        places = heads + order.cpu().argsort()[own % size] - rows.start + at
    columns = columns or range(shape[1])
    found[own - wanted.start, columns.start : columns.stop] = weight.told(places)
    return found


def given(stored: Tensor, wanted: range, rows: range | None = None) -> Tensor:
    """The same of any tensor, of which ``rows`` (None: all) are ``stored``."""
    rows = rows or range(len(stored))
    found = torch.full((len(wanted), *stored.shape[1:]), torch.nan, device="cpu")
    first, last = max(wanted.start, rows.start), min(wanted.stop, rows.stop)
    if first < last:
        values = stored[first - rows.start : last - rows.start]
        found[first - wanted.start : last - wanted.start] = values.float().cpu()
    return found


def together(parts: Iterable[Tensor]) -> Tensor:
    """Of parts that are NaN where they have nothing."""
    return reduce(lambda one, other: other.where(one.isnan(), one), parts)


Piece = tuple[range, int]  # rows of a stored matrix, and the row of ours where they begin


class Gathered(NamedTuple):
    """A layer of so many outputs, and where which of its rows are here."""

    name: str
    n: int
    pieces: Sequence[Piece]


def gather(
    build: Build, weight: Weight, name: str, shape: tuple[int, int], pieces: Sequence[Piece]
) -> Gathered:
    """Take rows of the checkpoint's matrix ``name``, which stand apart there or here."""

    def take(source: Share) -> None:
        for rows, at in pieces:
            fill(weight, at, source, rows)

    def give(wanted: range) -> Tensor:
        return together(drawn(weight, at, wanted, shape, rows) for rows, at in pieces)

    build.declare(f"{name}.weight", shape, take, give=give)
    return Gathered(name, shape[0], pieces)


def blocks(own: range, width: int, block: int, first: int, at: int) -> list[Piece]:
    """Of each head in ``own``, whose rows in the checkpoint are ``block`` in number, the ``width`` from
    ``first`` on: one below the other from ``at`` on."""
    starts = (head * block + first for head in own)
    return [(range(start, start + width), at + i * width) for i, start in enumerate(starts)]


def run(own: range, width: int, first: int, at: int) -> Piece:
    """The same of heads that are stored one below the other, each ``width`` rows, from ``first`` on."""
    return range(first + own.start * width, first + own.stop * width), at

"""Weights of linear layers: what every storage has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

from sgla.kernels.cpu.panels import Kind, Panels
from sgla.quant.formats import FORMATS

TOGETHER = 1 << 22  # values that are brought into another storage at a time
OF_PANELS = {"fixed": "bf16", "e4m3": "fp8g128"}  # storages of formats of panels with other names
# (shape, type) -> an uninitialized tensor
Make = Callable[[Sequence[int], torch.dtype], Tensor]


def anywhere(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Where torch makes tensors."""
    return torch.empty(*shape, dtype=dtype)


class SourceTensor(Protocol):
    """One matrix or vector of a checkpoint, read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dense(self, rows: range | None = None) -> Tensor:
        """Any floating-point type; ``rows`` of the first dim, or everything."""
        ...

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """Rows, or a part of their columns, in the storage ``kind``; without a detour over floats where the
        file has that format. Scales are those of whole rows."""
        ...


class StoredTensor(SourceTensor, Protocol):
    """A tensor as a checkpoint has it. ``type``: as safetensors calls it."""

    @property
    def type(self) -> str: ...

    def values(self, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Of any type; a part of the first dim or two, or everything."""
        ...


class Weight(ABC):
    """One linear's weight ``[n, k]``. A subclass is a storage: it says in which ``tensors`` it keeps the
    matrix, each with a row for every output channel, and how these become numbers again.

    On a CPU a weight whose storage is ``native`` moves to ``panels``, in the order of the kernels, and the
    tensors become empty. Other storages are read by ``dequant`` in every step. A weight with a ``home`` lies
    there, and is copied to its tensors before it is used (``loading/offload.py``).
    """

    kind: ClassVar[str]
    native: ClassVar[bool] = False  # whether the CPU kernels know it

    def __init__(self, n: int, k: int, *tensors: Tensor) -> None:
        self.n, self.k, self.tensors = n, k, tensors
        self.panels: Panels | None = None
        self.home: tuple[Tensor, ...] | None = None
        self.parts: list[Self] | None = None  # set by ``split``, which empties the tensors, too
        self._views: list[tuple[int, Self]] = []  # first row, and what shared its memory with these

    @classmethod
    @abstractmethod
    def pack(cls, dense: Tensor) -> Self:
        """Of a matrix ``[n, k]`` of any floating-point type; no copy if it is stored that way already."""

    @classmethod
    @abstractmethod
    def decode(cls, k: int, *tensors: Tensor) -> Tensor:
        """The numbers ``[rows, k]`` of some rows of the tensors."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Self:
        """Input channels ``start:stop``. Raises ConfigError if it cannot be cut there."""

    @classmethod
    def read(cls, source: SourceTensor, rows: range, columns: range | None) -> Self:
        """A part of a matrix of floats. Scales are those of whole rows."""
        return cls.pack(source.dense(rows)).cut(columns)

    @classmethod
    def empty(cls, n: int, k: int, make: Make = anywhere) -> Self:
        """Uninitialized."""
        return cls(n, k, *(make((n, *t.shape[1:]), t.dtype) for t in cls.pack(torch.zeros(1, k)).tensors))

    @property
    def data(self) -> Tensor:
        """The first tensor: the numbers, without constants."""
        return self.tensors[0]

    @property
    def scale(self) -> Tensor | None:
        return self.tensors[1] if len(self.tensors) > 1 else None

    def scales(self) -> Tensor | None:
        """What kernels of a GPU read: a row for each output channel, or for as many as share theirs."""
        return self.scale

    @property
    def nbytes(self) -> int:
        if self.parts is not None:
            return sum(part.nbytes for part in self.parts)
        return sum(t.nbytes for t in ((self.panels.data,) if self.panels is not None else self.tensors))

    def dequant(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense ``[n, k]``; no copy if it has this dtype already."""
        if self.parts is not None:
            return torch.cat([part.dequant(dtype) for part in self.parts])
        held = self._plain()
        return held.decode(self.k, *held.tensors).to(dtype)

    def take(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 ``[len(ids), k]``."""
        held, rows = self._rows_of(ids.long())
        return held.decode(self.k, *(t[rows] for t in held.tensors)).float()

    def told(self, ids: Tensor) -> Tensor:
        """Rows ``ids``, int64 on the CPU, as float32 there, wherever the weight has moved to."""
        if self.parts is None:
            held, rows = self._rows_of(ids)
            given = (held.home or held.tensors) if held is self else held.tensors
            return held.decode(self.k, *(t[rows.to(t.device)] for t in given)).float().cpu()
        size = self.n // len(self.parts)
        found = torch.empty(len(ids), self.k, device="cpu")
        for index in ids.div(size, rounding_mode="floor").unique().tolist():
            there = ids // size == index
            found[there] = self.parts[index].told(ids[there] - index * size)
        return found

    def pick(self, rows: Tensor) -> Weight:
        """A new weight of these output channels, int64 on the CPU."""
        held = self._plain()
        return type(held)(len(rows), self.k, *(t[rows.to(t.device)] for t in held.tensors))

    def stored_as(self, kind: str) -> Weight:
        """A new weight of the same numbers, rounded to another storage."""
        if kind == self.kind:
            return self
        with torch.device(self.data.device):
            made = storage(kind).empty(self.n, self.k)
        step = max(1, TOGETHER // self.k // 128) * 128  # rows that share scales come together
        for start in range(0, self.n, step):
            some = self._slice(start, min(start + step, self.n))
            made._write(start, made.pack(some.dequant()))
        return made

    def cut(self, columns: range | None) -> Self:
        """``columns``, or the whole weight. Raises ConfigError if it cannot be cut there."""
        if columns is None or len(columns) == self.k:
            return self
        return self.columns(columns.start, columns.stop)

    def rows(self, start: int, stop: int) -> Self:
        """Output channels ``start:stop``, which share this weight's memory until one of them moves, and
        follow what is put into it then, too. The whole weight is itself, so that tied layers share their
        panels."""
        if (start, stop) == (0, self.n):
            return self
        view = self._slice(start, stop)
        self._views.append((start, view))
        return view

    def split(self, count: int) -> list[Self]:
        """Equal parts by rows, the same ones every time, for good: each may move to panels of its own."""
        if self.parts is None:
            self.parts = [self.part(i, count) for i in range(count)]
            self._give_up()
        return self.parts

    def part(self, index: int, count: int) -> Self:
        """One of ``count`` equal parts by rows."""
        if self.parts is not None:
            return self.parts[index]
        size = self.n // count
        return self._slice(index * size, (index + 1) * size)

    def to_panels(self, isa: str = "") -> Panels | None:
        """Move to the order of the native CPU kernels, once; the tensors are given up. None: they do not
        know this storage. Raises BuildError.

        ``isa``: the level of the kernels, the best one if empty.
        """
        if self.panels is None and self.native:
            kind, tensors = self.to_native()
            self.panels = Panels.of(kind, self.k, *tensors, isa=isa)
            self._give_up()
        return self.panels

    def to_native(self) -> tuple[Kind, tuple[Tensor, ...]]:
        """What CPU kernels are given: a format of panels, and tensors with a row for each output channel."""
        return cast(Kind, self.kind), self.tensors

    @classmethod
    def of_native(cls, n: int, k: int, *tensors: Tensor) -> Weight:
        """The inverse."""
        return cls(n, k, *tensors)

    def put(self, rows: range, columns: range | None, source: SourceTensor, at: int = 0) -> None:
        """Store ``source[rows, columns]`` (None: all columns) in the rows from ``at`` on, in place, wherever
        the weight has moved to; not while a step reads it. Raises ConfigError if columns cannot be cut
        there."""
        self._write(at, source.weight(self.kind, rows, columns))

    def _write(self, at: int, part: Weight) -> None:
        if self.parts is not None:
            size = self.n // len(self.parts)
            for index, own in enumerate(self.parts):
                own._write_shared(at - index * size, part)
        elif self.panels is not None:
            kind, tensors = part.to_native()
            self.panels.put(at, kind, *tensors)
        else:
            for own_rows, new in zip(self.home or self.tensors, part.tensors, strict=True):
                own_rows[at : at + part.n].copy_(new)
        for start, view in self._views:
            if self._moved or view._moved:
                view._write_shared(at - start, part)

    def _write_shared(self, at: int, part: Weight) -> None:
        """Those rows of ``part`` that are this weight's; ``at`` may be negative."""
        first, last = max(at, 0), min(at + part.n, self.n)
        if first < last:
            self._write(first, part._slice(first - at, last - at))

    def _slice(self, start: int, stop: int) -> Self:
        if (held := self._plain()) is not self:
            return cast(Self, held._slice(start, stop))
        return type(self)(stop - start, self.k, *(t[start:stop] for t in self.tensors))

    @property
    def _moved(self) -> bool:
        return self.panels is not None or self.parts is not None

    def _give_up(self) -> None:
        self.tensors = tuple(t.new_empty(0) for t in self.tensors)

    def _plain(self) -> Weight:
        """Itself, or out of the panels; kernels of some levels have other formats than they were given."""
        return self if self.panels is None else _of_panels(self.panels)

    def _rows_of(self, ids: Tensor) -> tuple[Weight, Tensor]:
        """What has the rows ``ids``, and where in it they are."""
        if self.panels is None:
            return self, ids
        panels, rows = self.panels.some(ids)
        return _of_panels(panels), rows


def _of_panels(panels: Panels) -> Weight:
    kind = OF_PANELS.get(panels.kind, panels.kind)
    return storage(kind).of_native(panels.n, panels.k, *(t for t in panels.plain() if t is not None))


def storage(kind: str) -> type[Weight]:
    """The class of a registered format."""
    found: type[Weight] = resolve_name(FORMATS[kind].storage)
    return found


def pack(dense: Tensor, kind: str) -> Weight:
    """Bring a dense ``[n, k]`` into the storage ``kind``; no copy if it is stored that way already."""
    return storage(kind).pack(dense)

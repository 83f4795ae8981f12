"""What adapters add to linear layers (LoRA, arXiv 2106.09685): each row of a step has its own, or none.

The weights of the adapters at hand lie in *places*, numbered from 1; 0 stands for no adapter. A layer has one
``Stack`` with all places, and all layers share the ``Rows`` of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.dispatch import op
from sgla.kernels.trace import STAND_INS

Int32s = NDArray[np.int32]
Groups = list[tuple[int, Tensor | None]]  # a place, and the rows that have it; None: all


class Tiles(NamedTuple):
    """Rows that a GPU computes together. ``order`` int32[T]: rows, those of one adapter behind one another;
    ``runs`` int32[*, 3]: parts of it with one adapter, each where it begins, how many rows it has, at most
    ``size`` (0: there is nothing to do), and their place. ``experts`` int32[T]: whose part of the adapter
    each row of ``order`` has, if the rows are pairs of a token and an expert; that of a run is one."""

    order: Tensor
    runs: Tensor
    size: int
    experts: Tensor | None = None


class Placed(NamedTuple):
    """What kernels of a GPU read of ``Rows``."""

    places: tuple[Tensor, Tensor]
    tiles: tuple[Tiles, Tiles]


class Rows:
    """The place of each row of a step: of its T tokens, and of the S whose successors are sampled, the only
    rows that the last layer goes on with. ``active``: some row has an adapter. What is recorded while it is
    False knows of no adapters.

    Kernels of a GPU read ``places`` int32[T] and int32[S], and the ``tiles`` of tokens and of sampled rows.
    ``apart``: they have so many adapters that kernels had better take them one by one.
    """

    places: tuple[Tensor, Tensor]
    tiles: tuple[Tiles, Tiles]

    def __init__(self) -> None:
        self.active = self.apart = False
        self._count = 0
        self._groups: tuple[Groups, Groups] = ([], [])
        self._places: tuple[Int32s, Int32s] = (np.zeros(0, np.int32),) * 2

    def set(self, tokens: Int32s, sampled: Int32s) -> None:
        """Those of the step that torch's body computes next: int32[T] and int32[S]."""
        self._count = len(tokens)
        self._groups = groups_of(tokens), groups_of(sampled)
        self._places = tokens, sampled
        self.active = bool(self._groups[0])

    @property
    def placed(self) -> Placed:
        return Placed(self.places, self.tiles)

    def place(self, placed: Placed) -> None:
        self.places, self.tiles = placed

    def are_sampled(self, x: Tensor) -> bool:
        """Whether the rows of x are the sampled ones, not all tokens."""
        count = x.shape[0]
        return count == STAND_INS["sampled"] or count not in (STAND_INS["tokens"], self._count)

    def places_of(self, sampled: bool) -> Tensor:
        """int32[T or S], for torch's bodies."""
        return torch.from_numpy(self._places[sampled])

    def groups(self, sampled: bool) -> Groups:
        return self._groups[sampled]


def groups_of(places: Int32s) -> Groups:
    """The rows of each place but 0."""
    found = np.unique(places)
    if len(found) == 1:
        return [(int(found[0]), None)] if found[0] else []
    return [(place, torch.from_numpy(np.flatnonzero(places == place))) for place in found.tolist() if place]


class Stack:
    """What the adapters at all places add to one linear layer, whose ``parts`` (q, k and v) lie side by side:
    ``x @ a.T @ b.T`` for each of them.

    ``a`` [places, parts, rank, k] and ``b`` [places, n, rank], which has the adapter's scale in it; ``sizes``
    of the parts, ``ends`` and, on the device, ``bounds``: where the rows of each end. ``ranks``: of the
    adapter at each place; 0: it leaves the layer as it is. They are views of memory [places, rank, *], from
    ``first`` to ``last`` of the last dimension: one row of ``a``, and one column of ``b``, for each rank.
    """

    a: Tensor
    b: Tensor
    ends: list[int]

    def __init__(self, places: int, k: int, sizes: list[int], first: int = 0) -> None:
        self.k, self.sizes, self.ends = k, sizes, np.cumsum(sizes).tolist()
        self.bounds = torch.tensor(self.ends, dtype=torch.int32)
        self.first, self._middle = first, _aligned(first + len(sizes) * k)
        self.last = _aligned(self._middle + self.n)
        self.ranks = [0] * places

    @property
    def n(self) -> int:
        return self.ends[-1]

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """a and b in memory [places, rank, *]."""
        parts = len(self.sizes)
        a = memory[..., self.first : self.first + parts * self.k].unflatten(-1, (parts, self.k))
        return a.transpose(1, 2), memory[..., self._middle : self._middle + self.n].transpose(1, 2)

    def lie(self, memory: Tensor) -> None:
        """In this memory."""
        self.a, self.b = self.views(memory)

    def put(self, memory: Tensor, part: int, a: Tensor, b: Tensor) -> None:
        """An adapter's a [r, k] and b [n of the part, r] into the memory [rank, *] of a place."""
        to_a, to_b = self.views(memory[None])
        rows = slice(self.ends[part - 1] if part else 0, self.ends[part])
        to_a[0, part, : len(a)], to_b[0, rows, : len(a)] = a, b


def _aligned(elements: int) -> int:
    """Where kernels may read 16 bytes at a time."""
    return -(-elements // 16) * 16


def _added(x: Tensor, stack: Stack, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], stack.n)


@op(like=_added)
def lora(x: Tensor, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """What the adapters of the rows add to a linear layer of x: [T, k] -> [T, n]. ``sampled``: the rows are
    the sampled ones. The body computes the rows of each adapter together."""
    y = x.new_zeros(x.shape[0], stack.n)
    for place, index in rows.groups(sampled):
        rank = stack.ranks[place - 1]
        if not rank:
            continue
        inner = F.linear(x if index is None else x[index], stack.a[place - 1, :, :rank].flatten(0, 1).to(x))
        b, start, made = stack.b[place - 1, :, :rank].to(x), 0, []
        for part, end in zip(inner.split(rank, dim=1), stack.ends):
            made.append(F.linear(part, b[start:end]))
            start = end
        y[slice(None) if index is None else index] = torch.cat(made, 1) if len(made) > 1 else made[0]
    return y


def _looked_up(ids: Tensor, stack: Stack, *_: object) -> Tensor:
    return torch.empty(ids.shape[0], stack.n, device=ids.device)


@op(like=_looked_up)
def lora_embedding(ids: Tensor, stack: Stack, rows: Rows) -> Tensor:
    """What the adapters of the rows add to the embeddings of ids int32[T]: float32 [T, n]. Of ``stack`` each
    id has a column of ``a``."""
    y = torch.zeros(ids.shape[0], stack.n)
    for place, index in rows.groups(False):
        rank, own = stack.ranks[place - 1], ids if index is None else ids[index]
        if rank:
            inner = stack.a[place - 1, 0, :rank][:, own.long()].t().float()
            y[slice(None) if index is None else index] = F.linear(inner, stack.b[place - 1, :, :rank].float())
    return y


def tiles_of(places: Int32s, size: int) -> tuple[Int32s, Int32s]:
    """``order`` and ``runs`` of ``Tiles`` of rows with these places; one run of no row if none has an
    adapter."""
    order = np.argsort(places, kind="stable").astype(np.int32)
    found, firsts, counts = np.unique(places[order], return_index=True, return_counts=True)
    runs = [
        (first + at, min(size, count - at), place)
        for place, first, count in zip(found.tolist(), firsts.tolist(), counts.tolist())
        if place
        for at in range(0, count, size)
    ]
    return order, np.array(runs or [(0, 0, 0)], np.int32)


def added(x: Tensor, stack: Stack | None, rows: Rows | None) -> Tensor | None:
    """The ``addend`` of a linear layer of x; None: nothing is added."""
    if stack is None or rows is None or not rows.active:
        return None
    return lora(x, stack, rows, rows.are_sampled(x))

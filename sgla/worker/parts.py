"""How a unit lies in the memory of each of several ranks, so that a server can read those of another one that
has more ranks, or fewer. Ranks split heads of keys and values, as ``model.state.own_heads`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sgla.kernels.ops import Layer
from sgla.layers.spec import StateTensor
from sgla.model.spec import ModelSpec
from sgla.model.state import own_heads
from sgla.worker.kv import state_of_layer, tokens_of

Content = bytes | memoryview


class Part(NamedTuple):
    """A tensor of a unit: bytes[outer, heads of a rank, inner]. ``heads``: of all ranks."""

    heads: int
    outer: int
    inner: int


def parts_of_units(kv: Sequence[Layer], spec: ModelSpec, groups: int) -> list[list[Part]]:
    """Of each cache group, in the order of ``kv.memory_of``; of states none, if a layer does not tell which
    heads theirs are of (``StateTensor.runs``)."""
    found: list[dict[int, list[Part]]] = [{} for _ in range(groups)]
    for layer, attention in zip(kv, spec.keepers):
        if (kept := tokens_of(layer)) is not None:
            for x in (x for x in kept.tensors if x.numel()):
                found[kept.group].setdefault(x.data_ptr(), [_part(x, attention.kv_heads)])
        if (state := state_of_layer(layer)) is not None:
            for tensor in attention.unit(int):
                x = getattr(state, tensor.name)
                found[-1][x.data_ptr()] = _runs(x, tensor)
    told = [parts if all(parts.values()) else {} for parts in found]
    return [[part for each in parts.values() for part in each] for parts in told]


def _runs(x: Tensor, tensor: StateTensor) -> list[Part]:
    """Of a state ``[units, rows, ...]``."""
    row = x[0, 0].numel() * x.itemsize
    return [Part(heads, 1, rows * row) for heads, rows in tensor.runs]


def _part(x: Tensor, heads: int) -> Part:
    """Of keys or values ``[pages, tokens, heads, width]``, or of scales ``[pages, heads, tokens]``."""
    if x.dim() == 3:
        return Part(heads, 1, x.shape[2] * x.itemsize)
    tokens, width = x.shape[1], x.shape[3] * x.itemsize
    return Part(heads, tokens, width) if x.stride(1) >= x.stride(2) else Part(heads, 1, tokens * width)


class Piece(NamedTuple):
    """Where heads of a tensor come from: ``source`` and ``theirs``, numbers in its own tensor."""

    part: int
    mine: list[int]
    source: int
    theirs: list[int]


class Fit:
    """What a rank, one of ``size``, reads of another server's units, which has ``others`` ranks. ``sources``:
    these of them; ``nbytes``: of a unit of each source and cache group; ``whole``: units are alike."""

    def __init__(
        self, parts: Sequence[Sequence[Part]], own: Sequence[int], rank: int, size: int, others: int
    ) -> None:
        """``own``: bytes of a unit of each cache group here."""
        self.whole = size == others
        self._parts, self._rank, self._size, self._others = parts, rank, size, others
        self._own = own
        pieces = [self._pieces(group) for group in parts]
        needed = {piece.source for group in pieces for piece in group}
        self.sources = sorted({rank} if self.whole else needed or {self._home})
        at = {source: i for i, source in enumerate(self.sources)}
        self._made = [[p._replace(source=at.get(p.source, 0)) for p in group] for group in pieces]
        if self.whole:
            self.nbytes = [list(own)]
        else:
            self.nbytes = [
                [sum(_bytes(part, source, others) for part in group) for group in parts]
                for source in self.sources
            ]

    @property
    def _home(self) -> int:
        return self._rank * self._others // self._size

    def _pieces(self, group: Sequence[Part]) -> list[Piece]:
        """Of heads that several ranks have, those of the one next to ours in the order of all."""
        made: dict[tuple[int, int], Piece] = {}
        for p, part in enumerate(group):
            holders = [own_heads(part.heads, source, self._others) for source in range(self._others)]
            for mine, head in enumerate(own_heads(part.heads, self._rank, self._size)):
                having = [source for source, heads in enumerate(holders) if head in heads]
                source = min(having, key=lambda source: abs(source - self._home))
                piece = made.setdefault((p, source), Piece(p, [], source, []))
                piece.mine.append(mine)
                piece.theirs.append(holders[source].index(head))
        return list(made.values())

    def join(self, group: int, units: Sequence[Content]) -> Content:
        """A unit of this rank out of those of the sources."""
        if self.whole:
            return units[0]
        made = np.empty(self._own[group], np.uint8)
        mine = _split(self._parts[group], made, self._rank, self._size)
        theirs = [
            _split(self._parts[group], np.frombuffer(unit, np.uint8), source, self._others)
            for source, unit in zip(self.sources, units, strict=True)
        ]
        for piece in self._made[group]:
            mine[piece.part][:, piece.mine] = theirs[piece.source][piece.part][:, piece.theirs]
        return made.data


def _bytes(part: Part, rank: int, size: int) -> int:
    return part.outer * len(own_heads(part.heads, rank, size)) * part.inner


def _split(
    parts: Sequence[Part], unit: np.ndarray[tuple[int], np.dtype[np.uint8]], rank: int, size: int
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """Views ``[outer, heads, inner]`` of a unit of that rank."""
    views, at = list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]](), 0
    for part in parts:
        count = _bytes(part, rank, size)
        views.append(unit[at : at + count].reshape(part.outer, -1, part.inner))
        at += count
    return views

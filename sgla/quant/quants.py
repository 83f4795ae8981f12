"""Matrices of few bits in groups along k, as GPTQ, AWQ and compressed-tensors store them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import WeightError
from sgla.quant.groups import GROUP, Groups
from sgla.quant.integers import Integers
from sgla.quant.weight import StoredTensor, Weight, storage

WHOLE = 0.02  # how far zeros, made of constants in float16, may be from whole numbers


class Quants(NamedTuple):
    """``w = (q - zero) * scale``: q uint8 ``[n, k]``; zero, whole numbers but in AWQ's format for vectors,
    and scale ``[n, groups]``."""

    q: Tensor
    zero: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Grouped(ABC):
    """A SourceTensor of three, of which the first two have several neighbours in each int32, one behind the
    other.

    ``group``: channels of k with one zero and one scale. ``order``: the group of each channel, int64 ``[k]``,
    where these do not lie together (GPTQ's act-order)."""

    packed: StoredTensor
    zeros: StoredTensor | None  # None: half of the range
    scales: StoredTensor
    shape: tuple[int, ...]
    bits: int
    group: int
    order: Tensor | None = None

    @abstractmethod
    def quants(self, rows: range) -> Quants:
        """Of some output channels."""

    def dense(self, rows: range | None = None) -> Tensor:
        q, zero, scale = self.quants(rows or range(self.shape[0]))
        if self.order is not None:
            order = self.order.to(q.device)
            return (q - zero[:, order]) * scale.float()[:, order]
        zero, scale = (t.repeat_interleave(self.group, 1)[:, : self.shape[1]] for t in (zero, scale.float()))
        return (q - zero) * scale

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """As it is, where ``kind`` has constants for groups of 32: their minimum, ``-zero * scale``, is then
        rounded to float16."""
        made = storage(kind)
        if issubclass(made, Integers):
            return self._integers(made, rows).cut(columns)
        if not issubclass(made, Groups) or self.order is not None or self._cut(GROUP):
            return made.read(self, rows, columns)
        q, zero, scale = self.quants(rows)
        if not made.holds(self.bits, bool((zero == 1 << self.bits - 1).all())):
            return made.read(self, rows, columns)
        constants = (scale.float(), -zero * scale.float())
        groups = -(-self.shape[1] // GROUP)
        scale, minimum = (t.repeat_interleave(-(-self.group // GROUP), 1)[:, :groups] for t in constants)
        return made.of(self.bits, q, scale, minimum).cut(columns)

    def sorted(self) -> tuple[Tensor, Grouped]:
        """The same with channels of a group together, and which channel each is, int64 ``[k]``. Raises
        WeightError where groups are not alike."""
        assert self.order is not None
        channels = torch.argsort(self.order, stable=True)
        if not torch.equal(self.order[channels], torch.arange(len(channels), device="cpu") // self.group):
            raise WeightError(
                f"g_idx has groups that are not of {self.group} channels; --quantization none computes such "
                "weights in --dtype"
            )
        parts = self.packed, self.zeros, self.scales, self.shape, self.bits, self.group
        return channels, Sorted(*parts, scattered=self, channels=channels)

    def _integers(self, made: type[Integers], rows: range) -> Weight:
        """As it is, if zeros are numbers that ``made`` has and the groups as many of its own."""
        if self.order is not None or self.bits > made.bits or self._cut(made.group):
            return made.read(self, rows, None)
        q, zero, scale = self.quants(rows)
        kept = zero.round() if made.whole and zero.is_floating_point() else zero
        if bool(((kept - zero).abs() > WHOLE).any() | ~(scale.half() + kept.half()).isfinite().all()):
            return made.read(self, rows, None)
        groups, each = -(-self.shape[1] // made.group), -(-self.group // made.group)
        kept, scale = (t.repeat_interleave(each, 1)[:, :groups] for t in (kept, scale))
        return made.of(q, kept, scale)

    def _cut(self, group: int) -> bool:
        """Whether groups of another size, ``group``, would lie in two of its own."""
        return bool(self.group % group) and self.group < self.shape[1]

    def of_channels(
        self, packed: StoredTensor, rows: range, dim: int, order: tuple[int, ...] | None = None
    ) -> Tensor:
        """The numbers of output channels ``rows``, which are neighbours along ``dim``."""
        each, width = _unit(self.bits)
        first, last = rows.start // each, -(-rows.stop // each)
        words = range(first * width, last * width)
        found = packed.values(words) if dim == 0 else packed.values(columns=words)
        return numbers(found, self.bits, dim, order).narrow(dim, rows.start - first * each, len(rows))


@dataclass(frozen=True)
class Sorted(Grouped):
    """``scattered`` with its ``channels`` in another order, int64 ``[k]``."""

    scattered: Grouped | None = None
    channels: Tensor | None = None

    def quants(self, rows: range) -> Quants:
        assert self.scattered is not None
        assert self.channels is not None
        q, zero, scale = self.scattered.quants(rows)
        return Quants(q[:, self.channels.to(q.device)], zero, scale)


class Gptq(Grouped):
    """packed ``[k / per int32, n]``, zeros ``[groups, n / per int32]``, scales ``[groups, n]``. Zeros are one
    less than they mean (``plus`` 1) but in version 2."""

    plus = 1

    def quants(self, rows: range) -> Quants:
        assert self.zeros is not None
        q = numbers(self.packed.values(columns=rows), self.bits, 0)
        zero = self.of_channels(self.zeros, rows, 1).int() + self.plus
        return Quants(q.T.contiguous(), zero.T, self.scales.values(columns=rows).T)


class Gptq2(Gptq):
    plus = 0


class Awq(Grouped):
    """packed ``[k, n / 8]``, zeros ``[groups, n / 8]``, scales ``[groups, n]``. Eight neighbours lie in an
    order that suits AWQ's kernels."""

    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    def quants(self, rows: range) -> Quants:
        assert self.zeros is not None
        q, zero = (self.of_channels(t, rows, 1, self.ORDER).T for t in (self.packed, self.zeros))
        return Quants(q.contiguous(), zero.int(), self.scales.values(columns=rows).T)


class AwqRows(Grouped):
    """``gemv``: packed ``[n, k / 8]``, zeros ``[n, groups / 8]``, scales ``[n, groups]``, both padded."""

    def quants(self, rows: range) -> Quants:
        assert self.zeros is not None
        q = numbers(self.packed.values(rows), self.bits, 1)
        zero, scale = numbers(self.zeros.values(rows), self.bits, 1), self.scales.values(rows)
        groups = -(-self.shape[1] // self.group)
        return Quants(q, zero[:, :groups].int(), scale[:, :groups])


class AwqFast(Grouped):
    """``gemv_fast`` and llm-awq: packed int16 ``[n / 4, k]``, scales and minima ``[groups, n]``, padded. 64
    channels of four rows lie behind each other, and every 32 of them in an order of their own."""

    def quants(self, rows: range) -> Quants:
        assert self.zeros is not None
        k, first, groups = self.shape[1], rows.start // 4, -(-self.shape[1] // self.group)
        words = self.packed.values(range(first, -(-rows.stop // 4))).int()
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
        blocks = (words[..., None] >> shifts & 15).to(torch.uint8).view(len(words), k // 64, 4, 64)
        q = blocks.transpose(1, 2).reshape(len(words) * 4, k // 32, 4, 2, 4).transpose(3, 4)
        q = q.reshape(len(words) * 4, k // 32, 4, 4, 2).transpose(2, 3).reshape(-1, k)
        scale, minimum = (t.values(range(groups), rows).float().T for t in (self.scales, self.zeros))
        zero = -minimum / scale.masked_fill(scale == 0, 1.0)
        return Quants(q[rows.start - 4 * first :][: len(rows)].contiguous(), zero, scale)


class Marlin(Grouped):
    """packed ``[k / 16, 2 n]`` in tiles of 16 channels and 64 rows, scales ``[groups, n]``."""

    def quants(self, rows: range) -> Quants:
        k = self.shape[1]
        first, last = rows.start // 64 * 64, -(-rows.stop // 64) * 64
        words = self.packed.values(columns=range(first * 2, last * 2))
        tiles = torch.empty(len(words) * (last - first) // 64, 1024, dtype=torch.uint8, device=words.device)
        tiles[:, _marlin_order().to(words.device)] = numbers(words, 4, 1).view(-1, 1024)
        q = tiles.view(k // 16, -1, 16, 16).transpose(1, 2).reshape(k, -1)
        stored = self.scales.values(columns=range(first, last))
        order = [i + 8 * j for i in range(8) for j in range(8)]
        if self.group == k:
            order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        scale = torch.empty_like(stored).view(-1, len(order))
        scale[:, order] = stored.reshape(-1, len(order))
        inside = slice(rows.start - first, rows.stop - first)
        scale = scale.view(stored.shape)[:, inside].T
        return Quants(q[:, inside].T.contiguous(), torch.full_like(scale, 8, dtype=torch.int32), scale)


@lru_cache(1)
def _marlin_order() -> Tensor:
    """Which value of a tile, 16 channels of 4 times 16 rows, has each place, int64 ``[1024]``. (IST-DASLab's
    marlin: those of a thread of a tensor core's product lie together.)"""
    places = [
        16 * (2 * (lane % 4) + step) + lane // 4 + 8 * half + 256 * tile
        for lane in range(32)
        for tile in range(4)
        for half in (0, 1)
        for step in (0, 1, 8, 9)
    ]
    return torch.tensor(places, device="cpu").view(-1, 8)[:, list(Awq.ORDER)].flatten()


class Packed(Grouped):
    """packed ``[n, k / per int32]``, zeros ``[n / per int32, groups]``, scales ``[n, groups]``."""

    def quants(self, rows: range) -> Quants:
        q = numbers(self.packed.values(rows), self.bits, 1)[:, : self.shape[1]]
        scale = self.scales.values(rows)
        if self.zeros is None:
            zero = torch.full_like(scale, 1 << self.bits - 1, dtype=torch.int32)
        else:
            zero = self.of_channels(self.zeros, rows, 0).int()
        return Quants(q, zero, scale)


class Bytes(Grouped):
    """packed int8 ``[n, k]``, of numbers of ``bits``, which mean what they are less the zeros, int8
    ``[n, groups]``; scales ``[n, groups]``, ``[n]`` or one."""

    def quants(self, rows: range) -> Quants:
        middle = 1 << self.bits - 1
        q = self.packed.values(rows).view(torch.uint8) + middle  # which wraps
        if self.bits < 8 and bool((q >> self.bits - 1 > 1).any()):
            raise ValueError(f"it holds integers of more than {self.bits} bits")
        scale = _of_rows(self.scales, rows)
        zero = torch.full_like(scale, middle, dtype=torch.int32)
        return Quants(q, zero if self.zeros is None else zero + _of_rows(self.zeros, rows).int(), scale)


class Int4Bytes(Grouped):
    """torchao's: packed int8 ``[n, k / 2]`` of two numbers from -8 to 7, the first in the lower bits; scales
    and what 0 means ``[groups, n]``."""

    def quants(self, rows: range) -> Quants:
        assert self.zeros is not None
        pairs = self.packed.values(rows).view(torch.uint8)
        q = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1) ^ 8
        scale, middle = (t.values(columns=rows).float().T for t in (self.scales, self.zeros))
        return Quants(q, 8 - middle / scale.masked_fill(scale == 0, 1.0), scale)


class Int4Tiles(Grouped):
    """torchao's ``tile_packed_to_4d``, the order of PyTorch's tensor core products: packed int32
    ``[n / 8, k / 128, 32, 4]`` of numbers from 0 to 15, whose eight rows and four words of 32 channels each
    are taken apart here; scales and what 8 means ``[groups, n, 2]``. Both are padded."""

    def quants(self, rows: range) -> Quants:
        first, k = rows.start // 8, self.shape[1]
        words = self.packed.values(range(first, -(-rows.stop // 8)))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
        q = (words[..., None] >> shifts & 15).to(torch.uint8).view(len(words), -1, 8, 4, 4, 2, 4)
        q = q.permute(0, 2, 1, 4, 6, 3, 5).reshape(8 * len(words), -1)
        constants = self.scales.values(columns=rows)[: -(-k // self.group)].float()
        scale, middle = constants[..., 0].T, constants[..., 1].T
        zero = 8 - middle / scale.masked_fill(scale == 0, 1.0)
        return Quants(q[rows.start - 8 * first :][: len(rows), :k].contiguous(), zero, scale)


class Int4Rows(Grouped):
    """The same numbers, with scales ``[n, groups]`` alone."""

    def quants(self, rows: range) -> Quants:
        pairs = self.packed.values(rows).view(torch.uint8)
        scale = self.scales.values(rows)
        q = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1) ^ 8
        return Quants(q, torch.full_like(scale, 8, dtype=torch.int32), scale)


@dataclass(frozen=True)
class Parts127:
    """A StoredTensor of the largest numbers of rows, as what a 127th of them is."""

    largest: StoredTensor
    type = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.largest.shape

    def dense(self, rows: range | None = None) -> Tensor:
        return self.values(rows)

    def values(self, rows: range | None = None, columns: range | None = None) -> Tensor:
        return self.largest.values(rows, columns).float() / 127

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        raise ValueError("scales are no matrix")


def _of_rows(constants: StoredTensor, rows: range) -> Tensor:
    """``[len(rows), groups]``; one for everything stands for all."""
    if constants.shape in ((), (1,)):
        return constants.values().view(1, 1).expand(len(rows), 1)
    return constants.values(rows).view(len(rows), -1)


def numbers(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8: what int32 ``[a, b]`` hold of neighbours along ``dim``, the first in the lowest bits. ``order``:
    which of those of a word has each place."""
    each, width = _unit(bits)
    if width > 1:
        return _across(words, bits, dim)
    shifts = torch.empty(each, dtype=torch.int32, device=words.device)
    shifts[list(order or range(each))] = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    found = words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts) & (1 << bits) - 1
    return found.to(torch.uint8).flatten(dim, dim + 1)


def _across(words: Tensor, bits: int, dim: int) -> Tensor:
    """``numbers``, of which some begin in one word and end in the next."""
    each, width = _unit(bits)
    words = words.movedim(dim, 1)
    units = F.pad(words, (0, -words.shape[1] % width)).unflatten(1, (-1, width)).long() & 0xFFFFFFFF
    both = units | torch.roll(units, -1, -1) << 32  # the last one has nothing in the next
    at = torch.arange(0, each * bits, bits, device=words.device)
    found = both[..., at // 32] >> at % 32 & (1 << bits) - 1
    return found.to(torch.uint8).flatten(1).movedim(1, dim)


def _unit(bits: int) -> tuple[int, int]:
    """How many numbers fill how many int32."""
    return (32 // bits, 1) if 32 % bits == 0 else (32, bits)


def group_order(name: str, g_idx: StoredTensor, k: int, group: int) -> Tensor | None:
    """The group of each of ``k`` channels, int64 on the CPU; None if they lie together. Raises WeightError
    for groups that do not exist."""
    order, groups = g_idx.values().long().cpu(), -(-k // group)
    if bool(((order < 0) | (order >= groups)).any()):
        raise WeightError(f"{name} has groups that do not exist; there are {groups}")
    return None if torch.equal(order, torch.arange(len(order), device="cpu") // group) else order

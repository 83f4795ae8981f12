"""Matrices of few bits in groups along k, as GPTQ, AWQ and compressed-tensors store them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.errors import WeightError
from sgla.quant.groups import GROUP, Groups
from sgla.quant.weight import StoredTensor, Weight, storage


class Quants(NamedTuple):
    """``w = (q - zero) * scale``: q uint8 ``[n, k]``, zero int32 and scale ``[n, groups]``."""

    q: Tensor
    zero: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Grouped(ABC):
    """A SourceTensor of three, of which the first two have ``32 / bits`` neighbours in each int32.

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
        if not issubclass(made, Groups) or self.order is not None or self.group % GROUP:
            return made.read(self, rows, columns)
        q, zero, scale = self.quants(rows)
        if not made.holds(self.bits, bool((zero == 1 << self.bits - 1).all())):
            return made.read(self, rows, columns)
        constants = (scale.float(), -zero * scale.float())
        groups = -(-self.shape[1] // GROUP)
        scale, minimum = (t.repeat_interleave(self.group // GROUP, 1)[:, :groups] for t in constants)
        return made.of(self.bits, q, scale, minimum).cut(columns)

    def of_channels(
        self, packed: StoredTensor, rows: range, dim: int, order: tuple[int, ...] | None = None
    ) -> Tensor:
        """The numbers of output channels ``rows``, which are neighbours along ``dim``."""
        each = 32 // self.bits
        words = range(rows.start // each, -(-rows.stop // each))
        found = packed.values(words) if dim == 0 else packed.values(columns=words)
        return numbers(found, self.bits, dim, order).narrow(dim, rows.start - words.start * each, len(rows))


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


def numbers(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8: what int32 ``[a, b]`` hold of neighbours along ``dim``. ``order``: which of them has each place,
    from the lowest bits on."""
    each = 32 // bits
    shifts = torch.empty(each, dtype=torch.int32, device=words.device)
    shifts[list(order or range(each))] = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    found = words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts) & (1 << bits) - 1
    return found.to(torch.uint8).flatten(dim, dim + 1)


def group_order(name: str, g_idx: StoredTensor, k: int, group: int) -> Tensor | None:
    """The group of each of ``k`` channels, int64 on the CPU; None if they lie together. Raises WeightError
    for groups that do not exist."""
    order, groups = g_idx.values().long().cpu(), -(-k // group)
    if bool(((order < 0) | (order >= groups)).any()):
        raise WeightError(f"{name} has groups that do not exist; there are {groups}")
    return None if torch.equal(order, torch.arange(len(order), device="cpu") // group) else order

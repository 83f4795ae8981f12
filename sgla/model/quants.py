"""Matrices of few bits in groups along k, as AWQ and GPTQ store them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.panels import GROUP
from sgla.quant.groups import Groups
from sgla.quant.weight import StoredTensor, Weight, storage


class Quants(NamedTuple):
    """``w = (q - zero) * scale``: q uint8 ``[n, k]``, zero int32 and scale ``[n, groups]``."""

    q: Tensor
    zero: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Grouped(ABC):
    """A SourceTensor of three. ``qweight`` and ``qzeros`` have ``32 / bits`` numbers in each int32.

    ``group``: channels of k with one zero and one scale. ``order``: the group of each channel, int64 ``[k]``,
    where these do not lie together (GPTQ's act-order)."""

    qweight: StoredTensor
    qzeros: StoredTensor  # [groups, n / per int32]
    scales: StoredTensor  # [groups, n]
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

    def unpacked(self, packed: StoredTensor, rows: range, order: tuple[int, ...]) -> Tensor:
        """int32 numbers ``[.., len(rows)]`` of output channels ``rows``, where each int32 has some that are
        neighbours: place i, from the lowest bits on, the one that ``order`` says."""
        each = len(order)
        first, last = rows.start // each, -(-rows.stop // each)
        words = packed.values(columns=range(first, last))
        places = torch.empty(each, dtype=torch.int32, device=words.device)
        places[list(order)] = torch.arange(0, 32, self.bits, dtype=torch.int32, device=words.device)
        numbers = (words[..., None] >> places & (1 << self.bits) - 1).flatten(1)
        return numbers[:, rows.start - first * each :][:, : len(rows)]

    def of_rows(self, rows: range) -> Tensor:
        """Scales ``[groups, len(rows)]``."""
        return self.scales.values(columns=rows)


class Gptq(Grouped):
    """qweight ``[k / per int32, n]``. Zeros are one less than they mean (``plus`` 1) but in version 2."""

    plus = 1

    def quants(self, rows: range) -> Quants:
        words = self.qweight.values(columns=rows)
        places = torch.arange(0, 32, self.bits, dtype=torch.int32, device=words.device)
        q = (words[:, None] >> places[:, None] & (1 << self.bits) - 1).to(torch.uint8).flatten(0, 1)
        zero = self.unpacked(self.qzeros, rows, tuple(range(32 // self.bits))) + self.plus
        return Quants(q.T.contiguous(), zero.T, self.of_rows(rows).T)


class Gptq2(Gptq):
    plus = 0


class Awq(Grouped):
    """qweight ``[k, n / 8]``; eight neighbours lie in an order that suits AWQ's kernels."""

    ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    def quants(self, rows: range) -> Quants:
        q = self.unpacked(self.qweight, rows, self.ORDER).to(torch.uint8)
        return Quants(q.T.contiguous(), self.unpacked(self.qzeros, rows, self.ORDER).T, self.of_rows(rows).T)


def any_other_zero(qzeros: Tensor, bits: int, plus: int) -> bool:
    """Whether one of the zeros is not half of the range."""
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=qzeros.device)
    zeros = (qzeros[..., None] >> places & (1 << bits) - 1) + plus
    return bool((zeros != 1 << bits - 1).any())


def group_order(g_idx: Tensor, group: int) -> Tensor | None:
    """The group of each channel, int64 on the CPU; None if they lie together."""
    order = g_idx.long().cpu()
    return None if torch.equal(order, torch.arange(len(order), device="cpu") // group) else order

"""Tokens go to their experts' ranks, and sums come back, by torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.kernels.rehearsal import under_way
from sgla.kernels.sent_moe import Sent


class Back(NamedTuple):
    """``goes`` bool ``[T, ranks]``: where each token has gone; how many tokens each rank was sent and has
    sent; ``most``: ranks that a token may have gone to."""

    goes: Tensor
    there: list[int]
    here: list[int]
    most: int


class AllToAll:
    """Between the ``size`` ranks of ``group``. A token is one message, with its slots and weights. How many go
    where depends on what they choose, so each rank is told how many come before they do, which the host has
    to know."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._size, self._group = rank, size, group

    def open(self, hidden: int, top_k: int, tokens: int) -> None:
        """It keeps none, but ranks connect, which takes some of a GPU's."""
        there = torch.zeros(self._size, dtype=torch.int64)
        dist.all_to_all_single(torch.empty_like(there), there, group=self._group)

    def dispatch(self, x: Tensor, slots: Tensor, weights: Tensor, width: int) -> Sent:
        if under_way():
            return Sent(x, slots, weights, None)
        goes = torch.zeros(len(x), self._size, dtype=torch.bool, device=x.device)
        goes.scatter_(1, slots // width, True)
        there = goes.sum(0)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=self._group)
        sent, come = torch.stack([there, here]).tolist()
        by_rank = goes.t().flatten().to(torch.uint8)
        tokens = by_rank.argsort(descending=True, stable=True)[: sum(sent)] % max(1, len(x))
        parts = x.contiguous(), slots.int(), weights
        rows = torch.cat([part.view(torch.uint8) for part in parts], 1)[tokens]
        received = rows.new_empty(sum(come), rows.shape[1])
        dist.all_to_all_single(received, rows, come, sent, self._group)
        sizes = [part.shape[1] * part.itemsize for part in parts]
        found = [
            cut.contiguous().view(part.dtype) for cut, part in zip(received.split(sizes, 1), parts)
        ]
        home = found[1] // width
        places = torch.where(home == self._rank, found[1] % width, -1).long()
        back = Back(goes, sent, come, min(slots.shape[1], self._size))
        return Sent(found[0], places, found[2], back)

    def combine(self, y: Tensor, sent: Sent) -> Tensor:
        if sent.back is None:
            return y
        goes, there, here, most = sent.back
        returned = y.new_empty(sum(there), y.shape[1])
        dist.all_to_all_single(returned, y.contiguous(), there, here, self._group)
        # Where what comes from each rank lies, and of each token's ranks the numbers, in order.
        places = goes.t().flatten().cumsum(0).view(self._size, -1).t() - 1
        ranks = goes.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        at = places.gather(1, ranks).masked_fill(~goes.gather(1, ranks), -1)
        return _sums(returned, at.int())


def _sums(rows: Tensor, at: Tensor) -> Tensor:
    """See ``triton.moe.sum_rows``."""
    if not len(at):
        return rows.new_empty(0, rows.shape[1])
    if rows.is_cuda:
        from sgla.kernels.triton.moe import sum_rows

        return sum_rows(rows, at)
    total = rows.new_zeros(len(at), rows.shape[1], dtype=torch.float32)
    for places in at.t().long():
        total += rows[places.clamp(min=0)].float().masked_fill((places < 0)[:, None], 0.0)
    return total.to(rows.dtype)

"""Ranks that share out the tokens of a step, and have the same weights and the same KV cache."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.kernels.rehearsal import under_way


class Context:
    """``rank`` of ``size`` of these, in ``group``: those of the same part of the weights. ``all``: who
    computes the same steps, of whom ``first`` has that number among all ranks."""

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        all: dist.ProcessGroup | None = None,
        first: int = 0,
    ) -> None:
        self.rank, self.size, self._group = rank, size, group
        self._all, self._first = all, first

    @property
    def alone(self) -> Context:
        """Of ranks whose steps are those of these alone."""
        number = dist.get_rank() if self._group is None else dist.get_global_rank(self._group, 0)
        return Context(self.rank, self.size, self._group, self._group, number)

    def gather(self, x: Tensor, counts: list[int]) -> list[Tensor]:
        """What each rank has: x uint8[n, w] of this one, as many rows as ``counts`` says of each."""
        padded = x.new_zeros(max(counts), x.shape[1])
        padded[: len(x)] = x
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, self._group)
        return [rows[:count] for rows, count in zip(received, counts)]

    def max(self, keys: Tensor) -> None:
        """Largest of each of ``keys`` int64[S] over the ranks, in place."""
        if not under_way():
            dist.all_reduce(keys, dist.ReduceOp.MAX, self._group)

    def join(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        """All of ``count`` rows, of which each rank has some: x [n, d] of this one, which are ``rows``."""
        whole = x.new_zeros(count, x.shape[1])
        whole[rows] = x
        return self.sum(whole)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite x with that of the rank ``source`` of all, in place."""
        dist.broadcast(x, self._first + source, self._all)

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(x, group=self._group)
        return x

"""Ranks with attention and requests of their own, which share out what comes behind attention: every MLP sees
the tokens of all of them, and gives each its own back. So all go through their layers together, and one that
has nothing to do takes part all the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class Lockstep:
    """``rank`` of ``size`` that share MLPs and experts out. ``idle``: it has no tokens, and what it computes
    is thrown away."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.idle = False

    def go_on(self, more: bool) -> bool:
        """Whether some rank has ``more`` to compute. All ask at once."""
        told = torch.tensor([more], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)

    def share(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``part`` of the tokens of all ranks, of which the sum over the ranks is wanted: x [T, d] of this
        rank -> [T, d]."""
        counts = self._counts(0 if self.idle else len(x))
        if not any(counts):
            return x
        first, y = sum(counts[: self.rank]), part(self._gather(x, counts))
        dist.all_reduce(y)
        return x.new_zeros(x.shape) if self.idle else y[first : first + len(x)]

    def _counts(self, own: int) -> list[int]:
        """Tokens of each rank."""
        told = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(told, torch.tensor([own]))
        return [int(count) for count in told]

    def _gather(self, x: Tensor, counts: list[int]) -> Tensor:
        """[sum of counts, d]: those of each rank, one behind the other."""
        padded = x.new_zeros(max(counts), x.shape[1])
        padded[: counts[self.rank]] = x[: counts[self.rank]]
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded)
        return torch.cat([rows[:count] for rows, count in zip(received, counts)])

"""Ranks with attention and requests of their own, which share out what comes behind attention: every MLP sees
the tokens of all of them, and gives each its own back. So all go through their layers together, and one that
has nothing to do takes part all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import torch
import torch.distributed as dist
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.rehearsal import under_way
# Its name was another one before torch 2.14.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        counts = self.of_all(0 if self.idle else len(x))
        if not any(counts):
            return x
        first, y = sum(counts[: self.rank]), part(gathered(x, counts, self.rank))
        dist.all_reduce(y)
        return x.new_zeros(x.shape) if self.idle else y[first : first + len(x)]

    def of_all(self, own: int) -> list[int]:
        """Tokens of each rank, if this one has ``own``."""
        told = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(told, torch.tensor([own]))
        return [int(count) for count in told]


class PlannedLockstep(Lockstep):
    """Of ranks that learn from the plan how many tokens each has, so that nobody waits for an answer.
    ``ranks``: for sums over them. ``counts``: those of the step; None: each has as many as this
    one."""

    counts: Sequence[int] | None = None

    def __init__(self, rank: int, size: int, ranks: ops.Ranks) -> None:
        super().__init__(rank, size)
        self._ranks = ranks

    def of_all(self, own: int) -> list[int]:
        return [own] * self.size if self.counts is None else list(self.counts)

    def share(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        y = ops.all_reduce(part(ops.gathered(x, self)), self._ranks)
        return ops.own_rows(y, x, self)

    def gather(self, x: Tensor) -> Tensor:
        return gathered(x, self.of_all(len(x)), self.rank)

    def own_rows(self, y: Tensor, x: Tensor) -> Tensor:
        counts = self.of_all(len(x))
        if not counts[self.rank]:
            return torch.zeros_like(x)
        first = sum(counts[: self.rank])
        return y[first : first + len(x)]


def gathered(x: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """[sum of counts, d]: the first ``counts`` rows of each rank's x [T, d], one behind the other."""
    most = max(counts)
    if len(x) < most:
        x = torch.cat([x[: counts[rank]], x.new_zeros(most - counts[rank], x.shape[1])])
    received = x.new_empty(len(counts) * most, x.shape[1])
    if not under_way():
        _gather(received, x.contiguous())
    if all(count == most for count in counts):
        return received
    return torch.cat([rows[:count] for rows, count in zip(received.split(most), counts)])

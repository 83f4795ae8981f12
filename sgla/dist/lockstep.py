"""Ranks with attention and requests of their own, which share out what comes behind attention: every MLP sees
the tokens of all of them, and gives each its own back. So all go through their layers together, and one that
has nothing to do takes part all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.ops import AddedNorm
from sgla.kernels.placement import reached
from sgla.kernels.rehearsal import under_way
from sgla.kernels.sent_moe import Traffic

# Bytes that a rank is not sent in a mixture, from which on a step is launched kernel by kernel, so that tokens
# go to their experts' ranks alone: links between hosts (50 GB/s) carry them in 0.1 ms, as long as it takes the
# host to launch the kernels of a layer.
SPARED = 4 << 20

# Its name was another one before torch 2.14.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OwnExchange(Protocol):
    """Collectives on rows of which each rank has some that beat the library's; see ``dist/gpus.py``."""

    def takes_own(self, rows: Tensor, counts: Sequence[int]) -> bool:
        """Whether the others can have ``rows`` of all ranks, which have ``counts``. The same on every rank."""

    def gather(self, x: Tensor, counts: Sequence[int]) -> Tensor: ...
    def scatter(self, x: Tensor, counts: Sequence[int], norm: AddedNorm | None = None) -> Tensor: ...


class Lockstep:
    """``rank`` of ``size`` that share MLPs and experts out, in ``group``. ``idle``: it has no tokens, and what
    it computes is thrown away. ``traffic``: None, or that by which tokens go to the ranks of their experts
    alone, instead of to all; then nothing else is shared out."""

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.rank, self.size, self._group, self.traffic = rank, size, group, traffic
        self.idle = False

    @property
    def sends(self) -> bool:
        """Whether tokens go to the ranks of their experts alone, in a step like this one."""
        return self.traffic is not None

    def own_tokens(self, rows: int) -> int:
        """How many of so many rows of a step are this rank's tokens; those behind are nobody's."""
        return 0 if self.idle else rows

    def go_on(self, more: bool) -> bool:
        """Whether some rank has ``more`` to compute. All ask at once."""
        told = torch.tensor([more], dtype=torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MAX, self._group)
        return bool(told)

    def share(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``part`` of the tokens of all ranks, of which the sum over the ranks is wanted: x [T, d] of this
        rank -> [T, d]."""
        counts = self.of_all(0 if self.idle else len(x))
        if not any(counts):
            return x
        y = part(gathered(x, counts, self.rank, self._group))
        y = scattered(y, counts, self.rank, self._group)
        return x.new_zeros(x.shape) if self.idle else y

    def of_all(self, own: int) -> list[int]:
        """Tokens of each rank, if this one has ``own``."""
        told = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(told, torch.tensor([own]), self._group)
        return [int(count) for count in told]


class PlannedLockstep(Lockstep):
    """Of ranks that learn from the plan how many tokens each has, so that nobody waits for an answer.
    ``counts``: those of the step; None: each has as many as this one."""

    counts: Sequence[int] | None = None
    _sending = False

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: OwnExchange | None = None,
        group: dist.ProcessGroup | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(rank, size, group, traffic)
        self._exchange = exchange

    @property
    def sends(self) -> bool:
        """Not where all have as many tokens, as in a graph: that has room for the most that may come, all
        tokens of all ranks, and a gather brings as many bytes without asking before how many."""
        return self.traffic is not None and (self.counts is not None or self._sending)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Meanwhile tokens are sent as in a step that is no graph, if they are in any."""
        self._sending = True
        try:
            yield
        finally:
            self._sending = False

    def in_graphs(self, tokens: int, nbytes: int, top_k: int) -> bool:
        """Whether a step may be a graph in which a rank has ``tokens``, of ``nbytes`` each, with ``top_k``
        experts."""
        spared = 0.0 if self.traffic is None else self.size - reached(self.size, top_k)
        return 2 * tokens * nbytes * spared <= SPARED

    def own_tokens(self, rows: int) -> int:
        return self.of_all(rows)[self.rank]

    def of_all(self, own: int) -> list[int]:
        return [own] * self.size if self.counts is None else list(self.counts)

    def share(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return ops.reduce_scatter(part(ops.gathered(x, self)), x, self)

    @property
    def exchanges(self) -> bool:
        return self._exchange is not None

    def norms(self, y: Tensor, x: Tensor) -> bool:
        return self._exchange is not None and self._exchange.takes_own(y, self.of_all(len(x)))

    def gather(self, x: Tensor) -> Tensor:
        counts = self.of_all(len(x))
        like = torch.empty(sum(counts), x.shape[1], dtype=x.dtype, device="meta")
        if self._exchange is not None and self._exchange.takes_own(like, counts):
            return self._exchange.gather(x.contiguous(), counts)
        return gathered(x, counts, self.rank, self._group)

    def reduce_scatter(self, y: Tensor, x: Tensor) -> Tensor:
        counts = self.of_all(len(x))
        if self._exchange is not None and self._exchange.takes_own(y, counts):
            return self._exchange.scatter(y, counts)
        own = scattered(y, counts, self.rank, self._group)
        return own if counts[self.rank] else torch.zeros_like(x)

    def reduce_scatter_norm(self, y: Tensor, x: Tensor, norm: AddedNorm) -> Tensor:
        assert self._exchange is not None
        return self._exchange.scatter(y, self.of_all(len(x)), norm)


class SharedRows(PlannedLockstep):
    """Of ranks that have parts of the same layers, and share out the rows of a step between their products."""

    @property
    def own(self) -> slice:
        assert self.counts is not None
        begin = sum(self.counts[: self.rank])
        return slice(begin, begin + self.counts[self.rank])

    def share_out(self, tokens: int) -> int:
        bounds = [rank * tokens // self.size for rank in range(self.size + 1)]
        self.counts = [end - begin for begin, end in pairwise(bounds)]
        return self.counts[self.rank]


def gathered(
    x: Tensor, counts: Sequence[int], rank: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """[sum of counts, d]: the first ``counts`` rows of each rank's x [T, d], one behind the other."""
    most = max(counts)
    if len(x) < most:
        x = torch.cat([x[: counts[rank]], x.new_zeros(most - counts[rank], x.shape[1])])
    received = x.new_empty(len(counts) * most, x.shape[1])
    if not under_way():
        _gather(received, x.contiguous(), group=group)
    if all(count == most for count in counts):
        return received
    return torch.cat([rows[:count] for rows, count in zip(received.split(most), counts)])


def scattered(
    y: Tensor, counts: Sequence[int], rank: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """[T, d]: the sum over the ranks of this one's rows of y [A, d], of which each rank has ``counts``. Each
    sends the others theirs alone, and adds up in the order of ranks."""
    own = counts[rank]
    received = y.new_empty(len(counts) * own, y.shape[1])
    if not under_way():
        dist.all_to_all_single(received, y.contiguous(), [own] * len(counts), list(counts), group)
    return received.view(len(counts), own, y.shape[1]).sum(0)

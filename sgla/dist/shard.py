"""One rank of a tensor-parallel group, which may be one of several stages of a pipeline.
``Shard()`` is the only rank of a group of one, where collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from sgla.dist.context import Context
from sgla.dist.lockstep import Lockstep, OwnExchange, SharedRows
from sgla.dist.meeting import TIMEOUT, open_store, use_interface
from sgla.dist.pipe import Pipe
from sgla.kernels.ops import AddedNorm, Sent
from sgla.kernels.placement import Homes, Placement


class Exchange(OwnExchange, Protocol):
    """Collectives on small messages that beat the library's; see ``dist/gpus.py``."""

    def takes(self, x: Tensor) -> bool:
        """Whether ``sum`` can have x. The same on every rank for the same shape."""

    def sending(self, rows: int, d: int) -> Any:
        """How a kernel sends its part of ``[rows, d]`` when it makes it; None if that goes otherwise."""

    def for_steps(self, shape: Any) -> Any:
        """Where kernels of whole steps exchange what they add; None if they cannot."""

    def sum(self, x: Tensor, norm: AddedNorm | None = None, *, sent: Sent = "") -> Tensor: ...
    def max(self, keys: Tensor) -> None: ...
    def beside(self) -> Exchange:
        """The same, whose sums leave most of the GPU to what runs beside them."""


@dataclass(frozen=True)
class Shard:
    """``rank`` of ``size``.
    All ranks must call the same collectives in the same order, with the same shapes.

    ``pipe``: its stage, if there are several; the ranks of one are a ``group`` of their own.
    ``whole_experts``: experts of a mixture are whole, and each rank has some. ``lockstep``: attention is whole
    on each rank, and MLPs and experts are shared out with others, among whom ``mlps`` is its place.
    ``placement``: which ones, if they are not in order.
    ``context``: others have the same part of the model, and share out the tokens of a step. ``rows``: between
    products the ranks share out the rows of long steps.
    """

    rank: int = 0
    size: int = 1
    exchange: Exchange | None = None
    pipe: Pipe | None = None
    group: dist.ProcessGroup | None = None
    whole_experts: bool = False
    placement: Placement | None = None
    lockstep: Lockstep | None = None
    mlps: Shard | None = None
    context: Context | None = None
    rows: SharedRows | None = None

    @property
    def of_mlps(self) -> Shard:
        """Its place among the ranks that share MLPs and experts out."""
        return self.mlps or self

    @property
    def of_others(self) -> Shard:
        """Its place among those that share MLPs out which are no experts: alone where tokens are sent to the
        ranks of their experts."""
        return self if self.lockstep is not None and self.lockstep.traffic is not None else self.of_mlps

    @property
    def of_guesses(self) -> Shard:
        """Its place among the ranks that share out what guesses: with attention by data it is whole on each,
        so that none has to wait for others, which guess for rows of their own."""
        return replace(self, lockstep=None, mlps=None)

    @property
    def number(self) -> int:
        """Of the rank, among those of all stages."""
        at = 0 if self.pipe is None else self.pipe.stage
        if self.context is not None:
            at = at * self.context.size + self.context.rank
        return self.rank + self.size * at

    @property
    def count(self) -> int:
        """Of the ranks of all stages."""
        stages = 1 if self.pipe is None else self.pipe.stages
        return self.size * stages * (1 if self.context is None else self.context.size)

    @property
    def samples(self) -> bool:
        """It has the model's logits: it is in the last stage."""
        return self.pipe is None or self.pipe.last

    @property
    def draws(self) -> bool:
        """Tokens are drawn by it, and others are told."""
        return self.samples and self.rank == 0 and (self.context is None or self.context.rank == 0)

    def homes(self, layer: int, experts: int) -> Homes:
        """The experts of each rank, which are whole."""
        if self.placement is not None:
            return self.placement.homes(layer, experts)
        return [list(peer.range(experts)) for peer in self.peers()]

    def range(self, count: int, unit: int = 1) -> range:
        """This rank's part of ``count`` things: contiguous, balanced, in multiples of ``unit`` if that divides
        them and no rank would have none.

        Parts may differ by one unit: 3 KV heads over 2 ranks are 1 and 2.
        """
        unit = unit if count % unit == 0 and count >= unit * self.size else 1
        units = count // unit
        return range(self.rank * units // self.size * unit, (self.rank + 1) * units // self.size * unit)

    def peers(self) -> Iterator[Shard]:
        """Every rank of the group, in order."""
        return (Shard(rank, self.size) for rank in range(self.size))

    def all_reduce(self, x: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.exchange is not None and self.exchange.takes(x):
            self.exchange.sum(x)
        elif self.size > 1:
            dist.all_reduce(x, group=self.group)

    def norms(self, x: Tensor) -> bool:
        """Whether ``all_reduce_norm`` takes what looks like x. The same on every rank."""
        return self.exchange is not None and self.exchange.takes(x)

    def sending(self, rows: int, d: int) -> Any:
        """See ``Exchange``."""
        return None if self.exchange is None else self.exchange.sending(rows, d)

    def for_steps(self, shape: Any) -> Any:
        """See ``Exchange``."""
        return None if self.exchange is None else self.exchange.for_steps(shape)

    def all_reduce_norm(self, x: Tensor, norm: AddedNorm, sent: Sent = "") -> Tensor:
        """``all_reduce``, add and RMSNorm as one (see ``AddedNorm``; x becomes the result). ``sent``: to whom
        x is on its way; to all: it is not read here."""
        assert self.exchange is not None
        return self.exchange.sum(x, norm, sent=sent)

    def beside(self) -> Shard:
        """See ``Exchange``."""
        return self if self.exchange is None else replace(self, exchange=self.exchange.beside())

    def max(self, keys: Tensor) -> None:
        """Largest of each of ``keys`` int64[S] over the ranks, with a ``context`` over all of its ranks, in
        place. None may be 0."""
        if self.exchange is not None:
            self.exchange.max(keys)
        elif self.size > 1:
            dist.all_reduce(keys, dist.ReduceOp.MAX, self.group)
        if self.context is not None:
            self.context.max(keys)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Join the ranks' columns:
        x ``[S, w]``, w this rank's ``range(W)``, into out ``[S, W]`` of every rank."""
        if self.size == 1:
            out.copy_(x)
            return
        parts = [peer.range(out.shape[1]) for peer in self.peers()]
        width = max(len(part) for part in parts)
        padded = x.new_zeros(x.shape[0], width)
        padded[:, : x.shape[1]] = x
        received = [x.new_empty(padded.shape) for _ in parts]
        dist.all_gather(received, padded, self.group)
        for part, columns in zip(parts, received):
            out[:, part.start : part.stop] = columns[:, : len(part)]

    def agree(self, *values: NDArray[np.int32]) -> None:
        """Overwrite ``values``, on the host, with those of the rank that draws, in place."""
        if self.count > 1:
            for each in values:
                self.broadcast(torch.from_numpy(each))

    def broadcast(self, x: Tensor, source: int = 0) -> None:
        """Overwrite x with rank ``source``'s, in place; with a ``context`` on all of its ranks."""
        if self.context is not None:
            self.context.broadcast(x, source)
        elif self.size > 1:
            dist.broadcast(x, source + self.number - self.rank, self.group)


@contextmanager
def join(
    rank: int, size: int, store: str, stages: int = 1, timeout: float = TIMEOUT, contexts: int = 1
) -> Iterator[Shard]:
    """Meet the other ranks over gloo and leave at the end. Each of the ``stages`` has as many, and of these
    each of the ``contexts``.

    ``store``: see ``open_store``. ``timeout`` in seconds holds for each collective.
    """
    if size == 1:
        yield Shard()
        return
    use_interface(store)
    dist.init_process_group(
        "gloo",
        store=open_store(store, size, timeout),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield shard_of(rank, size, stages, contexts, timeout)
    finally:
        dist.destroy_process_group()


def shard_of(rank: int, size: int, stages: int, contexts: int = 1, timeout: float = TIMEOUT) -> Shard:
    """The part of rank ``rank`` of all, who have met: those of a stage lie side by side, and of these those of
    a set, of which there are ``contexts`` with the same layers each. ``timeout``: see ``join``."""
    if stages == contexts == 1:
        return Shard(rank, size)
    each = size // stages  # ranks of a stage
    width = each // contexts
    stage, own, at = rank // each, rank % each // width, rank % width
    pipe = Pipe(stage, stages, each, rank) if stages > 1 else None
    sets = _groups((range(first, first + width) for first in range(0, size, width)), timeout)
    if contexts == 1:
        return Shard(at, width, pipe=pipe, group=sets[rank // width])
    firsts = range(0, size, each)
    alike = _groups((range(first + i, first + each, width) for first in firsts for i in range(width)), timeout)
    all = _groups((range(first, first + each) for first in firsts), timeout)[stage] if stages > 1 else None
    context = Context(own, contexts, alike[stage * width + at], all, stage * each)
    return Shard(at, width, pipe=pipe, group=sets[rank // width], context=context)


def _groups(ranks: Iterable[range], timeout: float) -> list[dist.ProcessGroup]:
    """All ranks make all of them. Without a ``timeout`` torch gives groups one of its own."""
    return [dist.new_group(list(each), timedelta(seconds=timeout)) for each in ranks]

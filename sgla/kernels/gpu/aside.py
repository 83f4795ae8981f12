"""Two batches that take turns (``--two-batch-overlap``): while the ranks add up what one has made, the other
one is computed. The sums have a stream of their own; all else is launched on one, in an order in which no
batch is ahead of the one before it. So in each layer a batch may read what that one has stored there."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.gpu.record import Record
from sgla.kernels.ops import AddedNorm, Ranks, Sent

Turns = Generator[None, None, list[Any]]


class Aside:
    """``Ranks`` that add up on a stream of their own, behind what has been launched on the current one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._stream = ranks.beside(), torch.cuda.Stream(priority=-1)

    @property
    def size(self) -> int:
        return self._ranks.size

    def norms(self, x: Tensor) -> bool:
        return self._ranks.norms(x)

    def sending(self, rows: int, d: int) -> Any:
        """Products do not: the inbox may be in use beside them."""
        return None

    def for_steps(self, shape: Any) -> Any:
        return None

    def beside(self) -> Ranks:
        return self

    def all_reduce(self, x: Tensor) -> None:
        with self._behind():
            self._ranks.all_reduce(x)

    def all_reduce_norm(self, x: Tensor, norm: AddedNorm, sent: Sent = "") -> Tensor:
        with self._behind():
            return self._ranks.all_reduce_norm(x, norm, sent)

    def launched(self) -> torch.cuda.Event:
        """When all is there that has been launched."""
        return self._stream.record_event()

    @contextmanager
    def _behind(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def added_aside(record: Record) -> Record:
    """``record`` with its sums on a stream of their own."""
    if record.ranks is None:
        return record
    ranks = {"ranks": Aside(record.ranks)}
    return replace(
        record, nodes=[node.but(ranks) if node.op is ops.all_reduce else node for node in record.nodes]
    )


def by_turns(batches: Sequence[Turns]) -> list[list[Any]]:
    """What each returns. Where one waits for the ranks the next one goes on."""
    results: dict[int, list[Any]] = {}
    while len(results) < len(batches):
        for at, turns in enumerate(batches):
            try:
                if at not in results:
                    next(turns)
            except StopIteration as end:
                results[at] = end.value
    return [results[at] for at in range(len(batches))]

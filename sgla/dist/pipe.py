"""One stage of a pipeline: hidden states come from the stage before and go to the one behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from sgla.kernels.rehearsal import under_way

AHEAD = 4  # messages on their way, at most: a stage computes the next step while the one behind is busy


class Pipe:
    """``stage`` of ``stages``, of which each has ``width`` ranks; ``rank``: this one, among those of all. It
    exchanges with the ranks of the same place in the stages beside.

    The two sides call ``send`` and ``receive`` in the same order: that of the steps.
    """

    def __init__(self, stage: int, stages: int, width: int, rank: int) -> None:
        self.stage, self.stages = stage, stages
        self._before, self._behind = rank - width, rank + width
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @contextmanager
    def holding(self, arrived: Tensor, leaving: Tensor) -> Iterator[None]:
        """Meanwhile what is received is in ``arrived`` [at least T, d], and what is sent goes to ``leaving``: a
        graph reads and writes them, before and behind whose replays they go from rank to rank."""
        self._held = arrived, leaving
        try:
            yield
        finally:
            self._held = None

    def receive(self, out: Tensor) -> None:
        """Fill ``out`` [T, d] with the hidden states of the step."""
        if self._held is not None:
            out.copy_(self._held[0][: len(out)])
        elif not under_way():
            self._take(out)

    def send(self, x: Tensor) -> None:
        """Hand on the hidden states ``x`` [T, d], which may change afterwards."""
        if self._held is not None:
            self._held[1][: len(x)].copy_(x)
        elif not under_way():
            self._give(x)

    def _take(self, out: Tensor) -> None:
        dist.recv(out, self._before)

    def _give(self, x: Tensor) -> None:
        if len(self._sent) == AHEAD:
            self._sent.popleft()[0].wait()
        copy = x.clone()
        work = dist.isend(copy, self._behind)
        assert work is not None
        self._sent.append((work, copy))

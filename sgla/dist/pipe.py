"""One stage of a pipeline: hidden states come from the stage before and go to the one behind."""

from __future__ import annotations

from collections import deque

import torch.distributed as dist
from torch import Tensor

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

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def receive(self, out: Tensor) -> None:
        """Fill ``out`` [T, d] with the hidden states of the step."""
        dist.recv(out, self._before)

    def send(self, x: Tensor) -> None:
        """Hand on the hidden states ``x`` [T, d], which may change afterwards."""
        if len(self._sent) == AHEAD:
            self._sent.popleft()[0].wait()
        copy = x.clone()
        work = dist.isend(copy, self._behind)
        assert work is not None
        self._sent.append((work, copy))

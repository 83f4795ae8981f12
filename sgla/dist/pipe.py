"""One stage of a pipeline: hidden states come from the stage before and go to the one behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from sgla.kernels.rehearsal import under_way

AHEAD = 4  # messages on their way, at most: a stage computes the next step while the one behind is busy


class Pipe:
    """``stage`` of ``stages``, of which each has ``width`` ranks; ``rank``: this one, among those of all. It
    exchanges with the ranks of the same place in the stages beside.

    The two sides call ``send`` and ``receive`` in the same order: that of the steps.

    Hidden states that somebody reads on the last stage travel beside those of the step, in one message with
    them: of a token as many as ``came`` from the stage before, and ``left`` to the one behind (``carry``).
    """

    def __init__(self, stage: int, stages: int, width: int, rank: int) -> None:
        self.stage, self.stages = stage, stages
        self._before, self._behind = rank - width, rank + width
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._held: tuple[Tensor, Tensor] | None = None
        self.came = self.left = 0
        self._beside: list[Tensor] = []  # of the step under way

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def carry(self, came: int, left: int) -> None:
        """All ranks know before they compute anything what travels."""
        self.came, self.left = came, left

    def messages(self, tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """On a GPU room for one from the stage before, and for one to the stage behind."""
        came, left = (
            torch.zeros(tokens, (1 + beside) * width, dtype=dtype, device="cuda")
            for beside in (self.came, self.left)
        )
        return came, left

    @contextmanager
    def holding(self, arrived: Tensor, leaving: Tensor) -> Iterator[None]:
        """Meanwhile what is received is in ``arrived`` [at least T, (1 + came) * d], and what is sent goes to
        ``leaving`` [at least T, (1 + left) * d]: a graph reads and writes them, before and behind whose
        replays they go from rank to rank (``take`` and ``give``)."""
        self._held = arrived, leaving
        try:
            yield
        finally:
            self._held = None

    def receive(self, out: Tensor) -> None:
        """Fill ``out`` [T, d] with the hidden states of the step."""
        tokens, width = out.shape
        if self._held is not None:
            wide = self._held[0][:tokens]
        elif under_way():
            self._beside = []
            return
        else:
            wide = out.new_empty(tokens, (1 + self.came) * width)
            self.take(wide)
        first, *self._beside = wide.split(width, 1)
        out.copy_(first)

    def bring(self, place: int, out: Tensor) -> None:
        """Fill ``out`` [T, d] with those that came beside, in this place."""
        if self._beside:  # not in a rehearsal
            out.copy_(self._beside[place])

    def keep(self, x: Tensor) -> None:
        """Hand ``x`` [T, d] on, too, behind those that came."""
        self._beside.append(x.clone())

    def send(self, x: Tensor) -> None:
        """Hand on the hidden states ``x`` [T, d], which may change afterwards."""
        parts, self._beside = [x, *self._beside], []
        if self._held is not None:
            for columns, part in zip(self._held[1][: len(x)].split(x.shape[1], 1), parts):
                columns.copy_(part)
        elif not under_way():
            self.give(x if len(parts) == 1 else torch.cat(parts, 1))

    def take(self, out: Tensor) -> None:
        """Fill ``out`` with the message of the stage before."""
        dist.recv(out, self._before)

    def give(self, x: Tensor) -> None:
        """Send ``x``, which may change afterwards, to the stage behind."""
        if len(self._sent) == AHEAD:
            self._sent.popleft()[0].wait()
        copy = x.clone()
        work = dist.isend(copy, self._behind)
        assert work is not None
        self._sent.append((work, copy))

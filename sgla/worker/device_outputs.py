"""What requests were answered lately, for the guesses of others on a GPU: ``others.py``, which all ranks keep
alike, and copies of its tables there."""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

from sgla.dist.pipe import Pipe
from sgla.messages import NewRow, StepPlan
from sgla.worker.device_state import upload
from sgla.worker.flights import Flight, over
from sgla.worker.others import BITS, Outputs, Put
from sgla.worker.state import Int32s


class DeviceOutputs(Outputs):
    """``answers``: the ``memory`` on the GPU; ``pipe``: see ``over``."""

    def __init__(self, slots: int, answers: Tensor, pipe: Pipe | None = None) -> None:
        super().__init__(slots)
        self._answers, self._pipe = answers, pipe
        self._flights: deque[tuple[list[NewRow], Flight]] = deque()
        self._changed: list[Int32s] = []  # places of ``memory``

    def remember(self, flight: Flight) -> None:
        self._flights.append((flight.plan.new, flight))

    def learn(self, plan: StepPlan) -> None:
        """What was answered in the steps that are over for sure when ``plan`` is launched, for those behind
        it."""
        while self._flights and over(self._flights[0][1], plan.step, self._pipe):
            new, flight = self._flights.popleft()
            for row in new:
                self.admit(row.slot, row.apart)
            flight.end.synchronize()
            for slot, tokens in flight.brought():
                self.add(slot, tokens)
        if self._changed:
            self._send()

    def _put(self, part: list[int]) -> Put | None:
        put = super()._put(part)
        if put is not None:
            self._changed += [put.runs.astype(np.int32), np.array(put.places, np.int32) + (1 << BITS)]
        return put

    def _send(self) -> None:
        changed = np.unique(np.concatenate(self._changed))
        self._changed = []
        at, values = upload(np.stack([changed, self.memory[changed]]))
        self._answers.index_copy_(0, at.long(), values)

"""The forward pass of a rank that goes through its layers together with others (``dist/lockstep.py``)."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from sgla.dist.lockstep import Lockstep
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import Op, using
from sgla.worker.batch import Columns, StateColumns, build
from sgla.worker.forward import Forward
from sgla.worker.state import SlotTables

R = TypeVar("R")


class Together:
    """``forward``, of which each rank calls this as often as it has to in a step, and then ``end``. The last
    slot of ``tables`` is nobody's: its pages are the dummy."""

    def __init__(self, forward: Forward, lockstep: Lockstep, tables: SlotTables) -> None:
        self._forward, self._lockstep, self._tables = forward, lockstep, tables
        self._slot = len(tables.limit) - 1
        tables.tokens[self._slot, 0] = 0

    def __call__(self, batch: ForwardBatch) -> Tensor:
        self._lockstep.go_on(True)
        return self._forward(batch)

    def end(self) -> None:
        """Take part until all ranks have computed their step."""
        while self._lockstep.go_on(False):
            self._lockstep.idle = True
            with using(_Unseen()):
                self._forward(self._nothing())
            self._lockstep.idle = False

    def _nothing(self) -> ForwardBatch:
        """A token of nobody, since layers want one."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        states = None if self._tables.unit is None else StateColumns(zero, zero, np.zeros((0, 3), np.int32))
        slots = np.full(1, self._slot, np.int32)
        return build(Columns(slots, zero, one, zero.copy(), states), self._tables)


class _Unseen:
    """Nobody is shown hidden states of tokens of nobody."""

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if op is ops.tap:
            x: R = args[1]
            return x
        return op.body(*args, **kwargs)

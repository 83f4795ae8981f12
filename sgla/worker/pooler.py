"""From the hidden states of a step to vectors of the prompts that end in it."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sgla.messages import Pooling, StepResult
from sgla.model.heads import Accumulator, Linear, apply
from sgla.sampling import faults


class Pooler:
    """Of a decoder, whose prompts come in chunks. ``whole``: it wants the hidden states of all tokens, not
    only of the last one of each prompt."""

    def __init__(self, pooling: Pooling, head: list[Linear], slots: int, hidden: int) -> None:
        self.whole = pooling.kind != "last"
        self._head = head
        self._sums = Accumulator(pooling.kind, slots, hidden) if self.whole else None

    def add(self, slots: Any, starts: Any, first: Any, ends: Any, hidden: Tensor) -> None:
        """Take in the step's tokens ``[first, ends)`` of each row, all int32[R], from ``hidden`` [T, d]."""
        assert self._sums is not None
        for slot, start, begin, end in zip(*(x.tolist() for x in (slots, starts, first, ends))):
            self._sums.add(slot, start, hidden[begin:end].float())

    def take(self, slots: Any, lengths: Any) -> Tensor:
        """Hidden states ``[n, d]`` pooled of the prompts in ``slots`` int32[n], which are complete with
        ``lengths`` tokens."""
        assert self._sums is not None
        pooled = [self._sums.take(slot, length) for slot, length in zip(slots.tolist(), lengths.tolist())]
        return torch.stack(pooled) if pooled else self._sums.state[:0]

    def vectors(self, pooled: Tensor) -> Tensor:
        """``[n, d]`` -> float32 ``[n, size]``."""
        return apply(self._head, pooled)


def vector_result(step: int, vectors: Tensor, rows: Any) -> StepResult:
    """``vectors`` float32 ``[n, size]`` of the ``rows`` int[n] of a step;
    those with a NaN or an infinity fail."""
    found = vectors.numpy()
    failed = [faults.of_vector(row, vector, labels=False) for row, vector in zip(rows.tolist(), found)]
    return StepResult(
        step=step,
        tokens=b"",
        vectors=[vector.tobytes() for vector in found],
        failed=list(chain.from_iterable(failed)),
    )

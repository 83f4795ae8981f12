"""What a step answers in vectors: pooled hidden states, or log-probabilities of labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.messages import Pooling, StepResult
from sgla.model.heads import Accumulator, Layer, apply
from sgla.sampling import faults
from sgla.worker.batch import Columns
from sgla.worker.state import Int32s


class Pooler:
    """Of a decoder, whose prompts come in chunks. ``whole``: it wants the hidden states of all tokens, not
    only of the last one of each prompt."""

    def __init__(self, pooling: Pooling, head: list[Layer], slots: int, hidden: int) -> None:
        self.whole = pooling.kind != "last"
        self._head = head
        self._sums = Accumulator(pooling.kind, slots, hidden) if self.whole else None

    def __call__(
        self, columns: Columns, first: Int32s, rows: Sequence[int], lengths: Int32s, hidden: Tensor
    ) -> Tensor:
        """float32 ``[n, size]`` of the step's ``rows`` whose prompts are complete, with ``lengths`` int32[n]
        tokens. ``hidden``: of all tokens ``[T, d]``, where those of each row begin at ``first`` int32[R], if
        it wants the ``whole``; else of the last ones ``[n, d]``."""
        if self._sums is None:
            return apply(self._head, hidden)
        for slot, start, begin, count in zip(*(x.tolist() for x in (*columns[:2], first, columns.q_lens))):
            self._sums.add(slot, start, hidden[begin : begin + count].float())
        slots = columns.slots[rows].tolist()
        pooled = [self._sums.take(slot, length) for slot, length in zip(slots, lengths.tolist())]
        return apply(self._head, torch.stack(pooled) if pooled else self._sums.state[:0])


def label_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """float32[n]: log-probabilities of the tokens ``labels`` int[n]; logits ``[V]``."""
    return logits.log_softmax(-1)[labels]


def add_vectors(
    result: StepResult, vectors: Iterable[tuple[int, NDArray[np.float32]]], labels: bool = False
) -> None:
    """``vectors``: row and values. Those with what is no number fail. ``labels``: they are log-probabilities
    of labels."""
    for row, values in vectors:
        result.vectors.append(values.tobytes())
        result.failed += faults.of_vector(row, values, labels)

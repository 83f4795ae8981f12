"""Steps on a GPU that are two batches, whose layers take turns: see ``kernels/gpu/aside.py``. They are
launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla.attention import Attention, DeviceBatch
from sgla.kernels.gpu import RecordedForward
from sgla.kernels.gpu.program import Half
from sgla.kernels.lora import Placed
from sgla.kernels.rehearsal import under_way
from sgla.worker.batch import Columns, between, eager_order
from sgla.worker.device_state import upload, upload_columns
from sgla.worker.gpu_adapters import AdaptedRows
from sgla.worker.state import Int32s

Extend = Callable[..., DeviceBatch]  # makes a batch of slots, starts, lengths and states
WHOLE = 2048  # tokens up to which a step is one batch
TILE = 256  # of a step is cut at a multiple of so many tokens


class Cut(NamedTuple):
    """One of the two: its batch, slots and lengths of its rows in that order, and where in it each of its
    tokens is, in the plan's order."""

    batch: DeviceBatch
    slots: Int32s
    q_lens: Int32s
    places: Int32s


class Halves:
    """Cuts such steps in two, of which each of ``attentions`` plans one. ``adapted``: None where no row has
    an adapter."""

    def __init__(self, attentions: tuple[Attention, Attention], adapted: AdaptedRows | None = None) -> None:
        self._attentions, self._adapted = attentions, adapted

    def takes(self, q_lens: Int32s) -> bool:
        """Whether a step with rows of these lengths is cut; none is in a rehearsal."""
        return not under_way() and int(q_lens.sum()) > WHOLE and int(q_lens.max()) > 1

    def hand_on(self, forward: RecordedForward, columns: Columns, extend: Extend) -> None:
        """Of a stage that is not the last."""
        self._run(forward, self._cut(columns, extend)[1], None)

    def hidden(
        self, forward: RecordedForward, columns: Columns, wanted: Int32s | None, extend: Extend
    ) -> Tensor:
        """The final hidden states of the tokens ``wanted`` int32[S] of the step, or of all. Rows are in the
        plan's order, in which one may read what another one before it stores."""
        bounds, cuts = self._cut(columns, extend)
        if wanted is None:
            found = self._run(forward, cuts, None)
            return torch.cat([hidden[upload(cut.places).long()] for hidden, cut in zip(found, cuts)])
        inside = [(wanted >= first) & (wanted < end) for first, end in bounds]
        local = [
            cut.places[np.where(own, wanted - first, 0)] for cut, own, (first, _) in zip(cuts, inside, bounds)
        ]
        found = self._run(forward, cuts, local)
        second = upload(inside[1].astype(np.int32))
        return torch.where(second[:, None] > 0, found[1], found[0])

    def _cut(self, columns: Columns, extend: Extend) -> tuple[list[tuple[int, int]], list[Cut]]:
        """The tokens of each, from and to, and what it is."""
        total = int(columns.q_lens.sum())
        middle = min(-(-total // (2 * TILE)) * TILE, total - 1)
        bounds = [(0, middle), (middle, total)]
        parts = [between(columns, *run) for run in bounds]
        return bounds, [_batch(*each, extend) for each in zip(parts, self._attentions)]

    def _run(self, forward: RecordedForward, cuts: list[Cut], wanted: list[Int32s] | None) -> list[Tensor]:
        rows: Sequence[Tensor | None] = [None, None] if wanted is None else upload_columns(wanted)
        placed: list[Placed | None] = [None, None]
        if self._adapted is not None and self._adapted.rows.active:
            sampled = [np.zeros(1, np.int32)] * 2 if wanted is None else wanted
            placed = [self._adapted.placed(cut.slots, cut.q_lens, at) for cut, at in zip(cuts, sampled)]
        batches = [cut.batch for cut in cuts]
        return forward.halves(list(map(Half, batches, rows, self._attentions, placed)))


def _batch(part: Columns, attention: Attention, extend: Extend) -> Cut:
    """Its rows are in the order of an eager step."""
    order = eager_order(part.starts, part.q_lens)
    slots, starts, q_lens = (column[order] for column in part[:3])
    units = None if part.states is None else part.states.ordered(order)
    batch = extend(slots, starts, q_lens, units, attention=attention)
    moved = np.empty_like(q_lens)
    moved[order] = q_lens.cumsum() - q_lens
    moved -= part.q_lens.cumsum() - part.q_lens
    places = np.arange(batch.tokens, dtype=np.int32) + np.repeat(moved, part.q_lens)
    return Cut(batch, slots, q_lens, places)

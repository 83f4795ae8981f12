"""Steps on a GPU that are two batches, whose layers take turns: see ``kernels/gpu/aside.py``. They are
launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sgla.attention import Attention, DeviceBatch
from sgla.kernels.gpu import RecordedForward
from sgla.kernels.gpu.program import Half
from sgla.kernels.rehearsal import under_way
from sgla.worker.batch import Columns, between, eager_order
from sgla.worker.device_state import upload, upload_columns
from sgla.worker.state import Int32s

WHOLE = 2048  # tokens up to which a step is one batch
TILE = 256  # of a step is cut at a multiple of so many tokens


class Halves:
    """Cuts such steps in two, of which each of ``attentions`` plans one."""

    def __init__(self, attentions: tuple[Attention, Attention]) -> None:
        self._attentions = attentions

    def takes(self, q_lens: Int32s) -> bool:
        """Whether a step with rows of these lengths is cut; none is in a rehearsal."""
        return not under_way() and int(q_lens.sum()) > WHOLE and int(q_lens.max()) > 1

    def hidden(
        self,
        forward: RecordedForward,
        columns: Columns,
        wanted: Int32s | None,
        extend: Callable[..., DeviceBatch],
    ) -> Tensor:
        """The final hidden states of the tokens ``wanted`` int32[S] of the step, or of all. Rows are in the
        plan's order, in which one may read what another one before it stores. ``extend``: makes a batch of
        slots, starts, lengths and states for an attention."""
        total = int(columns.q_lens.sum())
        middle = min(-(-total // (2 * TILE)) * TILE, total - 1)
        bounds = (0, middle), (middle, total)
        parts = [between(columns, *run) for run in bounds]
        batches, places = zip(*(_batch(*each, extend) for each in zip(parts, self._attentions)))
        if wanted is None:
            rows: list[Tensor] | list[None] = [None, None]
        else:
            inside = [(wanted >= first) & (wanted < end) for first, end in bounds]
            local = [
                place[np.where(own, wanted - first, 0)]
                for place, own, (first, _) in zip(places, inside, bounds)
            ]
            *rows, second = upload_columns([*local, inside[1].astype(np.int32)])
        found = forward.halves(list(map(Half, batches, rows, self._attentions)))
        if wanted is None:
            return torch.cat([hidden[upload(place).long()] for hidden, place in zip(found, places)])
        return torch.where(second[:, None] > 0, found[1], found[0])


def _batch(
    part: Columns, attention: Attention, extend: Callable[..., DeviceBatch]
) -> tuple[DeviceBatch, Int32s]:
    """Also where each of its tokens is in the batch, whose rows are in the order of an eager step."""
    order = eager_order(part.starts, part.q_lens)
    slots, starts, q_lens = (column[order] for column in part[:3])
    units = None if part.states is None else part.states.ordered(order)
    batch = extend(slots, starts, q_lens, units, attention=attention)
    moved = np.empty_like(q_lens)
    moved[order] = q_lens.cumsum() - q_lens
    moved -= part.q_lens.cumsum() - part.q_lens
    return batch, np.arange(batch.tokens, dtype=np.int32) + np.repeat(moved, part.q_lens)

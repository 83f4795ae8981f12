"""Steps on a GPU whose tokens several ranks share out, which have the same weights and KV cache: see
``context.py``. They are launched kernel by kernel; others are computed by each rank alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sgla.attention import DeviceBatch
from sgla.dist.context import Context
from sgla.kernels.batch import Divided
from sgla.kernels.gpu import GpuOps, RecordedForward
from sgla.kernels.gpu.ops import Attend
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.rehearsal import under_way
from sgla.worker.batch import Columns, eager_order
from sgla.worker.context import bring, part_of, shares
from sgla.worker.device_state import DeviceTables, aligned, upload, upload_columns
from sgla.worker.state import Int32s

LEAST = 256  # tokens of a rank from which on a step is shared out


class Divides:
    """Shares such steps out. ``tables``: of all rows; ``extend``: makes a batch of slots, starts and
    lengths; ``ops``: of the model."""

    def __init__(
        self, tables: DeviceTables, context: Context, extend: Callable[..., DeviceBatch], ops: GpuOps
    ) -> None:
        self._tables, self._context, self._extend, self._ops = tables, context, extend, ops

    def takes(self, q_lens: Int32s) -> bool:
        """Whether a step with rows of these lengths is shared out; none is in a rehearsal."""
        return not under_way() and int(q_lens.sum()) >= LEAST * self._context.size and int(q_lens.max()) > 1

    def share_of(self, q_lens: Int32s) -> int:
        """Tokens of a step with rows of these lengths that this rank computes, if it is no graph."""
        total = int(q_lens.sum())
        if not self.takes(q_lens):
            return total
        return sum(map(len, shares(total, self._context.size)[self._context.rank]))

    def _batch(self, columns: Columns) -> DeviceBatch:
        """This rank's part of a step."""
        total = int(columns.q_lens.sum())
        parts = [_part(columns, own) for own in shares(total, self._context.size)]
        where = self._places(columns, total)
        places = [where[..., upload(tokens).long()] for _, tokens in parts]
        own, tokens = parts[self._context.rank]
        batch = self._extend(own.slots, own.starts, own.q_lens)
        mine = upload(tokens).long()
        batch.divided = Divided(places, mine, mine, total)
        return batch

    def _places(self, columns: Columns, total: int) -> Tensor:
        """``out_loc`` of all tokens."""
        q_start = np.zeros(len(columns.slots) + 1, np.int32)
        np.cumsum(columns.q_lens, out=q_start[1:])
        slots, starts, first = upload_columns([columns.slots, columns.starts, q_start])
        groups = len(self._tables.windows)
        room, longest = aligned(2 + groups, total), int(columns.q_lens.max())
        where = room[2:] if groups > 1 else room[2]
        self._tables.prepare_extend(slots, starts, first, longest, room[0], room[1], where)
        return where

    def hand_on(self, forward: RecordedForward, columns: Columns) -> None:
        """Of a stage that is not the last."""
        with self._ops.attending(Brings(self._context, self._ops.attend)):
            forward.hidden(self._batch(columns))

    def hidden(self, forward: RecordedForward, columns: Columns, wanted: Int32s | None) -> Tensor:
        """The final hidden states of the tokens ``wanted`` int32[S] of the step, or of all, the same on every
        rank."""
        batch = self._batch(columns)
        context, divided, rows = self._context, batch.divided, None
        assert divided is not None
        if wanted is not None:
            here = torch.full((divided.count,), -1, dtype=torch.int32, device=divided.rows.device)
            here[divided.rows] = torch.arange(len(divided.rows), dtype=torch.int32, device=here.device)
            rows = here[upload(wanted).long()]
        with self._ops.attending(Brings(context, self._ops.attend)):
            hidden = forward.hidden(batch, None if rows is None else rows.clamp(min=0))
        if rows is None:
            return context.join(hidden, divided.rows, divided.count)
        return context.sum(torch.where((rows >= 0)[:, None], hidden, 0))


class Brings:
    """Attention that first gets what the other ranks have of the step."""

    def __init__(self, context: Context, attend: Attend) -> None:
        self._context, self._attend = context, attend

    @property
    def in_place(self) -> bool:
        return self._attend.in_place

    def __call__(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        assert batch.divided is not None
        bring(self._context, kv, batch.divided)
        return self._attend(q, kv, batch, scoring)


def _part(columns: Columns, own: list[range]) -> tuple[Columns, Int32s]:
    """The rows of a rank's tokens in the order of an eager step, and which tokens of the step these are."""
    part, _ = part_of(columns, own)
    mine = np.concatenate([np.arange(run.start, run.stop) for run in own])
    tokens = np.split(mine, part.q_lens.cumsum()[:-1])
    order = eager_order(part.starts, part.q_lens)
    rows = Columns(part.slots[order], part.starts[order], part.q_lens[order], part.logits)
    return rows, np.concatenate([tokens[row] for row in order]).astype(np.int32)

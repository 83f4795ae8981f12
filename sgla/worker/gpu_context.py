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
from sgla.worker.target_hidden import TargetHidden

LEAST = 256  # tokens of a rank from which on a step is shared out


Extend = Callable[..., DeviceBatch]  # makes a batch of slots, starts and lengths


class Divides:
    """Shares such steps out. ``tables``: of all rows; ``ops``: of the model. Where rows may ``guess``, the
    device alone knows where these begin: so all sets compute the rows of one token, which are the first then.
    ``kept``: hidden states of the model, of which each set keeps those of all."""

    def __init__(
        self, tables: DeviceTables, context: Context, ops: GpuOps, guess: bool, kept: TargetHidden | None
    ) -> None:
        self._tables, self._context, self._ops, self._guess, self._kept = tables, context, ops, guess, kept

    def takes(self, q_lens: Int32s) -> bool:
        """Whether a step with rows of these lengths is shared out; none is in a rehearsal."""
        shared = int(q_lens.sum()) - self._alike(q_lens)
        return not under_way() and shared >= LEAST * self._context.size and int(q_lens.max()) > 1

    def share_of(self, q_lens: Int32s) -> int:
        """Tokens of a step with rows of these lengths that this rank computes, if it is no graph."""
        total, alike = int(q_lens.sum()), self._alike(q_lens)
        if not self.takes(q_lens):
            return total
        return alike + sum(map(len, shares(total - alike, self._context.size)[self._context.rank]))

    def _alike(self, q_lens: Int32s) -> int:
        """Rows that all sets compute."""
        return int((q_lens == 1).sum()) if self._guess else 0

    def _batch(self, columns: Columns, extend: Extend) -> DeviceBatch:
        """This rank's part of a step. What all sets compute is that of the first one."""
        context, alike, total = self._context, self._alike(columns.q_lens), int(columns.q_lens.sum())
        slots, starts, q_lens = (column[alike:] for column in columns[:3])
        rest = Columns(slots, starts, q_lens, columns.logits)
        parts = [_part(rest, own) for own in shares(total - alike, context.size)]
        where = self._places(rest, total - alike)
        places = [where[..., upload(tokens).long()] for _, tokens in parts]
        own, tokens = parts[context.rank]
        batch = extend(*(np.concatenate([all[:alike], part]) for all, part in zip(columns[:3], own)))
        first = np.arange(0 if context.rank else alike)
        mine = upload(np.concatenate([first, tokens + alike]).astype(np.int32)).long()
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

    def hand_on(self, forward: RecordedForward, columns: Columns, extend: Extend) -> None:
        """Of a stage that is not the last."""
        with self._ops.attending(Brings(self._context, self._ops.attend)):
            forward.hidden(self._batch(columns, extend))

    def hidden(
        self, forward: RecordedForward, columns: Columns, wanted: Int32s | None, extend: Extend
    ) -> Tensor:
        """The final hidden states of the tokens ``wanted`` int32[S] of the step, or of all, the same on every
        rank."""
        batch = self._batch(columns, extend)
        context, divided, rows = self._context, batch.divided, None
        assert divided is not None
        own = slice(batch.tokens - len(divided.rows), batch.tokens)  # of the batch
        if wanted is not None:
            here = torch.full((divided.count,), -1, dtype=torch.int32, device=divided.rows.device)
            here[divided.rows] = torch.arange(own.start, own.stop, dtype=torch.int32, device=here.device)
            rows = here[upload(wanted).long()]
        with self._ops.attending(Brings(context, self._ops.attend)):
            hidden = forward.hidden(batch, None if rows is None else rows.clamp(min=0))
        if self._kept is not None:
            latest, alike = self._kept.latest, self._alike(columns.q_lens)
            latest[: divided.count] = context.join(latest[own], divided.rows, divided.count)
            self._kept.keep(batch.slots[:alike], batch.positions[:alike])
        if rows is None:
            return context.join(hidden[own], divided.rows, divided.count)
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

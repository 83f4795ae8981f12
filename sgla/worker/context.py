"""Steps whose tokens several ranks share out, which have the same weights and KV cache (``dist/context.py``).

A rank computes its own tokens. Before a layer attends it gets what the others have just stored, so that its
cache has the tokens of all. Steps with few tokens are computed as they are, by each rank alike.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sgla.dist.context import Context
from sgla.kernels import ops
from sgla.kernels.batch import Divided, ForwardBatch
from sgla.kernels.dispatch import Op, using
from sgla.kernels.expert_counts import uncounted
from sgla.kernels.ops import KVLayer, Layer
from sgla.model.base import CausalLM
from sgla.worker.batch import Columns, build
from sgla.worker.features import threads
from sgla.worker.forward import Forward, KeptHidden
from sgla.worker.state import Int32s, SlotTables

R = TypeVar("R")
LEAST = 16  # tokens of a rank from which on a step with prompts is shared out


def shares(tokens: int, size: int) -> list[list[range]]:
    """The tokens of each rank, of so many: two runs, from both ends of the step, so that all attend to about
    as much."""
    bounds = [i * tokens // (2 * size) for i in range(2 * size + 1)]
    runs = [range(*pair) for pair in pairwise(bounds)]
    return [[runs[rank], runs[2 * size - 1 - rank]] for rank in range(size)]


def part_of(columns: Columns, own: list[range]) -> tuple[Columns, Int32s]:
    """The rows of these tokens, and which of the tokens with logits are among them."""
    ends = np.cumsum(columns.q_lens)
    first, slots, starts, q_lens, logits, which, base = ends - columns.q_lens, [], [], [], [], [], 0
    for run in own:
        begin, end = np.maximum(first, run.start), np.minimum(ends, run.stop)
        here = np.flatnonzero(end > begin)
        slots.append(columns.slots[here])
        starts.append((columns.starts + begin - first)[here])
        q_lens.append((end - begin)[here])
        inside = np.flatnonzero((columns.logits >= run.start) & (columns.logits < run.stop))
        logits.append(columns.logits[inside] - run.start + base)
        which.append(inside)
        base += len(run)
    columns = Columns(_joined(slots), _joined(starts), _joined(q_lens), _joined(logits))
    return columns, _joined(which)


def _joined(parts: list[Any]) -> Int32s:
    return np.concatenate(parts).astype(np.int32)


class ContextForward:
    """A forward pass that is ``plain`` for steps that are not shared out. Batches of others are made by
    ``batch``. ``kept`` and ``hook``: see ``make_forward``; ``hands_on``: another stage has the layers
    behind."""

    def __init__(
        self,
        plain: Forward,
        model: CausalLM,
        kv: list[Layer],
        context: Context,
        tables: SlotTables,
        kept: KeptHidden | None,
        count: int,
        hook: Callable[[Tensor], None] | None = None,
        hands_on: bool = False,
    ) -> None:
        self._plain, self._model, self._kv, self._context = plain, model, kv, context
        self._tables, self._kept, self._count, self._hook = tables, kept, count, hook
        self._hands_on = hands_on

    def batch(self, columns: Columns) -> ForwardBatch:
        """The tensors of a step, or of this rank's part of it."""
        size, whole = self._context.size, build(columns, self._tables)
        if whole.tokens < LEAST * size or whole.rows == whole.tokens:
            return whole
        every = shares(whole.tokens, size)
        places = [torch.cat([whole.out_loc[:, run.start : run.stop] for run in own], 1) for own in every]
        own, which = part_of(columns, every[self._context.rank])
        batch = build(own, self._tables)
        tokens = torch.cat([torch.arange(run.start, run.stop) for run in every[self._context.rank]])
        batch.divided = Divided(places, tokens, torch.from_numpy(which).long(), len(columns.logits))
        return batch

    def __call__(self, batch: ForwardBatch) -> Tensor:
        counts = self._model.counts
        if batch.divided is None:
            with uncounted(counts, self._context.rank > 0):
                return self._plain(batch)
        with threads(self._count), using(_Exchanging(self._context, batch.divided)):
            if self._hands_on:
                return self._model.forward(batch, self._kv)
            if self._hook is not None:  # the last layer sees all tokens, too
                hidden = ops.tap(self._hook, self._model.forward(batch, self._kv))[batch.sample_rows]
            else:
                hidden = self._model.forward(batch, self._kv, batch.sample_rows)
            hidden = self._context.join(hidden, batch.divided.rows, batch.divided.count)
            if self._kept is not None:
                self._kept.keep(hidden)
            return self._model.logits(hidden)


class _Exchanging:
    """Has attention, and who is shown hidden states, see the tokens of all ranks."""

    def __init__(self, context: Context, divided: Divided) -> None:
        self._context, self._divided = context, divided

    def run(self, op: Op[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if op is ops.attention:
            bring(self._context, args[1], self._divided)
        if op is ops.tap:
            show, x = args
            show(self._context.join(x, self._divided.tokens, self._divided.total))
            return x
        return op.body(*args, **kwargs)


def bring(context: Context, kv: KVLayer, divided: Divided) -> None:
    """Store what the other ranks have of a layer's tokens of the step."""
    where = [ops.places(kv, out_loc) for out_loc in divided.places]
    tensors = [kv.k] if kv.shared or not kv.v.numel() else [kv.k, kv.v]
    tensors = [tensor.view(torch.uint8) for tensor in tensors]
    scales = [scale for scale in (kv.k_scales, kv.v_scales) if scale is not None]
    own = where[context.rank]
    kept = [tensor[own].flatten(1) for tensor in tensors]
    kept += [scale[own[0], :, own[1]].contiguous().view(torch.uint8) for scale in scales]
    sent = torch.cat(kept, 1)
    for rank, got in enumerate(context.gather(sent, [len(pages) for pages, _ in where])):
        if rank == context.rank:
            continue
        pages, offsets = where[rank]
        parts = got.split([x.shape[1] for x in kept], 1)
        for tensor, part in zip(tensors, parts):
            tensor[pages, offsets] = part.view(len(part), *tensor.shape[2:])
        for scale, part in zip(scales, parts[len(tensors) :]):
            scale[pages, :, offsets] = part.contiguous().view(scale.dtype)

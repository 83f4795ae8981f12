"""Attention to tables of what requests hear: see ``layers/cross_attention.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import op


@op(like="q")
def cross_attention(q: Tensor, keys: Tensor, values: Tensor, batch: ForwardBatch, scale: float) -> Tensor:
    """Each token sees all that its request's slot has: q [T, H * hd]; keys and values [slots, H, N, hd] ->
    [T, H * hd]."""
    starts, seen = batch.q_start.tolist(), torch.empty_like(q)
    fill(seen, q, keys, values, zip(batch.slots.tolist(), starts, starts[1:]), scale)
    return seen


def fill(
    seen: Tensor, q: Tensor, keys: Tensor, values: Tensor, rows: Iterable[tuple[int, int, int]], scale: float
) -> None:
    """``rows``: slots, first tokens and ends."""
    for slot, first, end in rows:
        queries = q[first:end].unflatten(1, (keys.shape[1], -1)).transpose(0, 1).to(keys.dtype)
        made = F.scaled_dot_product_attention(queries, keys[slot], values[slot], scale=scale)
        seen[first:end] = made.transpose(0, 1).flatten(1)


def on_gpu(q: Tensor, keys: Tensor, values: Tensor, batch: Any, scale: float) -> Tensor:
    """``cross_attention`` for a batch that lies on a GPU, which is not waited for: what rows of one token see
    is brought together, others go one by one."""
    seen, ones = torch.empty_like(q), batch.decode_rows
    if ones:
        slots = batch.slots[:ones].long()
        queries = q[:ones].view(ones, keys.shape[1], 1, -1).to(keys.dtype)
        made = F.scaled_dot_product_attention(queries, keys[slots], values[slots], scale=scale)
        seen[:ones] = made.flatten(1)
    if batch.extend is not None:
        ends = ones + batch.extend.q_lens.cumsum()
        rows = zip(batch.extend.slots.tolist(), (ends - batch.extend.q_lens).tolist(), ends.tolist())
        fill(seen, q, keys, values, rows, scale)
    return seen

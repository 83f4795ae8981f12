"""Attention to tokens that an indexer picks (DSA, arXiv 2512.02556): the ops and their bodies. On GPUs:
``kernels/triton/picking.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import op
from sgla.kernels.ops import KVLayer

NUMBERS = 1 << 25  # that a body has at a time


class RowSpan(NamedTuple):
    """Some tokens of a row, ``start`` to ``end`` of the step; its ``pages``, and how many tokens it has."""

    start: int
    end: int
    pages: Tensor
    length: int


def spans(batch: ForwardBatch, kv: KVLayer) -> list[RowSpan]:
    """Of each row."""
    starts, lengths = batch.q_start.tolist(), batch.kv_len.tolist()
    table, size = batch.pages(kv.group), kv.k.shape[1]
    return [
        RowSpan(starts[r], starts[r + 1], table[slot, : -(-lengths[r] // size)].long(), lengths[r])
        for r, slot in enumerate(batch.slots[: batch.rows].tolist())
    ]


def few(start: int, end: int, each: int) -> Iterator[slice]:
    """The tokens in parts that have ``NUMBERS`` at most, where a token has ``each``."""
    step = max(1, NUMBERS // each)
    return (slice(at, min(at + step, end)) for at in range(start, end, step))


def _picks(q: Tensor, key: Tensor, weights: Tensor, kv: KVLayer, batch: ForwardBatch, most: int) -> Tensor:
    return torch.empty(q.shape[0], most, dtype=torch.int32, device=q.device)


@op(like=_picks)
def pick(q: Tensor, key: Tensor, weights: Tensor, kv: KVLayer, batch: ForwardBatch, most: int) -> Tensor:
    """The tokens of its row that each token is to read: int32 ``[T, most]``, -1 behind them where there are
    fewer. q ``[T, H, i]``, key ``[T, i]``, which goes to the pages of v, weights float32 ``[T, H]``: a
    token's score is the sum of each head's positive products, weighted; of equals the earliest counts,
    however a prompt is cut."""
    kv.put_values(key[:, None], ops.places(kv, batch.out_loc))
    found = q.new_full((q.shape[0], most), -1, dtype=torch.int32)
    for start, end, pages, length in spans(batch, kv):
        keys = kv.values(pages).flatten(0, 2)[:length]
        places = torch.arange(length, device=q.device)
        for part in few(start, end, length * q.shape[1]):
            products = torch.einsum("thi,ni->thn", q[part].float(), keys).relu()
            scores = torch.einsum("thn,th->tn", products, weights[part])
            scores = scores.masked_fill(places > batch.positions[part, None], float("-inf"))
            chosen = best(scores, most)
            found[part, : chosen.shape[1]] = chosen
    return found


def best(scores: Tensor, most: int) -> Tensor:
    """int32 ``[T, most]``, or fewer: the places in scores ``[T, N]`` that have the highest, of equals the
    earliest first; -1 for those of minus infinity."""
    ranked = scores.sort(stable=True, dim=-1, descending=True)
    return torch.where(ranked.values == float("-inf"), -1, ranked.indices)[:, :most].to(torch.int32)


def _seen(q: Tensor, kv: KVLayer, *_: Any, **__: Any) -> Tensor:
    return ops.outcome(q, kv)


@op(like=_seen)
def picked_attention(
    q: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    scale: float,
    picked: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all heads to one key of each of the tokens ``picked`` int32 ``[T, most]``: q ``[T, Hq *
    hd]`` -> ``[T, Hq * vd]``. ``sinks``: as in ``ops.attention``."""
    out, dim, most = ops.outcome(q, kv), kv.k.shape[3], picked.shape[1]
    for start, end, pages, length in spans(batch, kv):
        keys, values = (x.flatten(0, 2)[:length] for x in (kv.keys(pages), kv.values(pages)))
        count = min(most, length)
        for part in few(start, end, count * (2 * dim + q.shape[1] // dim)):
            chosen = picked[part, :count].long()
            absent, at = (chosen < 0)[:, None], chosen.clamp(min=0)
            seen, read = keys[at], values[at]
            scores = q[part].unflatten(1, (-1, dim)).float() @ seen.transpose(1, 2) * scale
            scores = scores.masked_fill(absent, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None].expand(len(scores), -1, 1)], 2)
            shares = scores.softmax(-1)[..., :count]
            odd = ~read.isfinite().all(-1) & (chosen >= 0)  # as a wrong guess may be
            result = shares @ read.masked_fill(odd[..., None] | absent.transpose(1, 2), 0.0)
            result = result.masked_fill(odd.any(1)[:, None, None], torch.nan)
            out[part] = result.flatten(1).to(q.dtype)
    return out

"""Attention to a window and to entries that are made of several tokens each (DeepSeek V4): the ops and their
bodies. On GPUs: ``kernels/triton/compressed.py``.

A layer has pages of two cache groups: ``own`` of its window, whose v is what tokens give to entries, and
``entries`` of all tokens. An entry and its scored key, which is v there, lie at the places of the last tokens
that it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import op
from sgla.kernels.ops import KVLayer
from sgla.kernels.picking import best, few, spans


class Places(NamedTuple):
    """Entry n is made of the tokens from ``n * rate`` on and lies at the places of the last ``together`` of
    these, which share a page."""

    rate: int
    together: int

    def of(self, n: Tensor) -> Tensor:
        """Which entries of n are, where a row's pages are cut into as many as there is room for."""
        return (n + 1) * (self.rate // self.together) - 1


@dataclass(frozen=True, eq=False)
class Making:
    """How entries of ``dim`` values are made. A token gives values, of one or two ``series``, and as many
    logits, from column ``first`` on; ``bias`` float32 ``[rate, series * dim]`` is added to these. Of each dim
    an entry is the tokens' values, weighted with a softmax of their logits; of two series it takes the last
    of its own tokens and the first of those of the entry before. It has an RMSNorm with ``norm``
    float32[dim], and is rotated by ``cos_sin`` as its first token is."""

    bias: Tensor
    norm: Tensor
    eps: float
    cos_sin: Tensor
    first: int
    series: int

    @property
    def dim(self) -> int:
        return self.norm.shape[0]

    def __call__(self, given: Tensor, before: Tensor, n: Tensor) -> Tensor:
        """float32 ``[N, dim]``, of what the tokens of the entries n int64[N] give, and those of the entries
        before them, which the first of a text does not have: ``[N, rate, *]``."""
        values, logits = self._parts(given)
        if self.series == 2:
            earlier, their_logits = (x[..., : self.dim] for x in self._parts(before))
            begins = (n == 0)[:, None, None]
            values = torch.cat([earlier.masked_fill(begins, 0.0), values[..., self.dim :]], 1)
            their_logits = their_logits.masked_fill(begins, float("-inf"))
            logits = torch.cat([their_logits, logits[..., self.dim :]], 1)
        made = ops.rms_norm.body((values * logits.softmax(1)).sum(1), self.norm, self.eps)
        return ops.rotate(made[:, None], n * self.bias.shape[0], self.cos_sin)[:, 0]

    def _parts(self, given: Tensor) -> tuple[Tensor, Tensor]:
        width = self.series * self.dim
        values, logits = given[..., self.first : self.first + 2 * width].float().split(width, -1)
        return values, logits + self.bias


def _counts(key: Tensor, *_: Any) -> Tensor:
    return torch.empty(key.shape[0], dtype=torch.int32, device=key.device)


@op(like=_counts)
def compress(
    key: Tensor,
    given: Tensor | None,
    own: KVLayer,
    entries: KVLayer | None,
    batch: ForwardBatch,
    places: Places,
    makings: tuple[Making, ...],
) -> Tensor:
    """Keep the tokens' ``key`` ``[T, hd]`` and what they give ``[T, *]``, and make the entries of which they
    are the last tokens, and their scored keys if there are two ``makings``. Returns int32[T], how many
    entries each token may read."""
    where = ops.places(own, batch.out_loc)
    own.put_keys(key[:, None], where)
    if given is None or entries is None:
        return torch.zeros_like(batch.positions)
    own.put_values(given[:, None], where)
    for (start, end, pages, length), row in zip(spans(batch, own), spans(batch, entries)):
        first = (length - (end - start)) // places.rate
        n = torch.arange(first, length // places.rate, device=key.device)
        if len(n):
            _make(n, own, pages, entries, row.pages, places, makings)
    return torch.div(batch.positions + 1, places.rate, rounding_mode="floor").to(torch.int32)


def _make(
    n: Tensor,
    own: KVLayer,
    pages: Tensor,
    entries: KVLayer,
    entry_pages: Tensor,
    places: Places,
    makings: tuple[Making, ...],
) -> None:
    """Make entries n int64[N] of a row, of which none is left out, and store them."""
    (rate, together), size = places, own.k.shape[1]
    begin = max(0, int(n[0]) - makings[0].series + 1) * rate // size
    read = own.values(pages[begin : -(-(int(n[-1]) + 1) * rate // size)]).flatten(0, 2)
    tokens = n[:, None] * rate + torch.arange(rate, device=n.device) - begin * size
    at = (n + 1)[:, None] * rate - together + torch.arange(together, device=n.device)
    where = entry_pages[at // size].flatten(), (at % size).flatten()
    for making, put in zip(makings, (entries.put_keys, entries.put_values)):
        made = making(read[tokens], read[(tokens - rate).clamp(min=0)], n)
        put(made.reshape(len(n) * together, 1, -1), where)


def _picks(
    q: Tensor, weights: Tensor, entries: KVLayer, batch: ForwardBatch, counts: Tensor, most: int, *_: Any
) -> Tensor:
    return torch.empty(q.shape[0], most, dtype=torch.int32, device=q.device)


@op(like=_picks)
def pick_entries(
    q: Tensor,
    weights: Tensor,
    entries: KVLayer,
    batch: ForwardBatch,
    counts: Tensor,
    most: int,
    places: Places,
) -> Tensor:
    """The entries that each token is to read, of the first ``counts`` int32[T] of its row: int32 ``[T,
    most]``, as ``picking.pick`` picks tokens. q ``[T, H, i]``, weights float32 ``[T, H]``."""
    found = q.new_full((q.shape[0], most), -1, dtype=torch.int32)
    for start, end, pages, length in spans(batch, entries):
        n = torch.arange(length // places.rate, device=q.device)
        if not len(n):
            continue
        keys = entries.values(pages).reshape(-1, q.shape[2])[places.of(n)]
        for part in few(start, end, len(n) * q.shape[1]):
            products = torch.einsum("thi,ni->thn", q[part].float(), keys).relu()
            scores = torch.einsum("thn,th->tn", products, weights[part])
            chosen = best(scores.masked_fill(n >= counts[part, None], float("-inf")), most)
            found[part, : chosen.shape[1]] = chosen
    return found


def _seen(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty(q.shape)


@op(like=_seen)
def compressed_attention(
    q: Tensor,
    own: KVLayer,
    entries: KVLayer | None,
    batch: ForwardBatch,
    scale: float,
    window: int,
    sinks: Tensor,
    counts: Tensor,
    places: Places,
    picked: Tensor | None = None,
) -> Tensor:
    """What each token sees of the ``window`` tokens up to itself and of its first ``counts`` int32[T]
    entries, or of those ``picked`` int32 ``[T, most]``: one key for all heads, which is the value, too. q
    ``[T, Hq * hd]`` -> the same. ``sinks``: as in ``ops.attention``."""
    out, dim, size = q.new_empty(q.shape), own.k.shape[3], own.k.shape[1]
    rows = spans(batch, own)
    beside = rows if entries is None else spans(batch, entries)
    for (start, end, pages, length), row in zip(rows, beside):
        begin = max(0, length - (end - start) - window + 1) // size
        near = own.keys(pages[begin:]).flatten(0, 2)
        made, n = near[:0], torch.arange(0, device=q.device)
        if entries is not None:
            n = torch.arange(length // places.rate, device=q.device)
            made = entries.keys(row.pages).reshape(-1, dim)[places.of(n)]
        most = len(n) if picked is None else min(len(n), picked.shape[1])
        for part in few(start, end, (window + most) * (2 * dim + q.shape[1] // dim)):
            at = batch.positions[part, None].long() - torch.arange(window, device=q.device)
            which = n.expand(len(at), -1) if picked is None else picked[part, :most].long()
            absent = torch.cat([at < 0, (which < 0) | (which >= counts[part, None])], 1)
            read = torch.cat([near[(at - begin * size).clamp(min=0)], made[which.clamp(min=0)]], 1)
            out[part] = _weighed(q[part].unflatten(1, (-1, dim)), read, absent, scale, sinks)
    return out


def _weighed(q: Tensor, read: Tensor, absent: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """q ``[T, Hq, hd]``, what each token reads ``[T, N, hd]`` and what of that is not there ``[T, N]`` ->
    ``[T, Hq * hd]``."""
    odd = ~read.isfinite().all(-1) & ~absent  # as a wrong guess may be
    read = read.masked_fill((odd | absent)[..., None], 0.0)
    scores = (q.float() @ read.transpose(1, 2) * scale).masked_fill(absent[:, None], float("-inf"))
    shares = torch.cat([scores, sinks[:, None].expand(len(q), -1, 1)], -1).softmax(-1)
    result = (shares[..., :-1] @ read).masked_fill(odd.any(1)[:, None, None], torch.nan)
    return result.flatten(1).to(q.dtype)

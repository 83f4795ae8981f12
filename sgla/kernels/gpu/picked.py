"""Attention to picked tokens on a GPU. What is picked is the page table of a cache whose pages have one
token, so the decode kernel of latent attention reads it, of prompts as well: each token is a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.device import this_device
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import latent, picking
from sgla.kernels.triton.attention import splits_for

RANKS = 1 << 25  # of tokens and places in their histories, at a time


class Histories(NamedTuple):
    """Of each token of a step: int32[T], its slot and how many tokens it sees; ``most``: no token sees more,
    as far as the host can tell."""

    slots: Tensor
    lengths: Tensor
    most: int


def histories(batch: Any, table: Tensor) -> Histories:
    slots, lengths = batch.slots[: batch.rows], batch.positions[: batch.tokens] + 1
    if batch.extend is None:
        return Histories(slots, lengths, table.shape[1] * batch.page_size)
    n = batch.decode_rows
    counts = torch.cat(
        [torch.ones(n, dtype=torch.int32, device="cpu"), torch.from_numpy(batch.extend.q_lens)]
    )
    counts = counts.to(slots.device, non_blocking=True)
    slots = torch.repeat_interleave(slots, counts, output_size=batch.tokens)
    return Histories(slots, lengths, int(batch.kv_len[: batch.rows].max()))


def pick(q: Tensor, key: Tensor, weights: Tensor, kv: KVLayer, batch: Any, most: int) -> Tensor:
    """See ``kernels.picking.pick``. Of scores in fewer bits other tokens may come first."""
    kv.put_values(key[:, None], ops.places(kv, batch.out_loc))
    table = batch.pages(kv.group)
    slots, lengths, longest = histories(batch, table)
    return picked_places(q, weights, kv.v, table, slots, lengths, longest, most)


def picked_places(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    longest: int,
    most: int,
) -> Tensor:
    """int32 ``[T, most]``, of the first tokens, as many as ``slots``: the places with the highest scores of
    ``lengths`` int32[T], which are ``longest`` at most."""
    found = torch.full((len(q), most), -1, dtype=torch.int32, device=q.device)
    step, count = max(1, RANKS // longest), min(most, longest)
    for at in range(0, len(slots), step):
        part = slice(at, min(at + step, len(slots)))
        ranks = picking.ranks(q[part], weights[part], keys, table, slots[part], lengths[part], longest)
        found[part, :count] = picking.places(ranks.topk(count, dim=1).values)
    return found


def attend(
    q: Tensor, kv: KVLayer, batch: Any, scale: float, picked: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """See ``kernels.picking.picked_attention``."""
    table, (page, token) = batch.pages(kv.group), kv.k.stride()[:2]
    slots, lengths, _ = histories(batch, table)
    rows, size, device = len(slots), kv.k.shape[1], this_device()
    at = picked[:rows].clamp(0, table.shape[1] * size - 1).long()  # of a rehearsal: whatever was there
    assert page % token == 0, "tokens of all pages are at a multiple of the same distance"
    places = table[slots.long()[:, None], at // size].long() * (page // token) + at % size
    dim, end = kv.k.shape[3], (kv.k.shape[0] - 1) * (page // token) + size
    single = kv.k.as_strided((end, 1, 1, dim), (token, token, dim, 1))
    blocks = -(-q.shape[1] // (dim * latent.MOST_HEADS))
    own = torch.arange(rows, dtype=torch.int32, device=q.device)
    return latent.decode(
        q, single, kv.v.shape[3], places.to(torch.int32), own, lengths.clamp(max=picked.shape[1]), scale,
        splits_for(rows, blocks, device.multiprocessors), kv.k_scale, device.shared, sinks,
    )  # fmt: skip

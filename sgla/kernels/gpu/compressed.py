"""Attention to a window and to entries that are made of several tokens each, on a GPU. Each token is a row,
of prompts as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.compressed import Making, Places
from sgla.kernels.device import this_device
from sgla.kernels.gpu.picked import histories, picked_places
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import compressed


def compress(
    key: Tensor,
    given: Tensor | None,
    own: KVLayer,
    entries: KVLayer | None,
    batch: Any,
    places: Places,
    makings: tuple[Making, ...],
) -> Tensor:
    """See ``kernels.compressed.compress``."""
    where = ops.places(own, batch.out_loc)
    own.put_keys(key[:, None], where)
    positions = batch.positions[: batch.tokens]
    if given is None or entries is None:
        return torch.zeros_like(positions)
    own.put_values(given[:, None], where)
    own_table, table = batch.pages(own.group), batch.pages(entries.group)
    slots = histories(batch, own_table).slots
    for making, made in zip(makings, (entries.k, entries.v)):
        compressed.make(own, own_table, made, table, slots, positions[: len(slots)], places, making)
    return torch.div(positions + 1, places.rate, rounding_mode="floor").to(torch.int32)


def pick(
    q: Tensor, weights: Tensor, entries: KVLayer, batch: Any, counts: Tensor, most: int, places: Places
) -> Tensor:
    """See ``kernels.compressed.pick_entries``. An entry's key has the places of all its tokens, so the pages
    are those of as many entries. Of scores in fewer bits other entries may come first."""
    assert places.rate == places.together
    table, size = batch.pages(entries.group), entries.v.shape[1] // places.rate
    seen = histories(batch, table)
    page, token = entries.v.stride()[:2]
    shape, strides = (len(entries.v), size, 1, q.shape[2]), (page, token * places.rate, token, 1)
    assert token * places.rate == q.shape[2], "the places of a page lie behind each other"
    keys = entries.v.as_strided(shape, strides)
    longest = max(1, seen.most // places.rate)
    return picked_places(q, weights, keys, table, seen.slots, counts, longest, most)


def attend(
    q: Tensor,
    own: KVLayer,
    entries: KVLayer | None,
    batch: Any,
    scale: float,
    window: int,
    sinks: Tensor,
    counts: Tensor,
    places: Places,
    picked: Tensor | None = None,
) -> Tensor:
    """See ``kernels.compressed.compressed_attention``."""
    own_table, made = batch.pages(own.group), own if entries is None else entries
    seen = histories(batch, own_table)
    return compressed.attend(
        q, own, own_table, made.k, batch.pages(made.group), picked, sinks, seen.slots,
        batch.positions[: len(seen.slots)], counts, scale, window, places, this_device().shared,
    )  # fmt: skip

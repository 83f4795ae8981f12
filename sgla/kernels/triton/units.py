# mypy: allow-untyped-defs
"""Decode rows cut into chunks of their histories, on the device: see ``prompt_attention.Units``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.cuda.prompt_attention import KEYS, Units
from sgla.kernels.triton.common import next_power_of_2


@triton.jit
def _store4(to, place, a, b, c, d, mask):
    to += place * 4
    tl.store(to, a, mask=mask)
    tl.store(to + 1, b, mask=mask)
    tl.store(to + 2, c, mask=mask)
    tl.store(to + 3, d, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _units(
    slots, kv_len, tiles, parts, merges, rows, CHUNK: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK)
    live = r < rows
    length = tl.load(kv_len + r, mask=live, other=0)
    slot = tl.load(slots + r, mask=live, other=0)
    blocks = tl.cdiv(length, KEYS)
    count = tl.cdiv(blocks, CHUNK)
    full = tl.maximum(count - 1, 0)
    rest = blocks - full * CHUNK  # of the last chunk; 0: an empty row
    several = count > 1
    _store4(merges, r, r, several.to(tl.int32), r * MOST, count, live)
    begin = tl.cumsum(full, 0) - full
    for i in range(MOST - 1):
        there = i < full
        _store4(tiles, begin + i, slot, r, length - 1, 1, there)
        _store4(parts, begin + i, i * CHUNK, i * CHUNK + CHUNK - 1, r * MOST + i, 0, there)
    total = tl.sum(full, 0)
    for i in range(CHUNK):
        there = rest == CHUNK - i
        place = total + tl.cumsum(there.to(tl.int32), 0) - 1
        _store4(tiles, place, slot, r, length - 1, 1, there)
        own = tl.where(several, r * MOST + full, -1)
        _store4(parts, place, full * CHUNK, full * CHUNK + rest - 1, own, 0, there)
        total += tl.sum(there.to(tl.int32), 0)
    for at in range(0, rows * MOST, BLOCK):
        place = at + r
        tl.store(tiles + place * 4 + 3, 0, mask=(place >= total) & (place < rows * MOST))


def units_of(slots: Tensor, kv_len: Tensor, blocks: int, into: Units) -> Units:
    """Those of rows ``slots``, ``kv_len`` int32[R] (0: an empty row) in chunks of ``blocks`` blocks of keys,
    the longest first. ``into``: memory for ``most`` of each row; what is returned is its beginning."""
    rows, most = len(slots), into.most
    _units[(1,)](
        slots, kv_len, into.tiles, into.parts, into.merges, rows, CHUNK=blocks, MOST=most, KEYS=KEYS,
        BLOCK=max(32, next_power_of_2(rows)), num_warps=4,
    )  # fmt: skip
    return Units(into.tiles[: rows * most], into.parts[: rows * most], into.merges[:rows], most)


def room(rows: int, most: int, device: str = "cuda") -> Units:
    """Memory for the units of so many rows."""
    tiles, parts = torch.zeros(2, rows * most, 4, dtype=torch.int32, device=device)
    return Units(tiles, parts, torch.zeros(rows, 4, dtype=torch.int32, device=device), most)

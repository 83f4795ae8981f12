# mypy: allow-untyped-defs
"""What adapters add to a linear layer, onto what it has made: see ``kernels/lora.py``.

First x is *shrunk* to the adapter's rank, then that is *expanded* to the layer's width. Rows of decode steps
have a program each, which reads its own adapter (BGMV of Punica, arXiv 2310.18547): where it lies is read on
the device, so such steps are graphs. Prompts have tiles of tokens of one adapter (SGMV).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.lora import Rows, Stack
from sgla.kernels.triton.common import _begin, _pdl

TILE = 64  # tokens of a prompt that are computed together
RANKS = 4  # that a program of a decode row shrinks to


@triton.jit(do_not_specialize_on_alignment=["places"])
def _shrink(
    x, a, places, inner, k, s_x, R: tl.constexpr, RB: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: some ranks of a part, of one row."""
    _begin(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + row).to(tl.int64)
    if place == 0:
        return
    r = block * RB + tl.arange(0, RB)
    live = r < PARTS * R
    source = a + ((place - 1) * PARTS * R + r)[:, None] * k
    total = tl.zeros((RB, BK), tl.float32)
    for start in range(0, k, BK):
        j = start + tl.arange(0, BK)
        v = tl.load(x + row * s_x + j, mask=j < k, other=0.0).to(tl.float32)
        w = tl.load(source + j[None, :], mask=live[:, None] & (j < k)[None, :], other=0.0).to(tl.float32)
        total += w * v[None, :]
    tl.store(inner + row * PARTS * R + r, tl.sum(total, 1), mask=live)


@triton.jit(do_not_specialize_on_alignment=["places"])
def _expand(
    inner, b, places, ends, y, n, s_y, R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some outputs of one row."""
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    if place == 0:
        return
    first = tl.program_id(1) * BN
    i, r = first + tl.arange(0, BN), tl.arange(0, RP)
    begin, total = 0, tl.zeros((BN,), tl.float32)
    for part in tl.static_range(PARTS):
        end = tl.load(ends + part)
        if (first < end) & (first + BN > begin):
            inside = (i >= begin) & (i < end)
            u = tl.load(inner + (row * PARTS + part) * R + r, mask=r < R, other=0.0)
            source = b + ((place - 1) * n + i)[:, None] * R + r[None, :]
            w = tl.load(source, mask=inside[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(w * u[None, :], 1)
        begin = end
    at = y + row * s_y + i
    tl.store(at, tl.load(at, mask=i < n, other=0.0).to(tl.float32) + total, mask=i < n)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _shrink_tiles(
    x, a, tiles, inner, k, s_x, R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a part of one tile."""
    _begin(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1)
    place = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    m, r = tl.arange(0, BM), tl.arange(0, RP)
    rows = first + m
    source = a + (((place - 1) * PARTS + part) * R + r)[None, :] * k
    total = tl.zeros((BM, RP), tl.float32)
    for start in range(0, k, BK):
        j = start + tl.arange(0, BK)
        v = tl.load(
            x + rows[:, None] * s_x + j[None, :], mask=(m < count)[:, None] & (j < k)[None, :], other=0.0
        )
        w = tl.load(source + j[:, None], mask=(j < k)[:, None] & (r < R)[None, :], other=0.0)
        total = tl.dot(v, w.to(v.dtype), total, input_precision=PRECISION)
    at = inner + (rows[:, None] * PARTS + part) * R + r[None, :]
    tl.store(at, total, mask=(m < count)[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _expand_tiles(
    inner, b, tiles, ends, y, n, s_y, R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some outputs of one tile."""
    _begin(PDL)
    tile, start = tl.program_id(0), tl.program_id(1) * BN
    first, count = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1)
    place = tl.load(tiles + 3 * tile + 2).to(tl.int64)
    m, r, i = tl.arange(0, BM), tl.arange(0, RP), start + tl.arange(0, BN)
    rows = first + m
    begin, total = 0, tl.zeros((BM, BN), tl.float32)
    for part in tl.static_range(PARTS):
        end = tl.load(ends + part)
        if (start < end) & (start + BN > begin):
            inside = (i >= begin) & (i < end)
            at = inner + (rows[:, None] * PARTS + part) * R + r[None, :]
            u = tl.load(at, mask=(m < count)[:, None] & (r < R)[None, :], other=0.0)
            source = b + ((place - 1) * n + i)[None, :] * R + r[:, None]
            w = tl.load(source, mask=inside[None, :] & (r < R)[:, None], other=0.0)
            total = tl.dot(u.to(w.dtype), w, total, input_precision=PRECISION)
        begin = end
    at = y + rows[:, None] * s_y + i[None, :]
    live = (m < count)[:, None] & (i < n)[None, :]
    tl.store(at, tl.load(at, mask=live, other=0.0).to(tl.float32) + total, mask=live)


def embedding(ids: Tensor, stack: Stack, rows: Rows) -> Tensor:
    """What adapters add to the embeddings of ids int32[T]: float32 [T, n]."""
    places = rows.tokens[: len(ids)]
    inner = stack.a[(places - 1).clamp(min=0).long(), 0, :, ids.long()].float()
    y = torch.zeros(len(ids), stack.n, dtype=torch.float32, device=ids.device)
    _expand_rows(y, inner, stack, places)
    return y


def _expand_rows(y: Tensor, inner: Tensor, stack: Stack, places: Tensor) -> None:
    _, parts, rank, _ = stack.a.shape
    padded = max(16, triton.next_power_of_2(rank))
    width = max(32, 4096 // padded)
    _expand[len(y), triton.cdiv(stack.n, width)](
        inner, stack.b, places, stack.bounds, y, stack.n, y.stride(0), R=rank, RP=padded, PARTS=parts,
        BN=width, **_pdl(),
    )  # fmt: skip


def add(y: Tensor, x: Tensor, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """``y + lora(x)`` in the memory of y: x [T, k], y [T, n]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, k = x.shape
    _, parts, rank, _ = stack.a.shape
    inner = torch.empty(tokens, parts * rank, dtype=torch.float32, device=x.device)
    padded = max(16, triton.next_power_of_2(rank))
    pdl = _pdl()
    if rows.tiles is None or sampled:
        places = (rows.sampled if sampled else rows.tokens)[:tokens]
        few = min(RANKS, triton.next_power_of_2(rank))
        block = min(1024, triton.next_power_of_2(k))
        _shrink[tokens, triton.cdiv(parts * rank, few)](
            x, stack.a, places, inner, k, x.stride(0), R=rank, RB=few, PARTS=parts, BK=block, **pdl
        )  # fmt: skip
        _expand_rows(y, inner, stack, places)
        return y
    tiles, precision = rows.tiles, "ieee" if stack.a.dtype == torch.float32 else "tf32"
    width = 64 if padded * stack.a.itemsize <= 512 else 32  # all cards have 99 KiB for a block
    _shrink_tiles[len(tiles), parts](
        x, stack.a, tiles, inner, k, x.stride(0), R=rank, RP=padded, PARTS=parts, BM=TILE, BK=width,
        PRECISION=precision, **pdl,
    )  # fmt: skip
    _expand_tiles[len(tiles), triton.cdiv(stack.n, width)](
        inner, stack.b, tiles, stack.bounds, y, stack.n, y.stride(0), R=rank, RP=padded, PARTS=parts, BM=TILE,
        BN=width, PRECISION=precision, **pdl,
    )  # fmt: skip
    return y

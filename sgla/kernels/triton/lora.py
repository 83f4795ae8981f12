# mypy: allow-untyped-defs
"""What adapters add to a linear layer, onto what it has made: see ``kernels/lora.py``.

First x is *shrunk* to the adapter's rank, then that is *expanded* to the layer's width. Rows of one adapter
are computed together, in tiles (SGMV of Punica, arXiv 2310.18547); where they have many adapters, each row is
expanded by itself. Which rows these are is read on the device, so steps of decode rows are graphs: there may
be as many tiles as rows, and those of no row end at once. x is there before the layer begins, whose kernel
fetches weights while x is shrunk; or x is shrunk beside a kernel that lets its successor start when x is
there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.cuda.batch_gemm import Unscaled, row_stride
from sgla.kernels.lora import Rows, Stack, Tiles
from sgla.kernels.ops import AddedNorm
from sgla.kernels.triton.common import _activate, _begin, _pdl, cdiv, next_power_of_2
from sgla.kernels.triton.elementwise import act_mul

# Rows of a tile: of decode rows, of steps that read prompts in graphs, and of others that read prompts.
FEW, SOME, MANY = 8, 16, 64
SPLIT = 512  # inputs about that a program shrinks at least


class Cut(NamedTuple):
    """Of programs that have a tile: the ``inputs`` that one multiplies at a time, in ``stages``, and the
    ``outputs`` in all, of low ranks; into how many ``splits`` the inputs are cut at most; ``warps`` that
    shrink."""

    inputs: int
    outputs: int
    splits: int
    warps: int
    stages: int


CUTS = {FEW: Cut(256, 512, 8, 2, 2), SOME: Cut(256, 256, 8, 2, 2), MANY: Cut(128, 128, 1, 4, 3)}
# Outputs of a row by itself, of its gate and of its up, and of what joins the residual, that a program makes.
APART, GATED, ADDED = 256, 128, 256
ALONE = 1024  # inputs of a row by itself that a program takes
GROUPED = 4096  # pairs of a token and an expert from which on they are sorted
EARLY = 16  # ranks of an adapter that a program which has one row loads before it waits
SORTED = 16  # rows that a program finds the places of


@triton.jit(do_not_specialize_on_alignment=["slots", "table"])
def _sort(
    table, slots, places, order, runs, count, SIZE: tl.constexpr, ALL: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """``kernels/lora.py: tiles_of`` of the places of the slots, but that the tile that begins with row
    ``order[i]`` is tile i. Rows without adapter come last."""
    i, j = tl.program_id(0) * SORTED + tl.arange(0, SORTED), tl.arange(0, ALL)
    own = tl.load(table + tl.load(slots + i, mask=i < count, other=0), mask=i < count, other=0)
    all_ = tl.load(table + tl.load(slots + j, mask=j < count, other=0), mask=j < count, other=0)
    key, keys = tl.where(own > 0, own, 1 << 30), tl.where(all_ > 0, all_, 1 << 30)
    there, earlier = (j < count)[None, :], j[None, :] < i[:, None]
    same = (keys[None, :] == key[:, None]) & there
    rank = tl.sum((same & earlier).to(tl.int32), 1)
    at = tl.sum(((keys[None, :] < key[:, None]) & there).to(tl.int32), 1) + rank
    left = tl.sum(same.to(tl.int32), 1) - rank
    leads = (own > 0) & (rank % SIZE == 0)
    tl.store(places + i, own, mask=i < count)
    tl.store(order + at, i, mask=i < count)
    tl.store(runs + 3 * at, at, mask=i < count)
    tl.store(runs + 3 * at + 1, tl.where(leads, tl.minimum(left, SIZE), 0), mask=i < count)
    tl.store(runs + 3 * at + 2, own, mask=i < count)


@triton.jit
def _wait_at(here, PDL: tl.constexpr):
    """Who waits for a kernel relies on what was before it, so one program waits for that at least."""
    if PDL:
        waits = here
        if waits:
            tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize_on_alignment=["order", "runs"])
def _shrink(
    x, a, order, runs, experts, squares, inner, k, span, s_x, s_place, s_rank, s_inner, s_squares,
    squares_count, eps, R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, MORE: tl.constexpr, EXPERTS: tl.constexpr, SQUARES: tl.constexpr,
    PRECISION: tl.constexpr, THERE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a part of one tile, over ``span`` of the inputs. ``SQUARES`` > 0: x is ``Unscaled``. What
    a step's rows are is long there when this begins, but not who is chosen of ``EXPERTS``. ``THERE``: x is,
    too, and who waits for this kernel waits for the one before. It waits for nothing, so it must not find
    older values in the cache of its multiprocessor."""
    CACHED: tl.constexpr = ".cg" if THERE else ""
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EXPERTS:
            tl.extra.cuda.gdc_wait()
    first, count = tl.load(runs + 3 * tile).to(tl.int64), tl.load(runs + 3 * tile + 1)
    place = tl.load(runs + 3 * tile + 2).to(tl.int64)
    if count == 0:
        _wait_at(tile == 0, PDL)
        return
    m, r, i = tl.arange(0, BM), tl.arange(0, RP), tl.arange(0, BK)
    own = m < count
    rows = tl.load(order + first + m, mask=own, other=0).to(tl.int64)
    which = part
    if EXPERTS:
        which += tl.load(experts + first) * PARTS
    source = a + (place - 1) * s_place + which.to(tl.int64) * k + r.to(tl.int64)[:, None] * s_rank
    begin, end = split * span, tl.minimum(split * span + span, k)
    j = begin + i
    w = tl.load(source + j[None, :], mask=(r < R)[:, None] & (j < k)[None, :], other=0.0)
    if PDL and not THERE:
        tl.extra.cuda.gdc_wait()
    scale = tl.full((BM,), 1.0, tl.float32)
    if SQUARES:
        p = tl.arange(0, SQUARES)
        live = (p < squares_count)[:, None] & own[None, :]
        sums = tl.load(
            squares + p[:, None] * s_squares + rows[None, :], mask=live, other=0.0, cache_modifier=CACHED
        )
        scale = tl.rsqrt(tl.sum(sums, 0) / k + eps)
    v = tl.load(
        x + rows[None, :] * s_x + j[:, None],
        mask=(j < k)[:, None] & own[None, :],
        other=0.0,
        cache_modifier=CACHED,
    )
    total = tl.dot(w.to(v.dtype), v, input_precision=PRECISION)
    if MORE:
        for start in range(begin + BK, end, BK):
            j = start + i
            w = tl.load(source + j[None, :], mask=(r < R)[:, None] & (j < k)[None, :], other=0.0)
            v = tl.load(
                x + rows[None, :] * s_x + j[:, None],
                mask=(j < k)[:, None] & own[None, :],
                other=0.0,
                cache_modifier=CACHED,
            )
            total = tl.dot(w.to(v.dtype), v, total, input_precision=PRECISION)
    total *= scale[None, :]
    at = inner + split * s_inner + (rows[None, :] * PARTS + part) * R + r[:, None]
    tl.store(at, total, mask=(r < R)[:, None] & own[None, :])
    if THERE:
        _wait_at(tile + part + split == 0, PDL)


@triton.jit
def _scale_of(squares, s_squares, count, k, eps, row, SQUARES: tl.constexpr, CACHED: tl.constexpr):
    """What a row of ``Unscaled`` is to be multiplied by."""
    p = tl.arange(0, SQUARES)
    sums = tl.load(squares + p * s_squares + row, mask=p < count, other=0.0, cache_modifier=CACHED)
    return tl.rsqrt(tl.sum(sums) / k + eps)


@triton.jit(do_not_specialize_on_alignment=["places"])
def _shrink_row(
    x, a, places, squares, inner, k, s_x, s_place, s_rank, s_inner, s_squares, squares_count, eps,
    R: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, SQUARES: tl.constexpr,
    THERE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``_shrink`` of a row by itself: one program takes ``BK`` inputs of a part, by sums, for which it needs
    no shared memory beside the layer's kernel."""
    CACHED: tl.constexpr = ".cg" if THERE else ""
    row, part, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(places + row).to(tl.int64)
    if place == 0:
        _wait_at(row == 0, PDL)
        return
    r, j = tl.arange(0, EARLY), split * BK + tl.arange(0, BK)
    live = j < k
    source = a + (place - 1) * s_place + part.to(tl.int64) * k + r.to(tl.int64)[:, None] * s_rank + j[None, :]
    w = tl.load(source, mask=(r < R)[:, None] & live[None, :], other=0.0)
    if PDL and not THERE:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * s_x + j, mask=live, other=0.0, cache_modifier=CACHED).to(tl.float32)
    if SQUARES:
        v *= _scale_of(squares, s_squares, squares_count, k, eps, row, SQUARES, CACHED)
    at = inner + split * s_inner + (row * PARTS + part) * R + r
    tl.store(at, tl.sum(w.to(tl.float32) * v[None, :], 1), mask=r < R)
    for first in range(EARLY, R, EARLY):
        own = first + r < R
        w = tl.load(source + first * s_rank, mask=own[:, None] & live[None, :], other=0.0)
        tl.store(at + first, tl.sum(w.to(tl.float32) * v[None, :], 1), mask=own)
    if THERE:
        _wait_at(row + part + split == 0, PDL)


@triton.jit
def _part_of(block, ends, PARTS: tl.constexpr, BN: tl.constexpr):
    """The part that has the block of outputs, and where this begins and the part ends."""
    part, start, stop, begin, passed = 0, 0, 0, 0, 0
    for p in tl.static_range(PARTS):
        end = tl.load(ends + p)
        blocks = tl.cdiv(end - begin, BN)
        here = (block >= passed) & (block < passed + blocks)
        part = tl.where(here, p, part)
        start, stop = tl.where(here, begin + (block - passed) * BN, start), tl.where(here, end, stop)
        begin, passed = end, passed + blocks
    return part, start, stop


@triton.jit(do_not_specialize_on_alignment=["order", "runs"])
def _expand(
    inner, b, order, runs, experts, ends, y, s_place, s_rank, s_y, s_inner, R: tl.constexpr, RP: tl.constexpr,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some outputs of one part, of one tile. It loads what the adapter has before it waits."""
    tile, block = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EXPERTS:
            tl.extra.cuda.gdc_wait()
    first, count = tl.load(runs + 3 * tile).to(tl.int64), tl.load(runs + 3 * tile + 1)
    place = tl.load(runs + 3 * tile + 2).to(tl.int64)
    if count == 0:
        _wait_at(tile == 0, PDL)
        return
    m, r = tl.arange(0, BM), tl.arange(0, RP)
    own = m < count
    rows = tl.load(order + first + m, mask=own, other=0).to(tl.int64)
    part, start, stop = _part_of(block, ends, PARTS, BN)
    i = tl.multiple_of(start, ALIGNED) + tl.arange(0, BN)
    live = i < tl.multiple_of(stop, ALIGNED)
    source = b + (place - 1) * s_place + i[:, None] + r.to(tl.int64)[None, :] * s_rank
    if EXPERTS:
        width = tl.load(ends + PARTS - 1)  # of what an expert has
        source += tl.multiple_of(tl.load(experts + first).to(tl.int64) * width, ALIGNED)
    w = tl.load(source, mask=live[:, None] & (r < R)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    to = y + rows[None, :] * s_y + i[:, None]
    inside = live[:, None] & own[None, :]
    made = tl.load(to, mask=inside, other=0.0)
    u = tl.zeros((RP, BM), tl.float32)
    at = inner + (rows[None, :] * PARTS + part) * R + r[:, None]
    for _ in tl.static_range(SPLITS):
        u += tl.load(at, mask=(r < R)[:, None] & own[None, :], other=0.0)
        at += s_inner
    total = tl.dot(w, u.to(w.dtype), input_precision=PRECISION)
    tl.store(to, made.to(tl.float32) + total, mask=inside)


@triton.jit
def _shrunk_of(inner, s_inner, ranks, own, SPLITS: tl.constexpr, SP: tl.constexpr):
    """What a row has been shrunk to, of some ``ranks``, if they are its ``own``."""
    s = tl.arange(0, SP)
    parts = inner + s[:, None] * s_inner + ranks[None, :]
    return tl.sum(tl.load(parts, mask=(s < SPLITS)[:, None] & own[None, :], other=0.0), 0)


@triton.jit
def _expanded_by(w, inner, s_inner, ranks, own, SPLITS: tl.constexpr, SP: tl.constexpr):
    """What these ``ranks`` w [*, n] of an adapter add to a row."""
    return tl.sum(w.to(tl.float32) * _shrunk_of(inner, s_inner, ranks, own, SPLITS, SP)[:, None], 0)


@triton.jit(do_not_specialize_on_alignment=["places"])
def _expand_row(
    inner, b, places, ends, y, s_place, s_rank, s_y, s_inner, R: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr, ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: some outputs of one part, of one row. Of the adapter it takes ``EARLY`` ranks at a time,
    and loads the first before it waits."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(places + row).to(tl.int64)
    if place == 0:
        _wait_at(row == 0, PDL)
        return
    part, start, stop = _part_of(block, ends, PARTS, BN)
    i, r = tl.multiple_of(start, ALIGNED) + tl.arange(0, BN), tl.arange(0, EARLY)
    live = i < tl.multiple_of(stop, ALIGNED)
    source = b + (place - 1) * s_place + r.to(tl.int64)[:, None] * s_rank + i[None, :]
    w = tl.load(source, mask=(r < R)[:, None] & live[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    to = y + row * s_y + i
    inner += (row * PARTS + part) * R
    total = tl.load(to, mask=live, other=0.0).to(tl.float32)
    total += _expanded_by(w, inner, s_inner, r, r < R, SPLITS, SP)
    for first in range(EARLY, R, EARLY):
        own = first + r < R
        w = tl.load(source + first * s_rank, mask=own[:, None] & live[None, :], other=0.0)
        total += _expanded_by(w, inner, s_inner, first + r, own, SPLITS, SP)
    tl.store(to, total, mask=live)


@triton.jit(do_not_specialize_on_alignment=["places"])
def _expand_gated(
    inner, b, places, y, out, n, s_place, s_rank, s_inner, R: tl.constexpr, SPLITS: tl.constexpr,
    SP: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``_expand_row`` of gate and up, each of n outputs, and their activation."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place, r, live = tl.load(places + row).to(tl.int64), tl.arange(0, EARLY), i < n
    count = tl.where(place > 0, R, 0)
    source = b + tl.maximum(place - 1, 0) * s_place + r.to(tl.int64)[:, None] * s_rank + i[None, :]
    own = r < count
    w = tl.load(source, mask=own[:, None] & live[None, :], other=0.0)
    v = tl.load(source + n, mask=own[:, None] & live[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    y += row * 2 * n + i
    inner += row * 2 * R
    gate = tl.load(y, mask=live, other=0.0).to(tl.float32)
    up = tl.load(y + n, mask=live, other=0.0).to(tl.float32)
    gate += _expanded_by(w, inner, s_inner, r, own, SPLITS, SP)
    up += _expanded_by(v, inner + R, s_inner, r, own, SPLITS, SP)
    for first in range(EARLY, count, EARLY):
        own = first + r < R
        w = tl.load(source + first * s_rank, mask=own[:, None] & live[None, :], other=0.0)
        v = tl.load(source + first * s_rank + n, mask=own[:, None] & live[None, :], other=0.0)
        gate += _expanded_by(w, inner, s_inner, first + r, own, SPLITS, SP)
        up += _expanded_by(v, inner + R, s_inner, first + r, own, SPLITS, SP)
    tl.store(out + row * n + i, _activate(gate, GELU) * up, mask=live)


@triton.jit(do_not_specialize_on_alignment=["places"])
def _expand_added(
    inner, b, places, y, residual, weight, out, squares, n, s_place, s_rank, s_inner, s_squares,
    R: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``_expand_row`` of one part with n outputs, and the residual that it joins: ``Unscaled`` of the norm
    behind that."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place, i, r = tl.load(places + row).to(tl.int64), block * BN + tl.arange(0, BN), tl.arange(0, EARLY)
    live, count = i < n, tl.where(place > 0, R, 0)
    source = b + tl.maximum(place - 1, 0) * s_place + r.to(tl.int64)[:, None] * s_rank + i[None, :]
    own = r < count
    w = tl.load(source, mask=own[:, None] & live[None, :], other=0.0)
    norm = tl.load(weight + i, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = row * n + i
    inner += row * R
    total = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
    total += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
    total += _expanded_by(w, inner, s_inner, r, own, SPLITS, SP)
    for first in range(EARLY, count, EARLY):
        own = first + r < R
        w = tl.load(source + first * s_rank, mask=own[:, None] & live[None, :], other=0.0)
        total += _expanded_by(w, inner, s_inner, first + r, own, SPLITS, SP)
    h = total.to(residual.dtype.element_ty)
    tl.store(residual + at, h, mask=live)
    v = h.to(tl.float32)
    tl.store(out + at, v * norm, mask=live)
    tl.store(squares + block * s_squares + row, tl.sum(v * v))


@triton.jit(do_not_specialize_on_alignment=["places", "ids"])
def _pair(places, ids, order, runs, pairs, top_k, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Each pair of a token and an expert here is a tile."""
    _begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + i // top_k, mask=i < pairs, other=0)
    expert = tl.load(ids + i, mask=i < pairs, other=-1)
    tl.store(order + i, i, mask=i < pairs)
    tl.store(runs + 3 * i, i, mask=i < pairs)
    tl.store(runs + 3 * i + 1, tl.where((place > 0) & (expert >= 0), 1, 0), mask=i < pairs)
    tl.store(runs + 3 * i + 2, place, mask=i < pairs)


def sort(rows: Rows, table: Tensor, slots: Tensor) -> None:
    """Fill what ``rows`` have for decode rows of ``slots`` int32[T], whose places stand in ``table``, on the
    device."""
    count, (order, runs, size, _) = len(slots), rows.tiles[0]
    _sort[(cdiv(count, SORTED),)](
        table, slots, rows.places[0], order, runs, count, SIZE=size,
        ALL=next_power_of_2(count), SORTED=SORTED,
    )  # fmt: skip


def pairs(ids: Tensor, rows: Rows, sampled: bool, stack: Stack) -> Tiles:
    """Of the pairs of tokens and experts ids int32[T, top_k] (-1: another rank's), of which each has a part
    of ``stack``. Where they are many, those with one adapter and one expert are computed together."""
    if ids.numel() >= GROUPED:
        return grouped(ids, rows.places[sampled], stack)
    experts = ids.flatten()
    order = torch.empty_like(experts)
    runs = torch.empty(len(experts), 3, dtype=torch.int32, device=ids.device)
    _pair[(cdiv(len(experts), 128),)](
        rows.places[sampled], experts, order, runs, len(experts), ids.shape[1], BLOCK=128, **_pdl()
    )
    return Tiles(order, runs, FEW, experts)


def grouped(ids: Tensor, places: Tensor, stack: Stack) -> Tiles:
    """Of pairs whose tokens have these ``places`` int32[T]."""
    experts, pairs = ids.flatten(), ids.numel()
    place = places[: len(ids)].repeat_interleave(ids.shape[1])
    count, nobody = len(stack.sizes), len(stack.sizes) * (len(stack.ranks) + 1)
    key = torch.where((place > 0) & (experts >= 0), place * count + experts, nobody)
    keys, order = key.sort(stable=True)
    at, first = torch.arange(pairs, device=ids.device), torch.searchsorted(keys, keys)
    left = torch.searchsorted(keys, keys, right=True) - at
    leads = ((at - first) % MANY == 0) & (keys < nobody)
    most = cdiv(pairs, MANY) + min(pairs, count * len(stack.ranks))  # tiles
    tile = torch.where(leads, leads.cumsum(0) - 1, most)
    runs = torch.zeros(most + 1, 3, dtype=torch.int32, device=ids.device)
    runs[tile] = torch.stack([at, left.clamp(max=MANY), place[order]], 1).int()
    return Tiles(order.int(), runs[:most], MANY, experts[order])


def shrink(x: Tensor | Unscaled, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """x [T, k] -> what ``expand`` reads, float32 [splits, T, parts, rank], whose sum over the splits is
    ``x @ a.T`` of rows with an adapter; others are not written."""
    return _shrunk_rows(x, stack, rows, sampled)


def shrink_beside(x: Tensor | Unscaled, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """``shrink`` beside the kernel before, which reads x, too, and lets this one start when x is there."""
    return _shrunk_rows(x, stack, rows, sampled, there=True)


def _shrunk_rows(
    x: Tensor | Unscaled, stack: Stack, rows: Rows, sampled: bool, there: bool = False
) -> Tensor:
    if rows.apart:
        return _shrunk_apart(x, stack, rows.places[sampled], there)
    return _shrunk(x, stack, rows.tiles[sampled], len(stack.sizes), there)


def _shrunk_apart(x: Tensor | Unscaled, stack: Stack, places: Tensor, there: bool) -> Tensor:
    squares, eps = None, 0.0
    if isinstance(x, Unscaled):
        x, squares, eps = x
    x = x if x.stride(-1) == 1 else x.contiguous()
    (tokens, k), parts, rank = x.shape, len(stack.sizes), stack.a.shape[2]
    splits = cdiv(k, ALONE)
    inner = torch.empty(splits, tokens, parts, rank, dtype=torch.float32, device=x.device)
    _shrink_row[tokens, parts, splits](
        x, stack.a, places, squares, inner, k, x.stride(0), stack.a.stride(0), stack.a.stride(2),
        inner.stride(0), 0 if squares is None else squares.stride(0), 0 if squares is None else len(squares),
        eps, R=rank, PARTS=parts, BK=ALONE, EARLY=min(EARLY, next_power_of_2(rank)),
        SQUARES=0 if squares is None else next_power_of_2(len(squares)), THERE=there,
        num_warps=4, **_pdl(),
    )  # fmt: skip
    return inner


def _shrunk(x: Tensor | Unscaled, stack: Stack, tiles: Tiles, parts: int, there: bool = False) -> Tensor:
    """``parts``: of a row."""
    squares, eps = None, 0.0
    if isinstance(x, Unscaled):
        x, squares, eps = x
    x = x if x.stride(-1) == 1 else x.contiguous()
    order, runs, size, experts = tiles
    (tokens, k), rank = x.shape, stack.a.shape[2]
    padded, exact = max(16, next_power_of_2(rank)), stack.a.dtype == torch.float32
    cut = CUTS[size]
    width = max(32, min(cut.inputs, 8192 // padded))
    splits = min(cut.splits, cdiv(k, SPLIT))
    span = cdiv(cdiv(k, splits), width) * width
    splits = cdiv(k, span)
    inner = torch.empty(splits, tokens, parts, rank, dtype=torch.float32, device=x.device)
    _shrink[len(runs), parts, splits](
        x, stack.a, order, runs, experts, squares, inner, k, span, x.stride(0), stack.a.stride(0),
        stack.a.stride(2), inner.stride(0), 0 if squares is None else squares.stride(0),
        0 if squares is None else len(squares), eps, R=rank, RP=padded, PARTS=parts, BM=size, BK=width,
        MORE=span > width, EXPERTS=experts is not None,
        SQUARES=0 if squares is None else next_power_of_2(len(squares)),
        PRECISION="ieee" if exact else "tf32", THERE=there, num_warps=cut.warps,
        num_stages=2 if exact else cut.stages, **_pdl(),
    )  # fmt: skip
    return inner


def expand(y: Tensor, inner: Tensor, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """``y + inner.sum(0) @ b.T`` in the memory of y [T, n]."""
    if rows.apart:
        return _expanded_apart(y, inner, stack, rows.places[sampled])
    return _expanded(y, inner, stack, rows.tiles[sampled])


def _expanded_apart(y: Tensor, inner: Tensor, stack: Stack, places: Tensor) -> Tensor:
    splits, tokens, parts, rank = inner.shape
    aligned = 1 if any(n % 16 for n in stack.sizes) else 16
    _expand_row[tokens, sum(cdiv(n, APART) for n in stack.sizes)](
        inner, stack.b, places, stack.bounds, y, stack.b.stride(0), stack.b.stride(2), y.stride(0),
        inner.stride(0), R=rank, PARTS=parts, SPLITS=splits, SP=next_power_of_2(splits), BN=APART,
        EARLY=min(EARLY, next_power_of_2(rank)), ALIGNED=aligned, num_warps=1, **_pdl(),
    )  # fmt: skip
    return y


def expand_gated(y: Tensor, inner: Tensor, stack: Stack, rows: Rows, sampled: bool, kind: str) -> Tensor:
    """``ops.act_mul`` of ``expand`` [T, 2 n], whose parts are gate and up: [T, n]."""
    if not rows.apart:
        return act_mul(expand(y, inner, stack, rows, sampled), kind)
    splits, tokens, _, rank = inner.shape
    n = y.shape[1] // 2
    out = y.new_empty(tokens, n)
    _expand_gated[tokens, cdiv(n, GATED)](
        inner, stack.b, rows.places[sampled], y, out, n, stack.b.stride(0), stack.b.stride(2),
        inner.stride(0), R=rank, SPLITS=splits, SP=next_power_of_2(splits), BN=GATED,
        EARLY=min(EARLY, next_power_of_2(rank)), GELU=kind == "gelu_tanh", num_warps=1, **_pdl(),
    )  # fmt: skip
    return out


def _expanded(y: Tensor, inner: Tensor, stack: Stack, tiles: Tiles) -> Tensor:
    order, runs, size, experts = tiles
    splits, _, parts, rank = inner.shape
    padded, exact = max(16, next_power_of_2(rank)), stack.b.dtype == torch.float32
    width = max(32, min(CUTS[size].outputs, 8192 // padded))
    blocks = sum(cdiv(n, width) for n in stack.sizes[:parts])
    aligned = 1 if any(n % 16 for n in stack.sizes) else 16
    _expand[len(runs), blocks](
        inner, stack.b, order, runs, experts, stack.bounds, y, stack.b.stride(0), stack.b.stride(2),
        y.stride(0), inner.stride(0), R=rank, RP=padded, PARTS=parts, SPLITS=splits, BM=size, BN=width,
        ALIGNED=aligned, EXPERTS=experts is not None, PRECISION="ieee" if exact else "tf32", **_pdl(),
    )  # fmt: skip
    return y


def expand_added(
    y: Tensor, inner: Tensor, norm: AddedNorm, stack: Stack, rows: Rows, sampled: bool
) -> Unscaled:
    """``expand`` [T, n], of one part, added to ``norm.residual`` in place; the norm of the sum."""
    splits, tokens, parts, rank = inner.shape
    assert parts == 1
    assert norm.residual is not None
    n, out = y.shape[1], torch.empty_like(y)
    blocks = cdiv(n, ADDED)
    squares = torch.empty(blocks, row_stride(tokens), dtype=torch.float32, device=y.device)
    _expand_added[tokens, blocks](
        inner, stack.b, rows.places[sampled], y, norm.residual, norm.weight, out, squares, n,
        stack.b.stride(0), stack.b.stride(2), inner.stride(0), squares.stride(0), R=rank, SPLITS=splits,
        SP=next_power_of_2(splits), BN=ADDED, EARLY=min(EARLY, next_power_of_2(rank)), num_warps=1, **_pdl(),
    )  # fmt: skip
    return Unscaled(out, squares, norm.eps)


def add(y: Tensor, x: Tensor, stack: Stack, rows: Rows, sampled: bool) -> Tensor:
    """``y + lora(x)`` in the memory of y: x [T, k], y [T, n]."""
    return expand(y, shrink(x, stack, rows, sampled), stack, rows, sampled)


def add_experts(y: Tensor, x: Tensor, stack: Stack, tiles: Tiles, parts: int) -> Tensor:
    """The same of pairs, of which each has ``parts`` of the stack: x [pairs, k], y [pairs, n of these]."""
    return _expanded(y, _shrunk(x, stack, tiles, parts), stack, tiles)


def embedding(ids: Tensor, stack: Stack, rows: Rows) -> Tensor:
    """What adapters add to the embeddings of ids int32[T]: float32 [T, n]."""
    places = rows.places[0][: len(ids)]
    inner = stack.a[(places - 1).clamp(min=0).long(), 0, :, ids.long()].float()
    y = torch.zeros(len(ids), stack.n, dtype=torch.float32, device=ids.device)
    return expand(y, inner[None, :, None], stack, rows, False)

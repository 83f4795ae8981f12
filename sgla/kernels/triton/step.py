# mypy: allow-untyped-defs
"""Bookkeeping of a step on the device: pages and tokens that come, and from the plan's columns to the forward
batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin_early, _pdl, cdiv, next_power_of_2
from sgla.kernels.triton.tokens import RING, TokenTable, _token


@triton.jit
def _place(page, position, page_size, RANKS: tl.constexpr, RANK: tl.constexpr):
    """Where the pages of a rank have a token; the dummy page where another rank has it."""
    place = page * page_size + position % page_size
    if RANKS > 1:
        place = tl.where(place % RANKS == RANK, place // RANKS, 0)
    return place


@triton.jit
def _turned(position, delta):
    """What keys and queries are turned by. A picture takes fewer positions than it has tokens, so that those
    of tokens in front of one, which come out of its grid, would be negative here."""
    return tl.maximum(position + delta, 0)


# Steps differ in their counts and in where a column begins;
# neither is worth a compilation in the midst of traffic.
@triton.jit(do_not_specialize=["count"])
def _append_pages(columns, page_table, stride, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    slot = tl.load(columns + i, mask=live, other=0).to(tl.int64)
    index = tl.load(columns + count + i, mask=live, other=0)
    page = tl.load(columns + 2 * count + i, mask=live, other=0)
    tl.store(page_table + slot * stride + index, page, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _prepare_decode(
    slots, starts, tokens, pages, stride, held, page_size, base, page_table, table_stride, ids, positions,
    kv_len, out_loc, cum, skip, deltas, ends, rows, window,
    SHIFT: tl.constexpr, HAS_SKIP: tl.constexpr, DELTAS: tl.constexpr, ENDS: tl.constexpr,
    TILE: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _begin_early(PDL)
    r = tl.arange(0, BLOCK)
    live = r < rows
    slot = tl.load(slots + r, mask=live, other=0).to(tl.int64)
    start = tl.load(starts + r, mask=live, other=-1)
    real = live & (start >= 0)
    own = tl.maximum(start, 0)
    at = _token(tokens, pages, stride, held, page_size, base, slot, own + SHIFT)
    token = tl.load(at, mask=real, other=0)
    page = tl.load(page_table + slot * table_stride + own // page_size, mask=real, other=0)
    tl.store(ids + r, token, mask=live)
    position = own
    if ENDS:
        position = tl.maximum(tl.load(ends + r, mask=real, other=0) - 1, 0)
    if DELTAS:
        delta = tl.load(deltas + slot, mask=real, other=0)
        tl.store(positions + r, _turned(position, delta), mask=live)
    else:
        tl.store(positions + r, position, mask=live)
    tl.store(kv_len + r, start + 1, mask=live)
    place = _place(page, own, page_size, RANKS, RANK)
    tl.store(out_loc + r, tl.where(real, place, 0), mask=live)
    length = tl.where(live, start + 1, 0)
    tiles = tl.cdiv(length, TILE)
    if window > 0:
        tiles -= tl.where(length > window, (length - window) // TILE, 0)
    if HAS_SKIP:
        tiles -= tl.load(skip + r, mask=live, other=0) // TILE
    tl.store(cum + 1 + r, tl.cumsum(tiles, 0), mask=live)


@triton.jit
def _count_tiles(kv_len, cum, rows, window, TILE: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    length = tl.load(kv_len + r, mask=r < rows, other=0)
    tiles = tl.cdiv(length, TILE)
    if window > 0:
        tiles -= tl.where(length > window, (length - window) // TILE, 0)
    tl.store(cum + 1 + r, tl.cumsum(tiles, 0), mask=r < rows)


def wake() -> None:
    """Have Triton find its driver and hash its own files, which what is compiled first has to wait for."""
    _append_pages.warmup(torch.int32, torch.int32, 1, 1, BLOCK=256, grid=(1,))


def append_pages(columns: Tensor, page_table: Tensor) -> None:
    """``columns`` int32[3, count]: slot, index in its table, page."""
    count = columns.shape[1]
    _append_pages[(cdiv(count, 256),)](columns, page_table, page_table.stride(0), count, BLOCK=256)


def prepare_decode(
    slots: Tensor,
    starts: Tensor,
    tokens: TokenTable,
    page_table: Tensor,
    ids: Tensor,
    positions: Tensor,
    kv_len: Tensor,
    out_loc: Tensor,
    cum: Tensor,
    tile: int,
    window: int = 0,
    skip: Tensor | None = None,
    deltas: Tensor | None = None,
    shift: int = 0,
    part: tuple[int, int] = (0, 1),
    ends: Tensor | None = None,
) -> None:
    """Fill the batch of R decode rows from ``slots`` and ``starts`` int32[R] (start -1: a padding row, which
    gets ``kv_len`` 0 and writes to the dummy page); ``cum`` int32[R + 1] counts KV tiles before each row,
    ``cum[0]`` is 0. ``skip`` int32[R]: tokens of each row that do not count, whole tiles (0 for padding).
    ``deltas`` int32[slots]: by how much ``positions`` are more than the numbers of tokens. ``page_table``: of
    the cache group that ``out_loc`` is for. ``shift``: the ids are those of so many tokens further on.
    ``part``: this rank, and how many there are that share out the tokens of a page. ``ends`` int32[R]: what
    follows the positions of rows, which are then not the places where these stand (``drafts.place``)."""
    rows, least = slots.shape[0], 32  # few variants to compile
    _prepare_decode[(1,)](
        slots, starts, *tokens.arguments, page_table, page_table.stride(0),
        ids, positions, kv_len, out_loc, cum, skip if skip is not None else cum,
        deltas if deltas is not None else cum, ends if ends is not None else cum, rows, window, SHIFT=shift,
        HAS_SKIP=skip is not None, DELTAS=deltas is not None, ENDS=ends is not None, TILE=tile,
        RANKS=part[1], RANK=part[0], BLOCK=max(least, next_power_of_2(rows)), num_warps=4, **_pdl(),
    )  # fmt: skip


def count_tiles(kv_len: Tensor, cum: Tensor, tile: int, window: int) -> None:
    """``cum`` as in ``prepare_decode``, for another window."""
    rows = kv_len.shape[0]
    _count_tiles[(1,)](kv_len, cum, rows, window, TILE=tile, BLOCK=next_power_of_2(rows), num_warps=4)


# Of a row that gets pages: slot; pages that it has; how many come, and where they end; how many tokens come
# with them, from the first one that had no page, and where they end; up to which token the host knows all.
COLUMNS = tl.constexpr(7)
# Of a row that takes its slot behind these: temperature, top_p, min_p, top_k, seed low, seed high.
ADMIT_COLUMNS = COLUMNS.value + 6


@triton.jit
def _grow(head, data, slot, tokens, pages, stride, held, page_size, base, BLOCK: tl.constexpr):
    """Take in a part of the pages and tokens of a row. What it has in its ring moves to its pages, as far as
    the host does not know it."""
    before, count, known = tl.load(head + 1), tl.load(head + 2), tl.load(head + 6)
    coming, come = data + tl.load(head + 3) - count, tl.load(head + 4)
    given = data + tl.load(head + 5) - come
    begin, end = before * page_size, (before + count) * page_size
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pages + slot * stride + before + i, tl.load(coming + i, mask=i < count), mask=i < count)
    place = _coming(coming, tokens, page_size, base, begin, end, slot, begin + i)
    tl.store(place, tl.load(given + i, mask=i < come), mask=i < come)
    if tl.program_id(1) == 0:
        position = begin + tl.arange(0, RING)
        moves = (position >= known) & (position < end)
        value = tl.load(tokens + slot * RING + position % RING, mask=moves, other=0)
        paged = _coming(coming, tokens, page_size, base, begin, end, slot, position)
        tl.store(paged, value, mask=moves)
        tl.store(held + slot, end)


@triton.jit
def _coming(coming, tokens, page_size, base, begin, end, slot, position):
    """As ``_token``, of a row that gets the pages ``coming``, for tokens from ``begin`` to ``end``."""
    inside = position < end
    page = tl.load(coming + (position - begin) // page_size, mask=inside, other=0).to(tl.int64)
    return tokens + tl.where(
        inside, base + page * page_size + position % page_size, slot * RING + position % RING
    )


@triton.jit(do_not_specialize_on_alignment=["data"])
def _append(
    head, data, tokens, pages, stride, held, page_size, base,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head += tl.program_id(0) * COLUMNS
    slot = tl.load(head).to(tl.int64)
    _grow(head, data, slot, tokens, pages, stride, held, page_size, base, BLOCK)


@triton.jit(do_not_specialize_on_alignment=["data"])
def _admit(
    head, data, tokens, pages, stride, held, page_size, base, temperatures, top_ps, min_ps, top_ks, seeds,
    COLUMNS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head += tl.program_id(0) * COLUMNS
    slot = tl.load(head).to(tl.int64)
    _grow(head, data, slot, tokens, pages, stride, held, page_size, base, BLOCK)
    if tl.program_id(1) == 0:
        own = head + OWN
        tl.store(temperatures + slot, tl.load(own).to(tl.float32, bitcast=True))
        tl.store(top_ps + slot, tl.load(own + 1).to(tl.float32, bitcast=True))
        tl.store(min_ps + slot, tl.load(own + 2).to(tl.float32, bitcast=True))
        tl.store(top_ks + slot, tl.load(own + 3))
        low = tl.load(own + 4).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.load(own + 5).to(tl.int64)
        tl.store(seeds + slot, (high << 32) | low)


@triton.jit(
    do_not_specialize_on_alignment=["slots", "starts", "q_start", "ids", "positions", "out_loc"],
)
def _prepare_extend(
    slots, starts, q_start, tokens, pages, stride, held, page_size, base, page_table, table_stride, ids,
    positions, out_loc, deltas, SHIFT: tl.constexpr, DELTAS: tl.constexpr, RANKS: tl.constexpr,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    begin = tl.load(q_start + row)
    length = tl.load(q_start + row + 1) - begin
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    live = i < length
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(starts + row) + i
    page = tl.load(page_table + slot * table_stride + position // page_size, mask=live, other=0)
    at = _token(tokens, pages, stride, held, page_size, base, slot, position + SHIFT)
    tl.store(ids + begin + i, tl.load(at, mask=live, other=0), mask=live)
    if DELTAS:
        tl.store(positions + begin + i, _turned(position, tl.load(deltas + slot)), mask=live)
    else:
        tl.store(positions + begin + i, position, mask=live)
    tl.store(out_loc + begin + i, _place(page, position, page_size, RANKS, RANK), mask=live)


def append(head: Tensor, data: Tensor, longest: int, tokens: TokenTable) -> None:
    """Rows get pages, and tokens that the host knows. ``head`` int32[rows, COLUMNS]; ``data`` int32[*]: the
    pages of all rows, then their tokens; ``longest``: most tokens or pages of a row."""
    _append[(head.shape[0], cdiv(max(longest, 1), 1024))](
        head, data, *tokens.arguments, COLUMNS=COLUMNS.value, BLOCK=1024
    )


def admit(
    head: Tensor,
    data: Tensor,
    longest: int,
    tokens: TokenTable,
    temperatures: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    top_ks: Tensor,
    seeds: Tensor,
) -> None:
    """``append`` for rows that take their slots. ``head`` int32[new, ADMIT_COLUMNS], floats as their bits."""
    _admit[(head.shape[0], cdiv(max(longest, 1), 1024))](
        head, data, *tokens.arguments, temperatures, top_ps, min_ps, top_ks, seeds,
        COLUMNS=ADMIT_COLUMNS, OWN=COLUMNS.value, BLOCK=1024,
    )  # fmt: skip


def prepare_extend(
    slots: Tensor,
    starts: Tensor,
    q_start: Tensor,
    longest: int,
    tokens: TokenTable,
    page_table: Tensor,
    ids: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    deltas: Tensor | None = None,
    shift: int = 0,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Fill ``ids``, ``positions``, ``out_loc`` int32[T] of rows with any number of tokens, at most
    ``longest`` each. ``page_table``, ``deltas``, ``shift`` and ``part``: as in ``prepare_decode``."""
    _prepare_extend[(slots.shape[0], cdiv(longest, 256))](
        slots, starts, q_start, *tokens.arguments, page_table, page_table.stride(0),
        ids, positions, out_loc, deltas if deltas is not None else positions, SHIFT=shift,
        DELTAS=deltas is not None, RANKS=part[1], RANK=part[0], BLOCK=256,
    )  # fmt: skip

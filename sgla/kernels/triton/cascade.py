# mypy: allow-untyped-defs
"""Attention of many decode rows to a prefix that they share:
its pages are read once for a tile of rows, on tensor cores.

A prefix is a run of whole pages (Hydragen, Juravsky et al., 2024; cascade inference, Ye et al., 2024). The
partial results are joined with those of each row's own tokens by ``csrc``'s decode kernel. Everything that
changes from step to step is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.attention import NEG, _score, scales
from sgla.kernels.triton.common import _begin, _pdl

# Columns of an item: slot whose pages they are, first token, end token, place in ``order``, rows, part.
ITEM = 6


@triton.jit
def _tokens(
    query, k, v, pages, start, end, top, total, acc, scale, softcap, head_place, s_page, s_token,
    PAGE: tl.constexpr, HD: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of tokens, which all queries see: the online softmax goes on."""
    n = start + tl.arange(0, BLOCK)
    d = tl.arange(0, HD)
    at = tl.minimum(n, end - 1) if MASKED else n
    page = tl.load(pages + at // PAGE).to(tl.int64)
    place = page * s_page + (at % PAGE) * s_token + head_place
    keys = tl.load(k + place[None, :] + d[:, None]).to(query.dtype)
    s = _score(tl.dot(query, keys, input_precision="ieee"), scale, softcap, SOFTCAP)
    if MASKED:
        s = tl.where(n[None, :] < end, s, NEG)
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new_top[:, None])
    fade = tl.exp2(top - new_top)
    values = tl.load(v + place[:, None] + d[None, :]).to(query.dtype)
    acc = acc * fade[:, None] + tl.dot(p.to(query.dtype), values, input_precision="ieee")
    return new_top, total * fade + tl.sum(p, 1), acc


@triton.jit
def _attend_prefixes(
    q, k, v, page_table, items, count, order, first, part, part_ml,
    q_stride, s_page, s_token, s_head, table_stride, kv_heads, scale, softcap,
    ITEM: tl.constexpr, PAGE: tl.constexpr, HD: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    m = tl.arange(0, M)
    d = tl.arange(0, HD)
    for unit in range(tl.program_id(0), tl.load(count) * kv_heads, tl.num_programs(0)):
        item = items + unit // kv_heads * ITEM
        head = unit % kv_heads
        slot = tl.load(item).to(tl.int64)
        begin, end = tl.load(item + 1), tl.load(item + 2)
        rows = tl.load(item + 4)
        live = m < rows * GROUP
        row = tl.load(order + tl.load(item + 3) + m // GROUP, mask=live, other=0).to(tl.int64)
        q_head = head * GROUP + m % GROUP
        query = tl.load(
            q + row[:, None] * q_stride + q_head[:, None] * HD + d[None, :], mask=live[:, None], other=0.0
        )
        top = tl.full([M], NEG, dtype=tl.float32)
        total = tl.zeros([M], dtype=tl.float32)
        acc = tl.zeros([M, HD], dtype=tl.float32)
        pages = page_table + slot * table_stride
        head_place = head * s_head
        whole = begin + (end - begin) // BLOCK * BLOCK
        for start in range(begin, whole, BLOCK):
            top, total, acc = _tokens(
                query, k, v, pages, start, end, top, total, acc, scale, softcap, head_place, s_page, s_token,
                PAGE, HD, BLOCK, SOFTCAP, False,
            )  # fmt: skip
        if whole < end:
            top, total, acc = _tokens(
                query, k, v, pages, whole, end, top, total, acc, scale, softcap, head_place, s_page, s_token,
                PAGE, HD, BLOCK, SOFTCAP, True,
            )  # fmt: skip
        place = (
            tl.load(first + row, mask=live, other=0).to(tl.int64) + tl.load(item + 5)
        ) * kv_heads * GROUP + q_head
        tl.store(part + place[:, None] * HD + d[None, :], acc, mask=live[:, None])
        tl.store(part_ml + place * 2, top, mask=live)
        tl.store(part_ml + place * 2 + 1, total, mask=live)


def tile_rows(rows: int, group: int, dim: int) -> int:
    """Rows whose queries make one tile, in a batch of ``rows``."""
    return _tile(rows, group, dim) // group


def _tile(rows: int, group: int, dim: int) -> int:
    return 64 if rows * group <= 64 or dim > 128 else 128


def attend_prefixes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    items: Tensor,
    count: Tensor,
    order: Tensor,
    first: Tensor,
    part: Tensor,
    part_ml: Tensor,
    scale: float,
    softcap: float = 0.0,
    programs: int = 1,
) -> None:
    """Partial attention of ``items`` int32[*, ITEM], of which ``count`` int32[1] are there.

    q ``[R, Hq * hd]``; k, v ``[pages, page_size, Hkv, hd]``. Rows ``order[place : place + rows]`` of an item
    attend to tokens ``[first token, end token)`` of its slot's pages; that of row ``r`` becomes number
    ``first[r] + part`` of ``part`` float32 ``[*, Hq, hd]``, unnormalised, with maxima (in units of log2) and
    sums in ``part_ml`` ``[*, Hq, 2]``.
    """
    page_size, kv_heads, dim = k.shape[1:]
    group = q.shape[1] // (kv_heads * dim)
    factor, cap = scales(scale, softcap)
    tile = _tile(q.shape[0], group, dim)
    _attend_prefixes[(programs,)](
        q, k, v, page_table, items, count, order, first, part, part_ml,
        q.stride(0), k.stride(0), k.stride(1), k.stride(2), page_table.stride(0), kv_heads, factor, cap,
        ITEM=ITEM, PAGE=page_size, HD=dim, GROUP=group, M=tile, BLOCK=128 if dim <= 128 else 32,
        SOFTCAP=softcap > 0, num_warps=8 if tile == 128 else 4, num_stages=2, **_pdl(),
    )  # fmt: skip

# mypy: allow-untyped-defs
"""Attention to a window and to entries that are made of several tokens each, in Triton: see
``kernels/compressed.py``. Each token is a row, with its own slot; page tables and positions are read on the
device, as in ``attention.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.compressed import Making, Places
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton.attention import LOG2E, NEG, padded
from sgla.kernels.triton.common import cdiv, next_power_of_2
from sgla.kernels.triton.latent import decode_cut

MOST_HEADS = 32  # that a program serves: with twice as many of 512 values registers spill
TOKENS = tl.constexpr(8)  # that a program reads at a time to make an entry


@triton.jit
def _place(pages, token, live, s_page, s_token, page_size):
    """Where the tokens of a row lie whose page numbers are at ``pages``."""
    page = tl.load(pages + token // page_size, mask=live, other=0).to(tl.int64)
    return page * s_page + (token % page_size) * s_token


@triton.jit
def _pooled(
    given, pages, bias, norm, begin, d, there, s_page, s_token, page_size,
    FIRST: tl.constexpr, DIM: tl.constexpr, RATE: tl.constexpr, SERIES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Dims d [B] of the entry whose tokens begin with ``begin``: the weighted sum, and their weights of the
    norm."""
    top = tl.full([B], NEG, dtype=tl.float32)
    total = tl.zeros([B], dtype=tl.float32)
    acc = tl.zeros([B], dtype=tl.float32)
    for start in range(0, SERIES * RATE, TOKENS):
        j = start + tl.arange(0, TOKENS)
        token = begin - (SERIES - 1) * RATE + j
        live = (token >= 0) & (j < SERIES * RATE)
        inside = live[:, None] & there[None, :]
        place = FIRST + _place(pages, token, live, s_page, s_token, page_size)
        column = ((j // RATE) * DIM)[:, None] + d[None, :]
        value = tl.load(given + place[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        logit = tl.load(given + place[:, None] + SERIES * DIM + column, mask=inside, other=0.0)
        added = tl.load(bias + ((j % RATE) * SERIES * DIM)[:, None] + column, mask=inside, other=0.0)
        logit = tl.where(inside, logit.to(tl.float32) + added, NEG)
        new_top = tl.maximum(top, tl.max(logit, 0))
        share, fade = tl.where(inside, tl.exp(logit - new_top[None, :]), 0.0), tl.exp(top - new_top)
        acc, total = acc * fade + tl.sum(share * value, 0), total * fade + tl.sum(share, 0)
        top = new_top
    return acc / tl.maximum(total, 1e-30), tl.load(norm + d, mask=there, other=0.0)


@triton.jit
def _make(
    given, own_table, bias, norm, cos_sin, entries, table, slots, positions, s_page, s_token, page_size,
    own_stride, e_page, e_token, table_stride, eps,
    FIRST: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, RB: tl.constexpr,
    RATE: tl.constexpr, SERIES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program: a token, and the entry of which it is the last."""
    t = tl.program_id(0)
    position = tl.load(positions + t)
    if (position + 1) % RATE == 0:
        slot, begin = tl.load(slots + t).to(tl.int64), position + 1 - RATE
        pages = own_table + slot * own_stride
        h, r = tl.arange(0, HB), tl.arange(0, RB)
        turned, still = h < HALF, r < DIM - 2 * HALF
        a, a_norm = _pooled(
            given, pages, bias, norm, begin, h, turned, s_page, s_token, page_size, FIRST, DIM, RATE, SERIES,
            HB,
        )  # fmt: skip
        b, b_norm = _pooled(
            given, pages, bias, norm, begin, HALF + h, turned, s_page, s_token, page_size, FIRST, DIM, RATE,
            SERIES, HB,
        )  # fmt: skip
        rest, rest_norm = _pooled(
            given, pages, bias, norm, begin, 2 * HALF + r, still, s_page, s_token, page_size, FIRST, DIM,
            RATE, SERIES, RB,
        )  # fmt: skip
        square = tl.sum(a * a) + tl.sum(b * b) + tl.sum(rest * rest)
        scale = tl.rsqrt(square / DIM + eps)
        a, b, rest = a * scale * a_norm, b * scale * b_norm, rest * scale * rest_norm
        angle = cos_sin + begin.to(tl.int64) * 2 * HALF + h
        cos, sin = tl.load(angle, mask=turned, other=0.0), tl.load(angle + HALF, mask=turned, other=0.0)
        last = position + 1 - TOGETHER
        place = _place(table + slot * table_stride, last, last >= 0, e_page, e_token, page_size)
        each = DIM // TOGETHER
        out = entries + place
        tl.store(out + (h // each) * e_token + h % each, a * cos - b * sin, mask=turned)
        h += HALF
        tl.store(out + (h // each) * e_token + h % each, b * cos + a * sin, mask=turned)
        r += 2 * HALF
        tl.store(out + (r // each) * e_token + r % each, rest, mask=still)


def make(
    own: KVLayer,
    own_table: Tensor,
    entries: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    places: Places,
    making: Making,
) -> None:
    """The entries of which tokens at ``positions`` int32[T], in rows ``slots`` int32[T], are the last, in
    ``entries`` ``[pages, page_size, 1, dim / together]``."""
    given, half = own.v, making.cos_sin.shape[1] // 2
    _make[(len(slots),)](
        given, own_table, making.bias, making.norm, making.cos_sin, entries, table, slots, positions,
        given.stride(0), given.stride(1), given.shape[1], own_table.stride(0), entries.stride(0),
        entries.stride(1), table.stride(0), making.eps, FIRST=making.first, DIM=making.dim, HALF=half,
        HB=next_power_of_2(half), RB=next_power_of_2(max(making.dim - 2 * half, 1)),
        RATE=places.rate, SERIES=making.series, TOGETHER=places.together, num_warps=4,
    )  # fmt: skip


@triton.jit
def _look(q, keys, seen, scale, top, total, acc):
    """A block of keys more, which are the values, too: the state of an online softmax."""
    keys = keys.to(q.dtype)
    s = tl.where(seen, tl.dot(q, tl.trans(keys), input_precision="ieee") * scale, NEG)
    new_top = tl.maximum(top, tl.max(s, 1))
    p, fade = tl.where(seen, tl.exp2(s - new_top[:, None]), 0.0), tl.exp2(top - new_top)
    acc = acc * fade[:, None] + tl.dot(p.to(keys.dtype), keys, input_precision="ieee")
    return new_top, total * fade + tl.sum(p, 1), acc


@triton.jit
def _attend(
    q, k, own_table, entries, table, picked, sinks, slots, positions, counts, out, s_page, s_token,
    page_size, own_stride, e_page, e_token, table_stride, heads, window, most, scale,
    DIM: tl.constexpr, DB: tl.constexpr, RATE: tl.constexpr, TOGETHER: tl.constexpr, PICKED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program: M heads of a token."""
    t = tl.program_id(0).to(tl.int64)
    head, d, i = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, DB), tl.arange(0, N)
    position, slot = tl.load(positions + t), tl.load(slots + t).to(tl.int64)
    at = (t * heads + head)[:, None] * DIM + d[None, :]
    used = (head < heads)[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + at, mask=used, other=0.0)
    top = tl.load(sinks + head, mask=head < heads, other=0.0) * 1.4426950408889634
    total = tl.full([M], 1.0, dtype=tl.float32)
    acc = tl.zeros([M, DB], dtype=tl.float32)
    for start in range(tl.maximum(position - window + 1, 0), position + 1, N):
        n = start + i
        live = n <= position
        place = _place(own_table + slot * own_stride, n, live, s_page, s_token, page_size)
        keys = tl.load(k + place[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        top, total, acc = _look(queries, keys, live[None, :], scale, top, total, acc)
    count = tl.minimum(tl.load(counts + t), most)
    each: tl.constexpr = DIM // TOGETHER
    for start in range(0, count, N):
        n = start + i
        live = n < count
        if PICKED:
            n = tl.load(picked + t * most + n, mask=live, other=-1)
            live = n >= 0
        first = (n + 1) * RATE - TOGETHER
        place = _place(table + slot * table_stride, first, live, e_page, e_token, page_size)
        dims = (d // each) * e_token + d % each
        there = live[:, None] & (d < DIM)[None, :]
        keys = tl.load(entries + place[:, None] + dims[None, :], mask=there, other=0.0)
        top, total, acc = _look(queries, keys, live[None, :], scale, top, total, acc)
    tl.store(out + at, acc / total[:, None], mask=used)


def attend(
    q: Tensor,
    own: KVLayer,
    own_table: Tensor,
    entries: Tensor,
    table: Tensor,
    picked: Tensor | None,
    sinks: Tensor,
    slots: Tensor,
    positions: Tensor,
    counts: Tensor,
    scale: float,
    window: int,
    places: Places,
    shared: int = 1 << 30,
) -> Tensor:
    """See ``kernels.compressed.compressed_attention``: of the first T tokens, in rows ``slots`` int32[T].
    ``shared``: bytes of shared memory that a block may have."""
    q = q.contiguous()
    k, out, dim = own.k, q.new_empty(q.shape), own.k.shape[3]
    heads = q.shape[1] // dim
    cut = decode_cut(dim, dim, min(heads, MOST_HEADS), q.itemsize, shared)
    _attend[(len(slots), cdiv(heads, cut.m))](
        q, k, own_table, entries, table, counts if picked is None else picked, sinks, slots, positions,
        counts, out, k.stride(0), k.stride(1), k.shape[1], own_table.stride(0), entries.stride(0),
        entries.stride(1), table.stride(0), heads, window,
        (1 << 30) if picked is None else picked.shape[1], scale * LOG2E, DIM=dim, DB=padded(dim),
        RATE=places.rate, TOGETHER=places.together, PICKED=picked is not None, M=cut.m, N=cut.n,
        num_warps=8 if cut.m > 16 else 4, num_stages=cut.stages,
    )  # fmt: skip
    return out

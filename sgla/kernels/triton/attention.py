# mypy: allow-untyped-defs
"""Paged attention in Triton: decode with split history, and extension of rows that may have a cached prefix.

Lengths and page tables are read on the device, so a captured launch stays valid while they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.kept import int4_dims
from sgla.kernels.triton.common import next_power_of_2
from sgla.kernels.triton.turning import low_of, scale_of, turned

Scales = tuple[Tensor, Tensor] | None  # of k and v in pages of integers: see ``KVLayer``
NEG = tl.constexpr(-1e30)
LOG2E = 1.4426950408889634
LOG2_E = tl.constexpr(LOG2E)


@triton.jit
def _dims(HD: tl.constexpr, HB: tl.constexpr):
    """Dims of a head, padded to HB, a power of two; and which of them there are."""
    d = tl.arange(0, HB)
    if HD < HB:
        inside = d < HD
    else:
        inside = tl.full([HB], 1, dtype=tl.int1)
    return d, inside


@triton.jit
def _columns(VD: tl.constexpr, VB: tl.constexpr, DIMS: tl.constexpr):
    """As ``_dims``, of v; in 4 bits, where so many ``DIMS`` have constants of their own, every other one."""
    if DIMS:
        e = 2 * tl.arange(0, VB // 2)
        within = e < VD
    else:
        e, within = _dims(VD, VB)
    return e, within


@triton.jit
def _pairs(v, words, there, e, page_size, DIMS: tl.constexpr):
    """float32: dims e and those behind them of tokens whose v in 4 bits begins at ``v`` and whose constants
    begin at ``words``."""
    packed = tl.load(v + (e // 2)[None, :], mask=there, other=0).to(tl.int32)
    word = tl.load(words + (e // DIMS)[None, :] * page_size, mask=there, other=0)
    scale, low = scale_of(word), low_of(word)
    even = ((packed & 15) << 19) | 0x3F800000  # the bits of 1 + n / 16
    odd = ((packed >> 4) << 19) | 0x3F800000
    return even.to(tl.float32, bitcast=True) * scale + low, odd.to(tl.float32, bitcast=True) * scale + low


@triton.jit
def _score(s, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log2; ``scale`` holds log2(e), or 1 / softcap with a soft cap."""
    s = s * scale
    if SOFTCAP:
        s = softcap * (2 * tl.sigmoid(2 * s) - 1)
    return s


@triton.jit
def _sink(sink, top):
    """What a sink adds to the sum of weights, which are in relation to ``top``."""
    return tl.exp2(tl.fma(sink, LOG2_E, -top))


# Eager steps pass columns of one upload, which lie anywhere.
@triton.jit(do_not_specialize_on_alignment=["slots", "kv_len", "ends"])
def _decode(
    q, k, v, k_scales, v_scales, page_table, slots, kv_len, ends, out, part, part_ml, sinks, slopes,
    s_page, s_token, s_head, v_page, v_token, v_head, z_page, z_token, z_head, y_page, y_head,
    table_stride, page_size, kv_heads, splits, scale, v_scale, softcap, window,
    HD: tl.constexpr, HB: tl.constexpr, VD: tl.constexpr, VB: tl.constexpr, GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    INT8: tl.constexpr, DIMS: tl.constexpr, CHUNKED: tl.constexpr, RISING: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    none: tl.constexpr = 0 if INT8 else 0.0
    length = tl.load(kv_len + row)
    slot = tl.load(slots + row).to(tl.int64)
    first = 0
    if window > 0:
        if CHUNKED:
            first = (length - 1) // window * window
        else:
            first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), BLOCK) * BLOCK
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    m = tl.arange(0, GROUP_BLOCK)
    d, inside = _dims(HD, HB)
    e, within = _columns(VD, VB, DIMS)
    used = (m[:, None] < GROUP) & inside[None, :]
    given = (m[:, None] < GROUP) & within[None, :]
    at = (row * kv_heads + head) * GROUP + m
    query = tl.load(q + at[:, None] * HD + d[None, :], mask=used, other=0.0)
    if INT8:
        query = turned(query, HD, HB).to(query.dtype)
    top = tl.full([GROUP_BLOCK], NEG, dtype=tl.float32)
    total = tl.zeros([GROUP_BLOCK], dtype=tl.float32)
    acc = tl.zeros([GROUP_BLOCK, VB // 2 if DIMS else VB], dtype=tl.float32)
    odd = acc
    pages = page_table + slot * table_stride
    if RISING:
        slope = tl.load(slopes + head * GROUP + m, mask=m < GROUP, other=0.0) * LOG2_E
    if ENDS:
        position = tl.load(ends + row) - 1
    for start in range(begin, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        live = n < end
        if ENDS:
            live = live & ((n < position) | (n == length - 1))
        page = tl.load(pages + n // page_size, mask=live, other=0).to(tl.int64)
        place = page * s_page + (n % page_size) * s_token + head * s_head
        there = live[None, :] & inside[:, None]
        keys = tl.load(k + place[None, :] + d[:, None], mask=there, other=none).to(query.dtype)
        s = tl.dot(query, keys, input_precision="ieee")
        if INT8:
            z = page * z_page + (n % page_size) * z_token + head * z_head
            s = s * tl.load(k_scales + z, mask=live, other=0.0)[None, :]
        s = _score(s, scale, softcap, SOFTCAP)
        if RISING:
            s += slope[:, None] * n[None, :]
        s = tl.where(live[None, :], s, NEG)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        p = tl.where(live[None, :], p, 0.0)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        there = live[:, None] & within[None, :]
        place = page * v_page + (n % page_size) * v_token + head * v_head
        if DIMS:
            y = page * y_page + head * y_head + n % page_size
            values, more = _pairs(v + place[:, None], v_scales + y[:, None], there, e, page_size, DIMS)
            p = p.to(query.dtype)
            odd = odd * fade[:, None] + tl.dot(p, more.to(query.dtype), input_precision="ieee")
        else:
            if INT8:
                p = p * tl.load(v_scales + z, mask=live, other=0.0)[None, :]
            values = tl.load(v + place[:, None] + e[None, :], mask=there, other=none)
        values = values.to(query.dtype)
        acc = acc * fade[:, None] + tl.dot(p.to(query.dtype), values, input_precision="ieee")
        top = new_top
    if splits == 1:
        if SINKS:
            total += _sink(tl.load(sinks + head * GROUP + m, mask=m < GROUP, other=0.0), top)
        by = v_scale / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + at[:, None] * VD + e[None, :], acc * by, mask=given)
        if DIMS:
            tl.store(out + at[:, None] * VD + e[None, :] + 1, odd * by, mask=given)
    else:
        slice_ = at * splits + split
        tl.store(part + slice_[:, None] * VD + e[None, :], acc, mask=given)
        if DIMS:
            tl.store(part + slice_[:, None] * VD + e[None, :] + 1, odd, mask=given)
        tl.store(part_ml + slice_ * 2, top, mask=m < GROUP)
        tl.store(part_ml + slice_ * 2 + 1, total, mask=m < GROUP)


@triton.jit
def _merge(
    part, part_ml, out, sinks, splits, heads, v_scale, HD: tl.constexpr, HB: tl.constexpr, SINKS: tl.constexpr
):
    """Join the splits of one query head."""
    head = tl.program_id(0).to(tl.int64)
    d, inside = _dims(HD, HB)
    top = NEG
    total = 0.0
    acc = tl.zeros([HB], dtype=tl.float32)
    for split in range(splits):
        slice_ = head * splits + split
        m = tl.load(part_ml + slice_ * 2)
        share = tl.load(part_ml + slice_ * 2 + 1)
        x = tl.load(part + slice_ * HD + d, mask=inside, other=0.0)
        new_top = tl.maximum(top, m)
        old, new = tl.exp2(top - new_top), tl.exp2(m - new_top)
        total = total * old + share * new
        acc = acc * old + x * new
        top = new_top
    if SINKS:
        total += _sink(tl.load(sinks + head % heads), top)
    tl.store(out + head * HD + d, acc / tl.maximum(total, 1e-30) * v_scale, mask=inside)


@triton.jit
def _extend(
    q, k, v, k_scales, v_scales, page_table, tiles, out, sinks, slopes, until, origin,
    s_page, s_token, s_head, v_page, v_token, v_head, z_page, z_token, z_head, y_page, y_head,
    table_stride, page_size, q_heads, scale, v_scale, softcap, window,
    HD: tl.constexpr, HB: tl.constexpr, VD: tl.constexpr, VB: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    INT8: tl.constexpr, DIMS: tl.constexpr, UNTIL: tl.constexpr, ORIGIN: tl.constexpr,
    CHUNKED: tl.constexpr, RISING: tl.constexpr,
):  # fmt: skip
    tile, q_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    head = q_head // GROUP
    none: tl.constexpr = 0 if INT8 else 0.0
    slot = tl.load(tile).to(tl.int64)
    begin = tl.load(tile + 1)
    start_at = tl.load(tile + 2)
    count = tl.load(tile + 3)
    i = tl.arange(0, BLOCK_M)
    d, inside = _dims(HD, HB)
    e, within = _columns(VD, VB, DIMS)
    used = (i[:, None] < count) & inside[None, :]
    at = (begin + i).to(tl.int64) * q_heads + q_head
    query = tl.load(q + at[:, None] * HD + d[None, :], mask=used, other=0.0)
    if INT8:
        query = turned(query, HD, HB).to(query.dtype)
    position = start_at + i
    end = start_at + count
    if UNTIL:
        unseen = tl.load(until + begin + i, mask=i < count, other=0).to(tl.int32)
        end = tl.maximum(end, tl.max(unseen, 0))
    else:
        unseen = position + 1
    if ORIGIN:
        position = tl.load(origin + begin + i, mask=i < count, other=end).to(tl.int32)
        start_at = tl.min(position, 0)
    oldest = 0  # what is behind may be another request's, and no number
    if window > 0:
        if CHUNKED:
            oldest = start_at // window * window
        else:
            oldest = tl.maximum(start_at - window + 1, 0)
    first = oldest // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], NEG, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, VB // 2 if DIMS else VB], dtype=tl.float32)
    odd = acc
    pages = page_table + slot * table_stride
    if RISING:
        slope = tl.load(slopes + q_head) * LOG2_E
    for start in range(first, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        page = tl.load(pages + n // page_size, mask=n < end, other=0).to(tl.int64)
        place = page * s_page + (n % page_size) * s_token + head * s_head
        known = (n >= oldest) & (n < end)
        there = known[None, :] & inside[:, None]
        keys = tl.load(k + place[None, :] + d[:, None], mask=there, other=none).to(query.dtype)
        s = tl.dot(query, keys, input_precision="ieee")
        if INT8:
            z = page * z_page + (n % page_size) * z_token + head * z_head
            s = s * tl.load(k_scales + z, mask=known, other=0.0)[None, :]
        s = _score(s, scale, softcap, SOFTCAP)
        if RISING:
            s += slope * n[None, :]
        seen = n[None, :] < unseen[:, None]
        if window > 0:
            if CHUNKED:
                seen = seen & (n[None, :] >= position[:, None] // window * window)
            else:
                seen = seen & (n[None, :] > position[:, None] - window)
        s = tl.where(seen, s, NEG)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.where(seen, tl.exp2(s - new_top[:, None]), 0.0)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        there = known[:, None] & within[None, :]
        place = page * v_page + (n % page_size) * v_token + head * v_head
        if DIMS:
            y = page * y_page + head * y_head + n % page_size
            values, more = _pairs(v + place[:, None], v_scales + y[:, None], there, e, page_size, DIMS)
            p = p.to(query.dtype)
            odd = odd * fade[:, None] + tl.dot(p, more.to(query.dtype), input_precision="ieee")
        else:
            if INT8:
                p = p * tl.load(v_scales + z, mask=known, other=0.0)[None, :]
            values = tl.load(v + place[:, None] + e[None, :], mask=there, other=none)
        values = values.to(query.dtype)
        acc = acc * fade[:, None] + tl.dot(p.to(query.dtype), values, input_precision="ieee")
        top = new_top
    if SINKS:
        total += _sink(tl.load(sinks + q_head), top)
    by = v_scale / tl.maximum(total, 1e-30)[:, None]
    given = (i[:, None] < count) & within[None, :]
    tl.store(out + at[:, None] * VD + e[None, :], acc * by, mask=given)
    if DIMS:
        tl.store(out + at[:, None] * VD + e[None, :] + 1, odd * by, mask=given)


def _scales(scales: Scales, none: Tensor) -> tuple[Tensor, Tensor]:
    if scales is None:
        return none, none
    k, v = scales
    return k, v.view(torch.int32) if v.dtype == torch.bfloat16 else v


def _places(scales: Scales) -> tuple[int, int, int, int, int]:
    """Strides of a page, a token and a head of k, which v in int8 has too; of a page and a head of v in 4
    bits, in words."""
    if scales is None:
        return 0, 0, 0, 0, 0
    k, v = scales
    page, head, token = k.stride()
    if v.dtype == torch.bfloat16:
        return page, token, head, v.stride(0) // 2, v.stride(1) // 2
    assert v.stride() == k.stride()
    return page, token, head, 0, 0


def _v_dims(v: Tensor) -> tuple[int, int]:
    """How many dims v has, and, in 4 bits, how many have constants of their own."""
    if v.dtype != torch.uint8:
        return v.shape[3], 0
    return 2 * v.shape[3], int4_dims(2 * v.shape[3])


def padded(dim: int) -> int:
    """Dims of a head as tensor cores take them."""
    return max(16, next_power_of_2(dim))


def scales(scale: float, softcap: float) -> tuple[float, float]:
    """``(scale, softcap)`` as the kernels want them: scores in units of log2."""
    return (scale / softcap, softcap * LOG2E) if softcap else (scale * LOG2E, 0.0)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    slots: Tensor,
    kv_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    splits: int = 1,
    v_scale: float = 1.0,
    shared: int = 1 << 30,
    sinks: Tensor | None = None,
    kv_scales: Scales = None,
    chunked: bool = False,
    slopes: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """One query token a row: q ``[R or more, Hq * hd]`` -> ``[R or more, Hq * vd]``, R rows of it;
    k, v ``[pages, page_size, Hkv, hd or vd]``.

    ``shared``: bytes of shared memory that a block may have.
    Of e4m3 pages, ``v_scale`` times the stored v is meant; k's scale belongs into ``scale``. ``kv_scales``:
    of pages of integers. ``chunked`` and ``slopes``: see ``ops.attention``. ``ends``: see ``DeviceBatch``.

    Flash-decoding (Dao et al., 2023): each history is cut into ``splits`` shares that a second kernel joins.
    A row with ``kv_len`` 0 gives zeros.
    """
    rows = slots.shape[0]
    page_size, kv_heads, dim = k.shape[1:]
    group = q.shape[1] // (kv_heads * dim)
    q = q.contiguous()  # it may lie beside k and v (``Attention.in_place``)
    values, dims = _v_dims(v)
    out = q.new_empty(q.shape[0], kv_heads * group * values)
    heads = rows * kv_heads * group
    part = q.new_empty(heads * splits, values, dtype=torch.float32) if splits > 1 else out
    part_ml = q.new_empty(heads * splits, 2, dtype=torch.float32) if splits > 1 else out
    factor, cap = scales(scale, softcap)
    rows_of_group = max(16, next_power_of_2(group))
    cut = decode_cut(max(dim, values), rows_of_group, q.itemsize, shared)
    _decode[(rows, kv_heads, splits)](
        q, k, v, *_scales(kv_scales, q), page_table, slots, kv_len, kv_len if ends is None else ends, out,
        part, part_ml, q if sinks is None else sinks, q if slopes is None else slopes,
        *k.stride()[:3], *v.stride()[:3], *_places(kv_scales),
        page_table.stride(0), page_size, kv_heads, splits, factor, v_scale, cap, window,
        HD=dim, HB=padded(dim), VD=values, VB=padded(values),
        GROUP=group, GROUP_BLOCK=rows_of_group, BLOCK=cut.n, SOFTCAP=softcap > 0,
        SINKS=sinks is not None, INT8=kv_scales is not None, DIMS=dims, CHUNKED=chunked,
        RISING=slopes is not None, ENDS=ends is not None,
        num_warps=4, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(heads,)](
            part, part_ml, out, q if sinks is None else sinks, splits, kv_heads * group, v_scale,
            HD=values, HB=padded(values), SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
    return out


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """Shares of a history so that a small batch still fills the chip: at most 32, a power of two."""
    wanted = max(1, processors * 2 // max(1, rows * kv_heads))
    return min(32, 1 << (wanted.bit_length() - 1))


class Cut(NamedTuple):
    """Query tokens of a program, keys it looks at at a time,
    and how many times those lie in shared memory."""

    m: int
    n: int
    stages: int


def extend_cut(dim: int, size: int, shared: int) -> Cut:
    """The largest tiles of a prompt that fit. What Triton takes (3.4 to 3.9) for capability 8.0 to 9.0:
    queries, one block of keys and one of values, their scores, and the sums of rows; for bfloat16 mostly
    less."""
    n = 64 if dim <= 128 else 32
    cuts = [Cut(m, keys, 2) for m, keys in ((128, n), (64, n), (64, n // 2), (32, n // 2), (16, 16))]
    cuts = cuts[dim > 256 :]  # sums of the largest tile would not fit into registers
    return _fitting(cuts, lambda c: size * (padded(dim) * (c.m + 2 * c.n) + c.m * c.n) + 4 * c.m, shared)


def decode_cut(dim: int, rows: int, size: int, shared: int) -> Cut:
    """As ``extend_cut``; ``rows``: query heads of a KV head, padded."""
    n = 64 if dim <= 128 else 32
    cuts = [Cut(rows, keys, stages) for keys, stages in ((n, 3), (n, 2), (n // 2, 2), (16, 2))]
    return _fitting(
        cuts, lambda c: size * (padded(dim) * (c.m + 2 * c.n * (c.stages - 1)) + c.m * c.n) + 4 * c.m, shared
    )


def _fitting(cuts: list[Cut], needs: Callable[[Cut], int], shared: int) -> Cut:
    return next((cut for cut in cuts if needs(cut) <= shared), cuts[-1])


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    scale: float,
    out: Tensor,
    cut: Cut,
    window: int = 0,
    softcap: float = 0.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    kv_scales: Scales = None,
    until: Tensor | None = None,
    chunked: bool = False,
    slopes: Tensor | None = None,
    origin: Tensor | None = None,
) -> None:
    """Causal attention of rows with any number of query tokens: q ``[T, Hq * hd]`` -> ``out`` ``[T, Hq *
    vd]``; ``tiles`` int32[n, 4]: slot, first token in q, its position, and how many tokens (at most
    ``cut.m``; 0: none); ``v_scale`` and ``kv_scales`` as in ``decode``. ``until`` int64[T]: the first place
    that a token does not see, where that is not the one behind its own; ``origin`` int64[T]: the place from
    which its window is counted back, where that is not its own; ``chunked`` and ``slopes``: see
    ``ops.attention``. Tokens in no tile are left as they are."""
    page_size, kv_heads, dim = k.shape[1:]
    q_heads, (values, dims) = q.shape[1] // dim, _v_dims(v)
    factor, cap = scales(scale, softcap)
    _extend[(tiles.shape[0], q_heads)](
        q, k, v, *_scales(kv_scales, q), page_table, tiles, out, q if sinks is None else sinks,
        q if slopes is None else slopes,
        *(tiles if places is None else places for places in (until, origin)),
        *k.stride()[:3], *v.stride()[:3], *_places(kv_scales), page_table.stride(0), page_size, q_heads,
        factor, v_scale, cap, window,
        HD=dim, HB=padded(dim), VD=values, VB=padded(values),
        GROUP=q_heads // kv_heads, BLOCK_M=cut.m, BLOCK_N=cut.n, SOFTCAP=softcap > 0,
        SINKS=sinks is not None, INT8=kv_scales is not None, DIMS=dims, UNTIL=until is not None,
        ORIGIN=origin is not None, CHUNKED=chunked, RISING=slopes is not None,
        num_warps=8 if cut.m == 128 else 4, num_stages=cut.stages,
    )  # fmt: skip

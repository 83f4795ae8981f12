# mypy: allow-untyped-defs
"""k and v in pages of integers. Keys are turned (``ops.turned``), in int8, and each token's head has a scale,
as has that of v in int8; v in 4 bits has constants for each few dims (``ops.to_int4``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.kept import int4_dims
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton.common import cdiv, next_power_of_2

ROWS = 16  # heads of a program, as few as tensor cores take


@triton.jit
def turned(x, HD: tl.constexpr, HB: tl.constexpr):
    """float32 ``[M, HB]``: x times a Hadamard matrix, in blocks of the largest power of two in HD."""
    i, j = tl.arange(0, HB)[:, None], tl.arange(0, HB)[None, :]
    size: tl.constexpr = HD & -HD
    bits = i & j & (size - 1)
    bits = bits ^ (bits >> 8)
    bits = (bits ^ (bits >> 4)) & 15
    odd = 0x6996 >> bits  # of how many
    matrix = ((odd << 31) | 0x3F800000).to(tl.float32, bitcast=True)
    if size < HB:
        matrix = tl.where(i // size == j // size, matrix, 0.0)
    return tl.dot(x, matrix.to(x.dtype), input_precision="ieee")


@triton.jit
def _nearest(x, least, most):
    """To the nearest whole number, ties to even, as torch rounds; 0 for what is no number."""
    near = (x + 12582912.0) - 12582912.0
    return tl.where(near == near, tl.minimum(tl.maximum(near, least), most), 0.0)


@triton.jit
def _bfloat16(x):
    """The bits of x float32 as the nearest bfloat16, those of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, 0x7FC00000)


@triton.jit
def low_of(word):
    """float32: what ``scale_of`` is added to."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(word):
    """float32, of the constants of a v in 4 bits."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["out_loc"])
def _store_int4(
    qkv, pages, words, out_loc, pairs, first, kv_heads, page_size, s_qkv, s_page, s_token, s_head, z_page,
    z_head, HD: tl.constexpr, HB: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS heads of tokens of v, which begin at column ``first``."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < pairs
    token, head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    e = tl.arange(0, HB // 2)
    there = live[:, None] & (2 * e < HD)[None, :]
    x = qkv + (token * s_qkv + first + head * HD)[:, None] + 2 * e[None, :]
    GROUPS: tl.constexpr = HB // DIMS
    even = tl.load(x, mask=there, other=0.0).to(tl.float32).reshape(ROWS, GROUPS, DIMS // 2)
    odd = tl.load(x + 1, mask=there, other=0.0).to(tl.float32).reshape(ROWS, GROUPS, DIMS // 2)
    unfit = tl.sum(even * 0.0 + odd * 0.0, 2)
    least = tl.min(tl.minimum(even, odd), 2) + unfit
    most = tl.max(tl.maximum(even, odd), 2) + unfit
    scale = _bfloat16((most - least) * (16 / 15))
    of = scale.to(tl.float32, bitcast=True)
    low = _bfloat16(least - of)
    from_, by = low.to(tl.float32, bitcast=True)[:, :, None], tl.where(of == 0, 1.0, of)[:, :, None]
    n = _nearest(((even - from_) / by - 1) * 16, 0.0, 15.0).to(tl.int32)
    n |= _nearest(((odd - from_) / by - 1) * 16, 0.0, 15.0).to(tl.int32) << 4
    place = tl.load(out_loc + token, mask=live, other=0).to(tl.int64)
    page, at = place // page_size, place % page_size
    to = page * s_page + at * s_token + head * s_head
    tl.store(pages + to[:, None] + e[None, :], n.reshape(ROWS, HB // 2).to(tl.uint8), mask=there)
    g = tl.arange(0, GROUPS)
    z = (page * z_page + head * z_head + at)[:, None] + g[None, :] * page_size
    word = ((scale >> 16) & 0xFFFF) | low
    tl.store(words + z, word, mask=live[:, None] & (g * DIMS < HD)[None, :])


@triton.jit(do_not_specialize_on_alignment=["out_loc"])
def _store(
    qkv, k_pages, v_pages, k_scales, v_scales, out_loc, pairs, q_heads, kv_heads, page_size, s_qkv,
    s_page, s_token, s_head, z_page, z_token, z_head,
    HD: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS heads of tokens, of k or of v."""
    kind = tl.program_id(1)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < pairs
    token, head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    d = tl.arange(0, HB)
    there = live[:, None] & (d < HD)[None, :]
    column = (q_heads + kind * kv_heads + head) * HD
    x = tl.load(qkv + (token * s_qkv + column)[:, None] + d[None, :], mask=there, other=0.0)
    y = x.to(tl.float32)
    if kind == 0:
        y = turned(x, HD, HB) / (HD & -HD)
    unfit = tl.sum(y * 0.0, 1)  # NaN where a value is not finite, else 0
    scale = tl.max(tl.abs(y), 1) / 127
    near = _nearest(y / tl.where(scale == 0, 1.0, scale)[:, None], -127.0, 127.0)
    place = tl.load(out_loc + token, mask=live, other=0).to(tl.int64)
    page, at = place // page_size, place % page_size
    to = page * s_page + at * s_token + head * s_head
    z = page * z_page + at * z_token + head * z_head
    pages, scales = k_pages, k_scales
    if kind == 1:
        pages, scales = v_pages, v_scales
    tl.store(pages + to[:, None] + d[None, :], near.to(tl.int8), mask=there)
    tl.store(scales + z, scale + unfit, mask=live)


def shared(dim: int, size: int) -> int:
    """Bytes of shared memory that a block of a kernel takes which turns heads of ``dim`` values of ``size``
    bytes: the matrix, and ROWS heads."""
    padded = max(16, next_power_of_2(dim))
    return size * padded * (padded + ROWS)


def store(qkv: Tensor, kv: KVLayer, out_loc: Tensor) -> None:
    """The k and v of qkv ``[T, (Hq + 2 Hkv) * hd]``, whose rows may lie apart, go to pages of integers;
    ``out_loc`` int32[T]."""
    assert kv.k_scales is not None
    assert kv.v_scales is not None
    page_size, kv_heads, dim = kv.k.shape[1:]
    pairs = qkv.shape[0] * kv_heads
    page, head, token = kv.k_scales.stride()
    packed, padded = kv.v.dtype == torch.uint8, max(16, next_power_of_2(dim))
    _store[(cdiv(pairs, ROWS), 1 if packed else 2)](
        qkv, kv.k, kv.k if packed else kv.v, kv.k_scales, kv.k_scales if packed else kv.v_scales, out_loc,
        pairs, qkv.shape[1] // dim - 2 * kv_heads,
        kv_heads, page_size, qkv.stride(0), *kv.k.stride()[:3], page, token, head, HD=dim, HB=padded,
        ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    if packed:
        words = kv.v_scales.view(torch.int32)
        _store_int4[(cdiv(pairs, ROWS),)](
            qkv, kv.v, words, out_loc, pairs, qkv.shape[1] - kv_heads * dim, kv_heads, page_size,
            qkv.stride(0), *kv.v.stride()[:3], *words.stride()[:2], HD=dim, HB=padded, DIMS=int4_dims(dim),
            ROWS=ROWS, num_warps=4,
        )  # fmt: skip

# mypy: allow-untyped-defs
"""k and v in int8 pages: keys are turned (``ops.turned``), each token's head has a scale."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.ops import KVLayer

ROWS = 16  # heads of a program, as few as tensor cores take


@triton.jit
def turned(x, HD: tl.constexpr, HB: tl.constexpr):
    """float32 ``[M, HB]``: x times a Hadamard matrix, in blocks of the largest power of two in HD."""
    i, j = tl.arange(0, HB)[:, None], tl.arange(0, HB)[None, :]
    size: tl.constexpr = HD & -HD
    odd = i & j & (size - 1)
    odd = odd ^ (odd >> 8)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    matrix = tl.where(i // size == j // size, 1 - 2 * odd, 0)
    return tl.dot(x, matrix.to(x.dtype), input_precision="ieee")


@triton.jit(do_not_specialize_on_alignment=["out_loc"])
def _store(
    qkv, k_pages, v_pages, k_scales, v_scales, out_loc, pairs, q_heads, kv_heads, page_size, s_qkv,
    s_page, s_token, s_head, z_page, z_token, z_head, HD: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr,
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
    near = y / tl.where(scale == 0, 1.0, scale)[:, None]
    near = (near + 12582912.0) - 12582912.0  # to the nearest, ties to even, as torch rounds
    near = tl.where(near == near, tl.minimum(tl.maximum(near, -127.0), 127.0), 0.0)
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
    padded = max(16, triton.next_power_of_2(dim))
    return size * padded * (padded + ROWS)


def store(qkv: Tensor, kv: KVLayer, out_loc: Tensor) -> None:
    """The k and v of qkv ``[T, (Hq + 2 Hkv) * hd]``, whose rows may lie apart, go to int8 pages; ``out_loc``
    int32[T]."""
    assert kv.k_scales is not None
    assert kv.v_scales is not None
    page_size, kv_heads, dim = kv.k.shape[1:]
    pairs = qkv.shape[0] * kv_heads
    page, head, token = kv.k_scales.stride()
    _store[(triton.cdiv(pairs, ROWS), 2)](
        qkv, kv.k, kv.v, kv.k_scales, kv.v_scales, out_loc, pairs, qkv.shape[1] // dim - 2 * kv_heads,
        kv_heads, page_size, qkv.stride(0), *kv.k.stride()[:3], page, token, head, HD=dim,
        HB=max(16, triton.next_power_of_2(dim)), ROWS=ROWS, num_warps=4,
    )  # fmt: skip

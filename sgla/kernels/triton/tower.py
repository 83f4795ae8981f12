# mypy: allow-untyped-defs
"""Rotation of queries and keys in towers of pictures, and norms of what lacks a bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin_early, _pdl, _warps


@triton.jit(do_not_specialize=["stride"])
def _rotate(
    qkv, cos, sin, stride, HEADS: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _begin_early(PDL)
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HB), tl.arange(0, DB)
    inside = d < HALF
    live = (h[:, None] < HEADS) & inside[None, :]
    first = qkv + token * stride + h[:, None] * (2 * HALF) + d[None, :]
    a = tl.load(first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=live, other=0.0).to(tl.float32)
    at = token * (2 * HALF) + d
    c1 = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + at + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(first, a * c1 - b * s1, mask=live)
    tl.store(first + HALF, b * c2 + a * s2, mask=live)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Turn q and k in ``qkv`` ``[T, 3 * H * d]``, where they lie before v, by ``cos`` and ``sin`` ``[T, d]``,
    in place: dims i and i + d / 2 together."""
    half = cos.shape[1] // 2
    _rotate[(qkv.shape[0],)](
        qkv, cos, sin, qkv.stride(0), HEADS=2 * heads, HALF=half, HB=triton.next_power_of_2(2 * heads),
        DB=max(16, triton.next_power_of_2(half)), num_warps=4, **_pdl(),
    )  # fmt: skip


@triton.jit
def _shifted_norm(x, shift, weight, out, d, eps, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    v += tl.load(shift + i, mask=i < d, other=0.0)
    w = tl.load(weight + i, mask=i < d, other=0.0)
    scale = tl.rsqrt(tl.sum(v * v) / d + eps)
    tl.store(out + row * d + i, v * scale * w, mask=i < d)


def shifted_norm(x: Tensor, shift: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMSNorm of ``x + shift``: x ``[T, d]`` contiguous, shift and weight float32[d]."""
    out, d = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(d)
    _shifted_norm[(len(x),)](x, shift, weight, out, d, eps, BLOCK=block, num_warps=_warps(block), **_pdl())
    return out

# mypy: allow-untyped-defs
"""Rotation of queries and keys in towers of pictures, and attention in small windows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin_early, _pdl


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
def _turned(x, at, turn, cos, sin, mask, HALF: tl.constexpr):
    """Both halves of heads, rotated."""
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=mask, other=0.0).to(tl.float32)
    c1 = tl.load(cos + turn, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin + turn, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos + turn + HALF, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin + turn + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    return (a * c1 - b * s1).to(kind), (b * c2 + a * s2).to(kind)


@triton.jit(do_not_specialize=["stride"])
def _windows(
    qkv, cos, sin, ends, out, stride, scale, HEADS: tl.constexpr, HALF: tl.constexpr, T: tl.constexpr,
    DB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one head of one window."""
    _begin_early(PDL)
    window, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(ends + window).to(tl.int64)
    count = tl.load(ends + window + 1).to(tl.int64) - begin
    t, d = tl.arange(0, T), tl.arange(0, DB)
    mask = (t < count)[:, None] & (d < HALF)[None, :]
    token = (begin + t)[:, None]
    width = HEADS * 2 * HALF
    turn = token * (2 * HALF) + d[None, :]
    at = token * stride + head * (2 * HALF) + d[None, :]
    q1, q2 = _turned(qkv, at, turn, cos, sin, mask, HALF)
    k1, k2 = _turned(qkv, at + width, turn, cos, sin, mask, HALF)
    scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    scores = tl.where((t < count)[None, :], scores, float("-inf"))
    shares = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(shares, 1)[:, None]
    shares = shares.to(q1.dtype)
    v1 = tl.load(qkv + at + 2 * width, mask=mask, other=0.0)
    v2 = tl.load(qkv + at + 2 * width + HALF, mask=mask, other=0.0)
    put = out + token * width + head * (2 * HALF) + d[None, :]
    tl.store(put, tl.dot(shares, v1) / total, mask=mask)
    tl.store(put + HALF, tl.dot(shares, v2) / total, mask=mask)


def windows(
    qkv: Tensor, cos: Tensor, sin: Tensor, ends: Tensor, longest: int, heads: int, scale: float
) -> Tensor:
    """Attention of tokens that see those of their window alone: ``qkv`` ``[T, 3 * H * d]`` -> ``[T, H * d]``.
    ``cos`` and ``sin`` as in ``rotate``; ``ends`` int[N + 1]: where each of N windows begins, and where the
    last one ends, with at most ``longest`` tokens."""
    half = cos.shape[1] // 2
    out = torch.empty(qkv.shape[0], heads * 2 * half, dtype=qkv.dtype, device=qkv.device)
    _windows[(len(ends) - 1, heads)](
        qkv, cos, sin, ends, out, qkv.stride(0), scale, HEADS=heads, HALF=half,
        T=max(16, triton.next_power_of_2(longest)), DB=max(16, triton.next_power_of_2(half)), num_warps=4,
        **_pdl(),
    )  # fmt: skip
    return out

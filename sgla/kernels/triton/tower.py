# mypy: allow-untyped-defs
"""Rotation of queries and keys in towers of pictures, and norms of what lacks a bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin_early, _pdl, _warps, next_power_of_2


@triton.jit(do_not_specialize=["stride"])
def _turn(
    qkv, angles, stride, HEADS: tl.constexpr, DIM: tl.constexpr, HB: tl.constexpr, DB: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _begin_early(PDL)
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HB), tl.arange(0, DB)
    live = (h[:, None] < HEADS) & (d[None, :] < DIM)
    at = qkv + token * stride + h[:, None] * DIM + d[None, :]
    a, b = tl.split(tl.reshape(tl.load(at, mask=live, other=0.0).to(tl.float32), (HB, DB // 2, 2)))
    by = tl.load(angles + token * DIM + d, mask=d < DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(by, (1, DB // 2, 2)))
    made = tl.join(a * cos - b * sin, b * cos + a * sin)
    tl.store(at, tl.reshape(made, (HB, DB)), mask=live)


def turn(qkv: Tensor, angles: Tensor, heads: int) -> None:
    """Turn q and k in ``qkv`` ``[T, 3 * H * d]``, where they lie before v, in place: dims 2 i and 2 i + 1 by
    the cosine and the sine at the same places of ``angles`` float32 ``[T, d]``."""
    dim = angles.shape[1]
    _turn[(qkv.shape[0],)](
        qkv, angles, qkv.stride(0), HEADS=2 * heads, DIM=dim, HB=next_power_of_2(2 * heads),
        DB=next_power_of_2(dim), num_warps=4, **_pdl(),
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
    block = next_power_of_2(d)
    _shifted_norm[(len(x),)](x, shift, weight, out, d, eps, BLOCK=block, num_warps=_warps(block), **_pdl())
    return out

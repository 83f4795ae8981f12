# mypy: allow-untyped-defs
"""Activations as e4m3 numbers with one scale a token, for the matrix units' 8-bit mode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.elementwise import _begin, _pdl, _warps


@triton.jit
def _quantize(x, out, scale, d, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(v), 0) / 448.0, 1e-30)
    tl.store(scale + row, s)
    v = tl.minimum(tl.maximum(v / s, -448.0), 448.0)
    tl.store(out + row * d + i, v.to(out.dtype.element_ty), mask=i < d)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x ``[T, d]`` -> e4m3 ``[T, d]`` and float32 ``[T]``, whose product is x up to rounding."""
    tokens, d = x.shape
    out = torch.empty(tokens, d, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(d)
    _quantize[(tokens,)](x, out, scale, d, BLOCK=block, num_warps=_warps(block), **_pdl())
    return out, scale


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (weight * scale[:, None]).T + bias``: x bfloat16 ``[T, k]``, weight e4m3 ``[n, k]`` -> bfloat16 ``[T, n]``.

    x is rounded to e4m3, token by token. n and k must be multiples of 16.
    """
    q, by_row = quantize(x)
    bias = None if bias is None else bias.to(torch.bfloat16)
    return torch._scaled_mm(
        q, weight.t(), by_row[:, None], scale[None, :], bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )

# mypy: allow-untyped-defs
"""Activations as e4m3 numbers with one scale a token, for the matrix units' 8-bit mode."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _activate, _begin, _pdl, _warps


class Rounded(NamedTuple):
    """e4m3 ``[T, d]`` and float32 ``[T]``, whose product is a tensor up to rounding."""

    numbers: Tensor
    scale: Tensor


@triton.jit
def _store(v, numbers, scale, row, i, d):
    s = tl.maximum(tl.max(tl.abs(v), 0) / 448.0, 1e-30)
    tl.store(scale + row, s)
    v = tl.minimum(tl.maximum(v / s, -448.0), 448.0)
    tl.store(numbers + row * d + i, v.to(numbers.dtype.element_ty), mask=i < d)


@triton.jit
def _quantize(x, numbers, scale, d, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    _store(v, numbers, scale, row, i, d)


@triton.jit
def _norm_quantize(x, weight, numbers, scale, d, eps, s_x, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * s_x + i, mask=i < d, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    y = (v * tl.rsqrt(tl.sum(v * v) / d + eps) * w).to(x.dtype.element_ty)
    _store(y.to(tl.float32), numbers, scale, row, i, d)


@triton.jit
def _add_norm_quantize(
    x, residual, weight, out, total, numbers, scale, d, eps, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    v += tl.load(residual + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    h = v.to(total.dtype.element_ty)
    tl.store(total + row * d + i, h, mask=i < d)
    v = h.to(tl.float32)
    y = (v * tl.rsqrt(tl.sum(v * v) / d + eps) * w).to(out.dtype.element_ty)
    tl.store(out + row * d + i, y, mask=i < d)
    _store(y.to(tl.float32), numbers, scale, row, i, d)


@triton.jit
def _act_mul_quantize(
    x, numbers, scale, f, GELU: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * f + i, mask=i < f, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + i, mask=i < f, other=0.0).to(tl.float32)
    y = (_activate(gate, GELU) * up).to(x.dtype.element_ty)
    _store(y.to(tl.float32), numbers, scale, row, i, f)


def _empty(tokens: int, d: int, device: torch.device) -> Rounded:
    numbers = torch.empty(tokens, d, dtype=torch.float8_e4m3fn, device=device)
    return Rounded(numbers, torch.empty(tokens, dtype=torch.float32, device=device))


def quantize(x: Tensor) -> Rounded:
    """x ``[T, d]``, token by token."""
    tokens, d = x.shape
    out = _empty(tokens, d, x.device)
    block = triton.next_power_of_2(d)
    _quantize[(tokens,)](x, *out, d, BLOCK=block, num_warps=_warps(block), **_pdl())
    return out


def norm_quantize(x: Tensor, weight: Tensor, eps: float) -> Rounded:
    """``ops.rms_norm`` of x ``[T, d]``, whose rows may lie apart, rounded."""
    tokens, d = x.shape
    out = _empty(tokens, d, x.device)
    block = triton.next_power_of_2(d)
    _norm_quantize[(tokens,)](
        x, weight, *out, d, eps, x.stride(0), BLOCK=block, num_warps=_warps(block), **_pdl()
    )
    return out


def add_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Rounded]:
    """``(norm, total)`` of ``ops.add_rms_norm``, and the norm rounded."""
    tokens, d = x.shape
    out, total, rounded = torch.empty_like(x), torch.empty_like(x), _empty(tokens, d, x.device)
    block = triton.next_power_of_2(d)
    _add_norm_quantize[(tokens,)](
        x, residual, weight, out, total, *rounded, d, eps, BLOCK=block, num_warps=_warps(block), **_pdl()
    )
    return out, total, rounded


def act_mul_quantize(x: Tensor, kind: str) -> Rounded:
    """``ops.act_mul``, rounded."""
    tokens, f = x.shape[0], x.shape[1] // 2
    out = _empty(tokens, f, x.device)
    block = triton.next_power_of_2(f)
    warps = 16 if block > 8192 else _warps(block)
    _act_mul_quantize[(tokens,)](x, *out, f, GELU=kind == "gelu_tanh", BLOCK=block, num_warps=warps, **_pdl())
    return out


def linear(x: Rounded, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ (weight * scale[:, None]).T + bias``:
    x ``[T, k]``, weight e4m3 ``[n, k]`` -> bfloat16 ``[T, n]``.

    n and k must be multiples of 16.
    """
    q, by_row = x
    bias = None if bias is None else bias.to(torch.bfloat16)
    return torch._scaled_mm(
        q, weight.t(), by_row[:, None], scale[None, :], bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )

# mypy: allow-untyped-defs
"""Norms, gated activations, row gathers and the preparation of q, k and v:
one read and one write of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import (
    _activate,
    _begin,
    _begin_early,
    _pdl,
    _saturate,
    _warps,
    cdiv,
    next_power_of_2,
)


@triton.jit
def _rms_norm(x, weight, out, d, eps, s_x, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * s_x + i, mask=i < d, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v) / d + eps)
    tl.store(out + row * d + i, v * scale * w, mask=i < d)


@triton.jit
def _rms_norm_beside(x, first, second, out, n, wide, also, eps, s_x, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """One program: of a row the first ``wide`` columns, the ``also`` behind them, or the rest. Weights are
    there before the kernel ahead is done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, part, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    w = tl.full([BLOCK], 1.0, tl.float32)
    begin, d = wide + also, n - wide - also
    if part == 0:
        begin, d = wide * 0, wide
        w = tl.load(first + i, mask=i < d, other=0.0).to(tl.float32)
    elif part == 1:
        begin, d = wide, also
        w = tl.load(second + i, mask=i < d, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * s_x + begin + i, mask=i < d, other=0.0).to(tl.float32)
    if part < 2:
        v *= tl.rsqrt(tl.sum(v * v) / d + eps)
    tl.store(out + row * n + begin + i, v * w, mask=i < d)


@triton.jit
def _add_rms_norm(x, residual, weight, out, total, d, eps, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    v += tl.load(residual + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    h = v.to(total.dtype.element_ty)
    tl.store(total + row * d + i, h, mask=i < d)
    v = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v) / d + eps)
    tl.store(out + row * d + i, v * scale * w, mask=i < d)


@triton.jit
def _layer_norm(
    x, y, weight, bias, out, total, d, eps, s_x, SUM: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):
    """Of x, or of the ``SUM`` of x and y. Weights are there before the kernel ahead is done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    b = tl.load(bias + i, mask=i < d, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * s_x + i, mask=i < d, other=0.0).to(tl.float32)
    if SUM:
        v += tl.load(y + row * d + i, mask=i < d, other=0.0).to(tl.float32)
        h = v.to(total.dtype.element_ty)
        tl.store(total + row * d + i, h, mask=i < d)
        v = h.to(tl.float32)
    v = tl.where(i < d, v - tl.sum(v) / d, 0.0)
    tl.store(out + row * d + i, v * tl.rsqrt(tl.sum(v * v) / d + eps) * w + b, mask=i < d)


@triton.jit
def _normed(x, weight, d, eps, element: tl.constexpr):
    """Rounded, as where a norm is a kernel of its own."""
    return (x * tl.rsqrt(tl.sum(x * x) / d + eps) * weight).to(element).to(tl.float32)


@triton.jit
def _norms_of_sum(
    x, x_norm, y, y_norm, both, residual, scale, first, second, third, fourth, total, out, d, eps, s_out,
    TWO: tl.constexpr, SCALED: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``TWO``: the norms of x and y are added up, and ``both`` is the norm of that. Weights are there before
    the kernel ahead is done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < d
    element: tl.constexpr = total.dtype.element_ty
    w = tl.load(x_norm + i, mask=there, other=0.0).to(tl.float32)
    if TWO:
        w_y = tl.load(y_norm + i, mask=there, other=0.0).to(tl.float32)
        w_both = tl.load(both + i, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        by = tl.load(scale).to(tl.float32)
    if NORMS > 0:
        w_first = tl.load(first + i, mask=there, other=0.0).to(tl.float32)
    if NORMS > 1:
        w_second = tl.load(second + i, mask=there, other=0.0).to(tl.float32)
    if NORMS > 2:
        w_third = tl.load(third + i, mask=there, other=0.0).to(tl.float32)
    if NORMS > 3:
        w_fourth = tl.load(fourth + i, mask=there, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * d + i, mask=there, other=0.0).to(tl.float32)
    h = tl.load(residual + row * d + i, mask=there, other=0.0).to(tl.float32)
    if TWO:
        u = tl.load(y + row * d + i, mask=there, other=0.0).to(tl.float32)
        v = _normed(v, w, d, eps, element) + _normed(u, w_y, d, eps, element)
        v = _normed(v.to(element).to(tl.float32), w_both, d, eps, element)
    else:
        v = _normed(v, w, d, eps, element)
    h = (h + v).to(element).to(tl.float32)
    if SCALED:
        h = (h * by).to(element).to(tl.float32)
    tl.store(total + row * d + i, h, mask=there)
    if NORMS > 0:
        h *= tl.rsqrt(tl.sum(h * h) / d + eps)
        to = out + row * d + i
        tl.store(to, h * w_first, mask=there)
        if NORMS > 1:
            tl.store(to + s_out, h * w_second, mask=there)
        if NORMS > 2:
            tl.store(to + 2 * s_out, h * w_third, mask=there)
        if NORMS > 3:
            tl.store(to + 3 * s_out, h * w_fourth, mask=there)


@triton.jit
def _gated_add(
    x, y, by, gate, residual, weight, out, total, d, k, s_by, eps, NORM: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """``NORM``: the sum is added to ``residual``, which is ``total`` then, and ``out`` its RMSNorm."""
    _begin_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, BLOCK), tl.arange(0, KB)
    b = tl.load(by + row * s_by + j, mask=j < k, other=0.0).to(tl.float32)
    g = tl.sigmoid(tl.sum(b * tl.load(gate + j, mask=j < k, other=0.0).to(tl.float32)))
    v = tl.load(y + row * d + i, mask=i < d, other=0.0).to(tl.float32) * g.to(y.dtype.element_ty).to(
        tl.float32
    )
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32) + v
    if NORM:
        v = v.to(out.dtype.element_ty).to(tl.float32)
        v += tl.load(residual + row * d + i, mask=i < d, other=0.0).to(tl.float32)
        h = v.to(total.dtype.element_ty)
        tl.store(total + row * d + i, h, mask=i < d)
        v = h.to(tl.float32)
        v *= tl.rsqrt(tl.sum(v * v) / d + eps)
        v *= tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + i, v, mask=i < d)


@triton.jit
def _sigmoid_mul(x, gate, out, d, s_x, s_gate, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * s_x + i, mask=i < d, other=0.0).to(tl.float32)
    z = tl.load(gate + row * s_gate + i, mask=i < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + i, v * tl.sigmoid(z), mask=i < d)


@triton.jit
def _act_mul(x, out, f, GELU: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * f + i, mask=i < f, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + i, mask=i < f, other=0.0).to(tl.float32)
    tl.store(out + row * f + i, _activate(gate, GELU) * up, mask=i < f)


@triton.jit
def _activated(x, out, d, KIND: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    if KIND == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif KIND == "relu" or KIND == "relu2":
        v = tl.where(v < 0.0, 0.0, v)  # which keeps what is no number
        if KIND == "relu2":
            v *= v
    else:
        v = _activate(v, KIND == "gelu_tanh")
    tl.store(out + row * d + i, v, mask=i < d)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _take_rows(rows, x, out, d, scale, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64)
    v = tl.load(x + source * d + i, mask=i < d)
    tl.store(out + row * d + i, v.to(tl.float32) * scale, mask=i < d)


@triton.jit
def _copy_rows(x, out, d, s_x, s_out, PDL: tl.constexpr, BLOCK: tl.constexpr):
    _begin_early(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tl.store(out + row * s_out + i, tl.load(x + row * s_x + i, mask=i < d), mask=i < d)


@triton.jit(do_not_specialize_on_alignment=["positions", "out_loc"])
def _qk_norm_rope_store(
    qkv,
    positions,
    cos_sin,
    q_norm,
    k_norm,
    k_pages,
    v_pages,
    out_loc,
    q_out,
    eps,
    k_inverse,
    v_inverse,
    s_qkv,
    s_out,
    q_heads,
    kv_heads,
    page_size,
    s_page,
    s_token,
    s_head,
    HD: tl.constexpr,
    PADDED: tl.constexpr,
    ROT: tl.constexpr,
    HALF_ROT: tl.constexpr,
    REST: tl.constexpr,
    HB: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FP8: tl.constexpr,
    STORE: tl.constexpr,
    V_NORM: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: HB heads of one token, all of q, or all of k, or all of v. ``JOINED``: v is k."""
    _begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    q_blocks = tl.cdiv(q_heads, HB)
    kv_blocks = tl.cdiv(kv_heads, HB)
    block = tl.program_id(1)
    kind = tl.where(block < q_blocks, 0, tl.where(block < q_blocks + kv_blocks, 1, 2))
    first = (
        tl.where(kind == 0, block, tl.where(kind == 1, block - q_blocks, block - q_blocks - kv_blocks)) * HB
    )
    base = tl.where(kind == 0, 0, tl.where(kind == 1 or JOINED, q_heads, q_heads + kv_heads))
    head = first + tl.arange(0, HB)
    live = head < tl.where(kind == 0, q_heads, kv_heads)
    source = qkv + token * s_qkv + (base + head)[:, None] * HD
    loc = tl.load(out_loc + token).to(tl.int64)
    page = (loc // page_size) * s_page + (loc % page_size) * s_token
    if kind == 2:
        d = tl.arange(0, PADDED)[None, :]
        there = live[:, None] & (d < HD) if HD < PADDED else live[:, None]
        v = tl.load(source + d, mask=there, other=0.0)
        if V_NORM:
            f = v.to(tl.float32)
            v = (f * tl.rsqrt(tl.sum(f * f, 1) / HD + eps)[:, None]).to(q_out.dtype.element_ty)
        if FP8:
            v = _saturate(v.to(tl.float32) * v_inverse)
        if STORE:
            tl.store(v_pages + page + head[:, None] * s_head + d, v, mask=there)
        return
    half: tl.constexpr = ROT // 2
    i = tl.arange(0, HALF_ROT)
    in_rot = i < half
    mask = live[:, None] & in_rot[None, :]
    a = tl.load(source + i[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + half + i[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = tl.zeros([HB, REST], dtype=tl.float32)
    j = tl.arange(0, REST)
    rest_mask = live[:, None] & (j < HD - ROT)[None, :]
    if ROT < HD:
        rest = tl.load(source + ROT + j[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if (HAS_Q_NORM and kind == 0) or (HAS_K_NORM and kind == 1):
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(square / HD + eps)[:, None]
        if kind == 0:
            wa = tl.load(q_norm + i, mask=in_rot, other=0.0)
            wb = tl.load(q_norm + half + i, mask=in_rot, other=0.0)
            wr = tl.load(q_norm + ROT + j, mask=j < HD - ROT, other=0.0)
        else:
            wa = tl.load(k_norm + i, mask=in_rot, other=0.0)
            wb = tl.load(k_norm + half + i, mask=in_rot, other=0.0)
            wr = tl.load(k_norm + ROT + j, mask=j < HD - ROT, other=0.0)
        a = (a * scale * wa.to(tl.float32)[None, :]).to(q_out.dtype.element_ty).to(tl.float32)
        b = (b * scale * wb.to(tl.float32)[None, :]).to(q_out.dtype.element_ty).to(tl.float32)
        rest = rest * scale * wr.to(tl.float32)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * ROT + i, mask=in_rot, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * ROT + half + i, mask=in_rot, other=0.0)[None, :]
    ra = a * cos - b * sin
    rb = b * cos + a * sin
    if kind == 0:
        target = q_out + token * s_out + head[:, None] * HD
        tl.store(target + i[None, :], ra, mask=mask)
        tl.store(target + half + i[None, :], rb, mask=mask)
        if ROT < HD:
            tl.store(target + ROT + j[None, :], rest, mask=rest_mask)
    else:
        if IN_PLACE:
            tl.store(source + i[None, :], ra, mask=mask)
            tl.store(source + half + i[None, :], rb, mask=mask)
            if ROT < HD and HAS_K_NORM:
                tl.store(source + ROT + j[None, :], rest, mask=rest_mask)
        if FP8:
            ra, rb, rest = _saturate(ra * k_inverse), _saturate(rb * k_inverse), _saturate(rest * k_inverse)
        if STORE:
            stored = k_pages + page + head[:, None] * s_head
            tl.store(stored + i[None, :], ra, mask=mask)
            tl.store(stored + half + i[None, :], rb, mask=mask)
            if ROT < HD:
                tl.store(stored + ROT + j[None, :], rest, mask=rest_mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``ops.rms_norm``; x contiguous, or ``[T, d]`` with rows that may lie apart."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d = x.shape[-1]
    apart = x.stride(0) if x.dim() == 2 else d
    block = next_power_of_2(d)
    _rms_norm[(x.numel() // d,)](
        x, weight, out, d, eps, apart, BLOCK=block, num_warps=_warps(block), **_pdl()
    )
    return out


def rms_norm_beside(x: Tensor, first: Tensor, second: Tensor, eps: float) -> Tensor:
    """See ``ops.rms_norm_beside``; rows of x may lie apart."""
    (rows, n), (wide, also) = x.shape, (len(first), len(second))
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block = next_power_of_2(max(wide, also, n - wide - also))
    _rms_norm_beside[(rows, 3)](
        x, first, second, out, n, wide, also, eps, x.stride(0), BLOCK=block, num_warps=_warps(block), **_pdl()
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """See ``ops.add_rms_norm``; ``in_place``: the sum takes the place of ``residual``."""
    out, total = torch.empty_like(x), residual if in_place else torch.empty_like(x)
    d = x.shape[-1]
    block = next_power_of_2(d)
    _add_rms_norm[(x.shape[0],)](
        x, residual, weight, out, total, d, eps, BLOCK=block, num_warps=_warps(block), **_pdl()
    )
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See ``ops.layer_norm``; x as that of ``rms_norm``."""
    return _layer_norms(x, None, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """See ``ops.add_layer_norm``; ``in_place``: the sum takes the place of ``residual``."""
    return _layer_norms(x, residual, weight, bias, eps, residual if in_place else None)


def _layer_norms(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if total is None:
        total = out if y is None else torch.empty_like(out)
    d = x.shape[-1]
    apart = x.stride(0) if x.dim() == 2 else d
    block = next_power_of_2(d)
    _layer_norm[(x.numel() // d,)](
        x, x if y is None else y, weight, bias, out, total, d, eps, apart, SUM=y is not None, BLOCK=block,
        num_warps=_warps(block), **_pdl(),
    )  # fmt: skip
    return out, total


class Second(NamedTuple):
    """What a norm is added to, that of ``x`` by the weights ``norm``, and ``both``, those of the norm of the
    sum."""

    x: Tensor
    norm: Tensor
    both: Tensor


NORMS = 4  # of a sum, at most


def norms_of_sum(
    x: Tensor,
    norm: Tensor,
    residual: Tensor,
    norms: Sequence[Tensor],
    eps: float,
    scale: Tensor | None = None,
    second: Second | None = None,
) -> list[Tensor]:
    """``(residual + rms_norm(x, norm)) * scale``, and behind it its norms by the weights ``norms``. With
    ``second`` there is ``rms_norm(rms_norm(x, norm) + rms_norm(second.x, second.norm), second.both)`` in the
    place of the first norm. All ``[T, d]``; scale float32[1]."""
    tokens, d = x.shape
    total, out = torch.empty_like(residual), x.new_empty(len(norms), tokens, d)
    block = next_power_of_2(d)
    weights = [*norms, *[norm] * (NORMS - len(norms))]
    more = [y if y.dim() == 1 else y.contiguous() for y in second or (x, norm, norm)]
    _norms_of_sum[(tokens,)](
        x.contiguous(), norm, *more, residual.contiguous(), norm if scale is None else scale, *weights,
        total, out, d, eps, tokens * d, TWO=second is not None, SCALED=scale is not None, NORMS=len(norms),
        BLOCK=block, num_warps=min(8, cdiv(block, 512)), **_pdl(),
    )  # fmt: skip
    return [total, *out.unbind(0)]


def gated_add(x: Tensor, y: Tensor, by: Tensor, gate: Tensor) -> Tensor:
    """See ``ops.gated_add``."""
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    _sum_gated(x, y, by, gate, out)
    return out


def gated_add_norm(
    x: Tensor, y: Tensor, by: Tensor, gate: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """``add_rms_norm`` of a ``gated_add``: its sum takes the place of ``residual``."""
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    _sum_gated(x, y, by, gate, out, residual, weight, eps)
    return out


def _sum_gated(
    x: Tensor,
    y: Tensor,
    by: Tensor,
    gate: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    d, k = y.shape[1], by.shape[1]
    total = out if residual is None else residual
    block = next_power_of_2(d)
    _gated_add[(y.shape[0],)](
        x.contiguous(), y.contiguous(), by, gate, total, gate if weight is None else weight, out, total, d, k,
        by.stride(0), eps, NORM=residual is not None, BLOCK=block, KB=next_power_of_2(k),
        num_warps=_warps(block), **_pdl(),
    )  # fmt: skip


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See ``ops.sigmoid_mul``."""
    tokens, d = x.shape
    out = x.new_empty(tokens, d)
    block = min(2048, next_power_of_2(d))
    _sigmoid_mul[(tokens, cdiv(d, block))](
        x, gate, out, d, x.stride(0), gate.stride(0), BLOCK=block, **_pdl()
    )
    return out


def activate(x: Tensor, kind: str) -> Tensor:
    """See ``ops.activate``; x contiguous."""
    out, d = torch.empty_like(x), x.shape[-1]
    block = min(1024, next_power_of_2(d))
    _activated[(x.numel() // d, cdiv(d, block))](x, out, d, KIND=kind, BLOCK=block, num_warps=4, **_pdl())
    return out


def act_mul(x: Tensor, kind: str) -> Tensor:
    """See ``ops.act_mul``."""
    f = x.shape[1] // 2
    out = x.new_empty(x.shape[0], f)
    block = min(2048, next_power_of_2(f))
    _act_mul[(x.shape[0], cdiv(f, block))](x, out, f, GELU=kind == "gelu_tanh", BLOCK=block, **_pdl())
    return out


def take_rows(x: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    """``x[rows] * scale``: x ``[N, d]``, rows int32[S]; embedding and gather."""
    d = x.shape[1]
    out = x.new_empty(rows.shape[0], d)
    if rows.shape[0]:
        block = min(2048, next_power_of_2(d))
        _take_rows[(rows.shape[0], cdiv(d, block))](rows, x, out, d, scale, BLOCK=block, **_pdl())
    return out


def copy_rows(x: Tensor, to: Tensor) -> Tensor:
    """``ops.copied``: rows of both are contiguous."""
    d = x.shape[1]
    block = next_power_of_2(d)
    _copy_rows[(len(x),)](x, to, d, x.stride(0), to.stride(0), BLOCK=block, num_warps=_warps(d), **_pdl())
    return x


def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k: Tensor,
    v: Tensor,
    out_loc: Tensor,
    in_place: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    store: bool = True,
    v_norm: bool = False,
    joined: bool = False,
) -> Tensor:
    """See ``ops.qk_norm_rope_store``; ``k`` and ``v`` have equal strides, ``hd`` contiguous, and rows of
    ``qkv`` may lie apart. ``in_place``: q and k are also changed in ``qkv``, whose first columns are
    returned. ``scales``: of k and v in e4m3 pages; ``store``: whether k and v go to the pages. ``v_norm`` and
    ``joined``: see ``ops.qkv_norm_rope_store``; in the pages alone."""
    tokens = qkv.shape[0]
    page_size, kv_heads, dim = k.shape[1:]
    q_heads = qkv.shape[1] // dim - kv_heads * (1 if joined else 2)
    rot = cos_sin.shape[1]
    out = qkv[:, : q_heads * dim] if in_place else qkv.new_empty(tokens, q_heads * dim)
    heads = min(8, next_power_of_2(q_heads))  # a program takes 1.2 ns of the whole GPU at least
    grid = (tokens, cdiv(q_heads, heads) + 2 * cdiv(kv_heads, heads))
    _qk_norm_rope_store[grid](
        qkv,
        positions,
        cos_sin,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        k,
        v,
        out_loc,
        out,
        eps,
        1 / scales[0],
        1 / scales[1],
        qkv.stride(0),
        out.stride(0),
        q_heads,
        kv_heads,
        page_size,
        k.stride(0),
        k.stride(1),
        k.stride(2),
        HD=dim,
        PADDED=next_power_of_2(dim),
        ROT=rot,
        HALF_ROT=next_power_of_2(rot // 2),
        REST=next_power_of_2(max(1, dim - rot)),
        HB=heads,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        IN_PLACE=in_place,
        FP8=k.dtype == torch.float8_e4m3fn,
        STORE=store,
        V_NORM=v_norm,
        JOINED=joined,
        num_warps=2,
        **_pdl(),
    )
    return out

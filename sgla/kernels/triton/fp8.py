# mypy: allow-untyped-defs
"""Activations as e4m3 numbers with one scale a token, for the matrix units' 8-bit mode, and products of them
with weights that have a scale for each 128 channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from sgla.kernels.device import this_device
from sgla.kernels.triton.common import _activate, _begin, _pdl, _warps, cdiv, next_power_of_2

GROUP = 128  # channels
UNIT = 4  # of whose multiple the library takes rows with scales of blocks


@cache
def takes_blocks(cuda: str | None) -> bool:
    """Whether the library of this CUDA has scales of blocks."""
    return cuda is None or tuple(map(int, cuda.split("."))) >= (12, 9)


class Rounded(NamedTuple):
    """e4m3 ``[T, d]`` and float32 ``[T]``, whose product is a tensor up to rounding. Both begin what
    ``for_blocks`` has."""

    numbers: Tensor
    scale: Tensor

    def for_blocks(self) -> tuple[Tensor, Tensor]:
        """With any rows behind the last, up to a multiple of ``UNIT``: the numbers, and scales ``[rows, d /
        GROUP]``, the first of which is outermost."""
        tokens, d = self.numbers.shape
        rows = cdiv(tokens, UNIT) * UNIT
        scales = self.scale.as_strided((rows, d // GROUP), (1, rows))
        return self.numbers.as_strided((rows, d), (d, 1)), scales


@triton.jit
def _store(v, numbers, scale, row, i, d, rows, GROUPS: tl.constexpr):
    s = tl.maximum(tl.max(tl.abs(v), 0) / 448.0, 1e-30)
    group = tl.arange(0, GROUPS)
    tl.store(scale + group * rows + row, tl.zeros([GROUPS], tl.float32) + s, mask=group * 128 < d)
    v = tl.minimum(tl.maximum(v / s, -448.0), 448.0)
    tl.store(numbers + row * d + i, v.to(numbers.dtype.element_ty), mask=i < d)


@triton.jit(do_not_specialize=["rows"])
def _quantize(x, numbers, scale, d, rows, PDL: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    _store(v, numbers, scale, row, i, d, rows, GROUPS)


@triton.jit(do_not_specialize=["rows"])
def _norm_quantize(
    x, weight, numbers, scale, d, eps, s_x, rows, PDL: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * s_x + i, mask=i < d, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    y = (v * tl.rsqrt(tl.sum(v * v) / d + eps) * w).to(x.dtype.element_ty)
    _store(y.to(tl.float32), numbers, scale, row, i, d, rows, GROUPS)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_quantize(
    x, residual, weight, out, total, numbers, scale, d, eps, rows, PDL: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
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
    _store(y.to(tl.float32), numbers, scale, row, i, d, rows, GROUPS)


@triton.jit(do_not_specialize=["rows"])
def _act_mul_quantize(
    x, numbers, scale, f, rows, GELU: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * f + i, mask=i < f, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + i, mask=i < f, other=0.0).to(tl.float32)
    y = (_activate(gate, GELU) * up).to(x.dtype.element_ty)
    _store(y.to(tl.float32), numbers, scale, row, i, f, rows, GROUPS)


def _empty(tokens: int, d: int, device: torch.device) -> Rounded:
    rows = cdiv(tokens, UNIT) * UNIT
    numbers = torch.empty(rows, d, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(cdiv(d, GROUP), rows, dtype=torch.float32, device=device)
    return Rounded(numbers[:tokens], scales[0, :tokens])


def _cut(tokens: int, d: int) -> dict[str, int]:
    """What the kernels know of the room for what they round."""
    return {"rows": cdiv(tokens, UNIT) * UNIT, "GROUPS": next_power_of_2(cdiv(d, GROUP))}


def quantize(x: Tensor) -> Rounded:
    """x ``[T, d]``, token by token."""
    tokens, d = x.shape
    out = _empty(tokens, d, x.device)
    block = next_power_of_2(d)
    _quantize[(tokens,)](x, *out, d, BLOCK=block, num_warps=_warps(block), **_cut(tokens, d), **_pdl())
    return out


def joined(own: Rounded, gather: Callable[[Tensor], Tensor]) -> Rounded:
    """The rows of all ranks, which ``gather`` gives of bfloat16 ``[T, n]``, n a multiple of 8."""
    scale = own.scale[:, None].expand(-1, 4).contiguous()
    numbers, scale = (gather(x.view(torch.bfloat16)).view(x.dtype) for x in (own.numbers, scale))
    tokens, d = numbers.shape
    more = -tokens % UNIT
    if more:
        numbers = torch.cat([numbers.view(torch.uint8), numbers.new_empty(more, d, dtype=torch.uint8)])
        numbers = numbers[:tokens].view(own.numbers.dtype)
    scales = scale.new_empty(cdiv(d, GROUP), tokens + more)
    scales[:, :tokens] = scale[:, 0]
    return Rounded(numbers, scales[0, :tokens])


def norm_quantize(x: Tensor, weight: Tensor, eps: float) -> Rounded:
    """``ops.rms_norm`` of x ``[T, d]``, whose rows may lie apart, rounded."""
    tokens, d = x.shape
    out = _empty(tokens, d, x.device)
    block = next_power_of_2(d)
    _norm_quantize[(tokens,)](
        x, weight, *out, d, eps, x.stride(0), BLOCK=block, num_warps=_warps(block), **_cut(tokens, d),
        **_pdl(),
    )  # fmt: skip
    return out


def add_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Rounded]:
    """``(norm, total)`` of ``ops.add_rms_norm``, and the norm rounded."""
    tokens, d = x.shape
    out, total, rounded = torch.empty_like(x), torch.empty_like(x), _empty(tokens, d, x.device)
    block = next_power_of_2(d)
    _add_norm_quantize[(tokens,)](
        x, residual, weight, out, total, *rounded, d, eps, BLOCK=block, num_warps=_warps(block),
        **_cut(tokens, d), **_pdl(),
    )  # fmt: skip
    return out, total, rounded


def act_mul_quantize(x: Tensor, kind: str) -> Rounded:
    """``ops.act_mul``, rounded."""
    tokens, f = x.shape[0], x.shape[1] // 2
    out = _empty(tokens, f, x.device)
    block = next_power_of_2(f)
    warps = 16 if block > 8192 else _warps(block)
    _act_mul_quantize[(tokens,)](
        x, *out, f, GELU=kind == "gelu_tanh", BLOCK=block, num_warps=warps, **_cut(tokens, f), **_pdl()
    )
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


def blocks(x: Rounded, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` with scales float32 ``[n / GROUP, k / GROUP]``, of blocks; n and k must be multiples of
    GROUP, k of four times that. By the library, which wants Hopper (and see ``takes_blocks``)."""
    numbers, of_x = x.for_blocks()
    bias = None if bias is None else bias.to(torch.bfloat16)
    each, block = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(numbers, weight.t(), of_x, each, scale.t(), block, bias=bias)[: len(x.numbers)]


class Tile(NamedTuple):
    """``n`` outputs of ``m`` rows for a program; ``splits`` of k are added up behind it."""

    m: int
    n: int
    warps: int
    stages: int
    splits: int = 1


def tile_for(m: int, n: int, k: int) -> Tile:
    """An estimate."""
    device = this_device()
    if m > 64:
        found = Tile(128, 128, 8, 3) if device.wgmma else Tile(64, 128, 4, 2)
    else:
        found = Tile(max(16, next_power_of_2(m)), 64, 4, 4 if device.wgmma else 3)
    programs, splits = cdiv(m, found.m) * cdiv(n, found.n), 1
    while 2 * splits * programs <= 2 * device.multiprocessors and k >= 1024 * splits:
        splits *= 2
    return found._replace(splits=splits)


@triton.jit(do_not_specialize=["m"])
def _grouped(
    x, x_scale, w, w_scale, bias, out, m, n, k, groups, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: N outputs of M rows. The sum of a group of channels meets its scale in float32. Programs
    that run together share weights."""
    _begin(PDL)
    tiles_m = tl.cdiv(m, M)
    rows = tl.program_id(0) % tiles_m * M + tl.arange(0, M)
    columns = tl.program_id(0) // tiles_m * N + tl.arange(0, N)
    live, inside, c = rows < m, columns < n, tl.arange(0, 128)
    share = tl.cdiv(groups, SPLITS)
    begin = tl.program_id(1) * share
    source = x + rows.to(tl.int64)[:, None] * k + c[None, :]
    weight = w + columns.to(tl.int64)[:, None] * k + c[None, :]
    scales = w_scale + columns.to(tl.int64) * groups
    acc = tl.zeros([N, M], tl.float32)
    for at in range(begin, tl.minimum(begin + share, groups)):
        here = (at * 128 + c < k)[None, :]
        a = tl.load(source + at * 128, mask=live[:, None] & here, other=0.0)
        b = tl.load(weight + at * 128, mask=inside[:, None] & here, other=0.0)
        scale = tl.load(scales + at, mask=inside, other=0.0)
        acc += tl.dot(b, tl.trans(a)) * scale[:, None]
    acc *= tl.load(x_scale + rows, mask=live, other=0.0)[None, :]
    there = live[None, :] & inside[:, None]
    to = out + tl.program_id(1).to(tl.int64) * m * n + rows.to(tl.int64)[None, :] * n + columns[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(to, acc, mask=there)


def grouped(
    x: Rounded, weight: Tensor, scale: Tensor, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """``linear`` with scales float32 ``[n, ceil(k / 128)]``, of 128 channels each."""
    (m, k), n = x.numbers.shape, len(weight)
    tile = tile or tile_for(m, n, k)
    split = tile.splits > 1
    shape = (tile.splits, m, n) if split else (m, n)
    out = torch.empty(*shape, dtype=torch.float32 if split else torch.bfloat16, device=weight.device)
    added = bias is not None and not split
    _grouped[(cdiv(m, tile.m) * cdiv(n, tile.n), tile.splits)](
        *x, weight, scale, bias if added else scale, out, m, n, k, scale.shape[1], HAS_BIAS=added,
        SPLITS=tile.splits, M=tile.m, N=tile.n, num_warps=tile.warps, num_stages=tile.stages, **_pdl(),
    )  # fmt: skip
    if split:
        out = out.sum(0) if bias is None else out.sum(0) + bias
    return out.to(torch.bfloat16)

# mypy: allow-untyped-defs
"""Products with weights of 4 or 8 bits in groups (``quant/integers.py``), for any number of rows: integers
become bfloat16 in registers, where they are exact. Weights are the left side of the tensor cores'
instruction, as in ``e2m1.py``. In groups of 128 the sum of a group meets its scale in float32; in smaller
ones the numbers meet it, rounded to bfloat16, before they are multiplied.
"""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.device import this_device
from sgla.kernels.integers import BLOCK, Integers
from sgla.kernels.triton.common import cdiv
from sgla.kernels.triton.elementwise import _begin, _pdl

JOINED = 512  # outputs of a program that adds up
WIDE = 1 << 13  # channels of a wide x
_packing = Lock()  # of the threads that load, one compiles for all


class Tile(NamedTuple):
    """``n`` outputs of ``m`` rows for a program; ``splits`` of k are added up by a second kernel."""

    m: int
    n: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit
def _minus(a, b):
    """Two of bfloat16 in an int32 each."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 one;
            mov.b32 one, 0xbf80bf80;
            fma.rn.bf16x2 $0, $2, one, $1;
        }
        """,
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _times(a, b):
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, $2, zero;
        }
        """,
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _halves(x):
    return tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )


@triton.jit
def _scale(constants):
    """float32."""
    return (constants & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _zero(constants):
    """float32, of zeros that are any numbers."""
    return (constants >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _twice(x):
    """The upper half of an int32 in both."""
    return (x & -65536) | ((x >> 16) & 0xFFFF)


@triton.jit
def _pair(
    words, zeros, scales, P: tl.constexpr, BITS: tl.constexpr, SCALED: tl.constexpr, BF16: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The numbers at place P of words, less their zero, ``[..., 2]``: in bfloat16, or float32. ``zeros`` and
    ``scales``: two of bfloat16, or float32."""
    if BITS == 4:
        a = ((words >> (4 * P)) & 0x000F000F) | 0x43004300
        b = words * 0 + 0x43004300
    else:  # of two's complement: the lower seven bits, less the eighth
        a = ((words >> (8 * P)) & 0x007F007F) | 0x43004300
        b = ((words >> (8 * P)) & 0x00800080) | 0x43004300
    if BF16:
        x = _minus(a, zeros) if BITS == 4 and WHOLE else _minus(_minus(a, b), zeros)
        if SCALED:
            x = _times(x, scales)
        lower, upper = _halves(x)
    else:
        lower = (a << 16).to(tl.float32, bitcast=True) - zeros
        upper = (a & -65536).to(tl.float32, bitcast=True) - zeros
        if BITS == 8 or not WHOLE:
            lower -= (b << 16).to(tl.float32, bitcast=True)
            upper -= (b & -65536).to(tl.float32, bitcast=True)
        if SCALED:
            lower *= scales
            upper *= scales
    return tl.join(lower, upper)


@triton.jit
def _spread(x, N: tl.constexpr, BITS: tl.constexpr, PER: tl.constexpr):
    """Constants ``[N, PER]`` of a block's groups for each word of its rows."""
    if BITS == 4:
        x = tl.broadcast_to(tl.reshape(x, [N, 1, PER, 1]), [N, 4, PER, 4 // PER])
        x = tl.reshape(x, [N, 4, 4])
    elif PER == 4:
        x = tl.broadcast_to(tl.reshape(x, [N, 2, 1, 2, 1]), [N, 2, 4, 2, 2])
        x = tl.reshape(x, [N, 2, 4, 4])
    else:
        x = tl.broadcast_to(tl.reshape(x, [N, PER, 1, 1]), [N, 2, 4, 4])
    return x


@triton.jit
def _bits_of(x):
    """float32, rounded to bfloat16, as int32."""
    return x.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _numbers(
    words, constants, N: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr,
    BF16: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """``[N, 128]``: a block of words ``[N, 4 BITS]`` with constants ``[N, 128 / GROUP]``, less their zeros;
    SCALED: times their scales."""
    scale = _scale(constants)
    if BF16:
        zeros = _twice(constants if WHOLE else _bits_of(_zero(constants)))
        scales = _twice(_bits_of(scale))
    else:
        zeros = (constants & -65536).to(tl.float32, bitcast=True) if WHOLE else _zero(constants)
        scales = scale
    zeros, scales = _spread(zeros, N, BITS, 128 // GROUP), _spread(scales, N, BITS, 128 // GROUP)
    if BITS == 4:
        words = tl.reshape(words, [N, 4, 4])
        first = tl.join(
            _pair(words, zeros, scales, 0, BITS, SCALED, BF16, WHOLE),
            _pair(words, zeros, scales, 1, BITS, SCALED, BF16, WHOLE),
        )
        second = tl.join(
            _pair(words, zeros, scales, 2, BITS, SCALED, BF16, WHOLE),
            _pair(words, zeros, scales, 3, BITS, SCALED, BF16, WHOLE),
        )
        numbers = tl.permute(tl.join(first, second), (0, 2, 5, 4, 1, 3))
    else:
        words = tl.reshape(words, [N, 2, 4, 4])
        both = tl.join(
            _pair(words, zeros, scales, 0, BITS, SCALED, BF16, WHOLE),
            _pair(words, zeros, scales, 1, BITS, SCALED, BF16, WHOLE),
        )
        numbers = tl.permute(both, (0, 1, 3, 5, 2, 4))
    return tl.reshape(numbers, [N, 128])


@triton.jit(do_not_specialize=["m"])
def _linear(
    x, w, constants, bias, out, m, n, k, blocks, s_x, s_out, HAS_BIAS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr, BF16: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: N outputs of M rows. Programs that run together share weights. SPLITS: of k, whose sums
    are ``_join``ed."""
    _begin(PDL)
    tiles_m = tl.cdiv(m, M)
    rows = tl.program_id(0) % tiles_m * M + tl.arange(0, M)
    columns = tl.program_id(0) // tiles_m * N + tl.arange(0, N)
    share = tl.cdiv(blocks, SPLITS)
    begin = tl.program_id(1) * share
    c, live, inside = tl.arange(0, 128), rows < m, columns < n
    per: tl.constexpr = 128 // GROUP
    source = x + rows.to(tl.int64)[:, None] * s_x + c[None, :]
    place = (columns % n).to(tl.int64)[:, None] * blocks
    words = w + place * (4 * BITS) + tl.arange(0, 4 * BITS)[None, :]
    constants += place * per + tl.arange(0, per)[None, :]
    acc = tl.zeros([N, M], tl.float32)
    for at in range(begin, tl.minimum(begin + share, blocks)):
        a = tl.load(source + at * 128, mask=live[:, None] & (at * 128 + c < k)[None, :], other=0.0)
        own = tl.load(constants + at * per)
        numbers = _numbers(tl.load(words + at * (4 * BITS)), own, N, BITS, GROUP, per > 1, BF16, WHOLE)
        if per > 1:
            acc = tl.dot(numbers, tl.trans(a), acc, input_precision="ieee")
        else:
            acc += tl.dot(numbers, tl.trans(a), input_precision="ieee") * _scale(own)
    there = live[None, :] & inside[:, None]
    if SPLITS > 1:
        part = out + tl.program_id(1).to(tl.int64) * m * n
        tl.store(part + rows.to(tl.int64)[None, :] * n + columns[:, None], acc, mask=there)
        return
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(out + rows.to(tl.int64)[None, :] * s_out + columns[:, None], acc, mask=there)


@triton.jit(do_not_specialize=["m"])
def _join(
    part, bias, out, m, n, s_out, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK outputs of a row, of the sums ``[SPLITS, m, n]``."""
    _begin(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(part + (split * m + row) * n + i, mask=i < n, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + row * s_out + i, acc, mask=i < n)


@triton.jit
def _unpack(
    w, constants, out, n, k, blocks, BITS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a block of N rows."""
    _begin(PDL)
    at, per = tl.program_id(0) % blocks, 128 // GROUP
    rows, c = tl.program_id(0) // blocks * N + tl.arange(0, N), tl.arange(0, 128)
    place = (rows % n).to(tl.int64)[:, None] * blocks + at
    words = tl.load(w + place * (4 * BITS) + tl.arange(0, 4 * BITS)[None, :])
    own = tl.load(constants + place * per + tl.arange(0, 128 // GROUP)[None, :])
    numbers = _numbers(words, own, N, BITS, GROUP, True, False, WHOLE)
    column = at * 128 + c
    tl.store(
        out + rows.to(tl.int64)[:, None] * k + column[None, :],
        numbers.to(out.dtype.element_ty),
        mask=(rows < n)[:, None] & (column < k)[None, :],
    )


@triton.jit
def _rounded(x):
    """To the nearest whole number, of float32 below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _of_span(x, low, high, best, scale, zero, SPAN: tl.constexpr, MOST: tl.constexpr):
    """The constants of groups, and their error, if the numbers reach over this much of their span."""
    tried = ((high - low) * (SPAN / MOST)).to(tl.float16).to(tl.float32)
    divisor = tl.where(tried == 0, 1.0, tried)
    offset = tl.minimum(tl.maximum(_rounded(tl.div_rn(low * -SPAN, divisor)), 0.0), MOST)
    q = _rounded(tl.div_rn(x, divisor[:, None])) + offset[:, None]
    off = (tl.minimum(tl.maximum(q, 0.0), MOST) - offset[:, None]) * tried[:, None] - x
    error = tl.sum(off * off, 1)
    better = error < best
    return tl.where(better, error, best), tl.where(better, tried, scale), tl.where(better, offset, zero)


@triton.jit
def _pack(
    dense, words, constants, n, k, stride, blocks, BITS: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a block of N rows, as ``quant/integers.py`` has it."""
    _begin(PDL)
    PER: tl.constexpr = 128 // GROUP
    MOST: tl.constexpr = (1 << BITS) - 1
    at, first, each = tl.program_id(0) % blocks, tl.program_id(0) // blocks * N, tl.arange(0, N * PER)
    row, place = first + each // PER, (each % PER)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    column = at * 128 + place
    inside = (row < n)[:, None] & (column < k)
    x = tl.load(dense + row.to(tl.int64)[:, None] * stride + column, mask=inside, other=0.0).to(tl.float32)
    low, high = tl.minimum(tl.min(x, 1), 0.0), tl.maximum(tl.max(x, 1), 0.0)
    best, zero = tl.full([N * PER], float("inf"), tl.float32), tl.zeros([N * PER], tl.float32)
    best, scale, zero = _of_span(x, low, high, best, zero, zero, 1.0, MOST)
    if BITS == 4:
        best, scale, zero = _of_span(x, low, high, best, scale, zero, 0.95, MOST)
        best, scale, zero = _of_span(x, low, high, best, scale, zero, 0.9, MOST)
        best, scale, zero = _of_span(x, low, high, best, scale, zero, 0.85, MOST)
        best, scale, zero = _of_span(x, low, high, best, scale, zero, 0.8, MOST)
        best, scale, zero = _of_span(x, low, high, best, scale, zero, 0.75, MOST)
    divisor = tl.where(scale == 0, 1.0, scale)
    q = _rounded(tl.div_rn(x, divisor[:, None])) + zero[:, None]
    q = tl.where(column < k, tl.minimum(tl.maximum(q, 0.0), MOST).to(tl.int32), 0)
    own = first + tl.arange(0, N)
    live = (own < n)[:, None]
    if BITS == 4:
        q = tl.reshape(q << (place // 8 % 4 * 4 + place % 2 * 16), [N, 4, 4, 4, 2])  # word, p, lane, channel
        made = tl.reshape(tl.permute(tl.sum(tl.sum(q, 4), 2), (0, 2, 1)), [N, 16])
    else:
        q = tl.reshape((q ^ 128) << (place // 8 % 2 * 8 + place % 2 * 16), [N, 2, 4, 2, 4, 2])
        made = tl.reshape(tl.permute(tl.sum(tl.sum(q, 5), 3), (0, 1, 3, 2)), [N, 32])
    to = own.to(tl.int64)[:, None] * blocks + at
    tl.store(words + to * (4 * BITS) + tl.arange(0, 4 * BITS)[None, :], made, mask=live)
    if BITS == 8:
        zero -= 128.0
    elif WHOLE:
        zero += 128.0
    upper = zero.to(tl.bfloat16 if WHOLE else tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    both = upper | (scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    group = at * PER + each % PER
    to = row.to(tl.int64) * (blocks * PER) + group
    tl.store(constants + to, tl.where(group * GROUP < k, both, 0), mask=row < n)


def tile_for(m: int, n: int, k: int, itemsize: int, deterministic: bool = False) -> Tile:
    """An estimate; for 33 to 64 rows, on Hopper, that of the layers of Qwen3-8B on an H200
    (``bench/gpu_packed.py``). ``deterministic``: one for every number of rows."""
    device = this_device()
    return _choose(m, n, k, itemsize, deterministic, device.multiprocessors, device.wgmma)


@lru_cache(1 << 14)
def _choose(m: int, n: int, k: int, itemsize: int, fixed: bool, processors: int, hopper: bool) -> Tile:
    if fixed or itemsize == 4:
        return Tile(32, 64, 4, 2)
    beside = 1 if m > 64 else 2  # programs on a multiprocessor
    if m > 64:
        tile = Tile(128, 128, 8, 3) if hopper else Tile(64, 128, 4, 2)
    elif m > 32 and hopper:
        wide = k > WIDE
        tile, beside = Tile(64, 128 if wide else 64, 4, 3), 2 if wide else 3
    elif m > 16:
        tile = Tile(32 if m <= 32 else 64, 128 if hopper else 64, 4, 4 if hopper else 3)
    else:
        tile = Tile(16, 64, 4, 4)
    programs, splits = cdiv(m, tile.m) * cdiv(n, tile.n), 1
    while 2 * splits * programs <= beside * processors and cdiv(k, BLOCK) >= 8 * splits:
        splits *= 2
    if beside == 3 and splits * programs <= 2 * processors:
        tile = tile._replace(stages=4)
    return tile._replace(splits=splits)


def linear(
    x: Tensor,
    weight: Integers,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """``x @ weight.T + bias``: x bfloat16 or float32 ``[m, k]``; ``out`` ``[m, n]`` of any float type, x's by
    default."""
    (m, k), n = x.shape, weight.n
    if out is None:
        out = x.new_empty(m, n)
    tile = tile or tile_for(m, n, k, x.itemsize)
    words, constants = weight.tensors
    split, added = tile.splits > 1, bias is not None
    part = x.new_empty(tile.splits, m, n, dtype=torch.float32) if split else out
    blocks = constants.shape[1] * weight.group // BLOCK
    _linear[(cdiv(m, tile.m) * cdiv(n, tile.n), tile.splits)](
        x, words, constants, bias if added and not split else x, part, m, n, k, blocks, x.stride(0),
        out.stride(0), HAS_BIAS=added and not split, BITS=weight.bits, GROUP=weight.group,
        WHOLE=weight.whole, SPLITS=tile.splits, BF16=x.dtype == torch.bfloat16, M=tile.m, N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages, **_pdl(),
    )  # fmt: skip
    return join(part, bias, out) if split else out


def join(part: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """In ``out`` ``[m, n]`` the sum of parts float32 ``[splits, m, n]`` and the bias."""
    splits, m, n = part.shape
    _join[(m, cdiv(n, JOINED))](
        part, part if bias is None else bias, out, m, n, out.stride(0), HAS_BIAS=bias is not None,
        SPLITS=splits, BLOCK=JOINED, num_warps=4, **_pdl(),
    )  # fmt: skip
    return out


def pack(dense: Tensor, bits: int, group: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Words and constants of a matrix ``[n, k]`` of any floating-point type; where two spans have nearly the
    same error they may be those of the other than ``quant/integers.py`` takes."""
    (n, k), dense = dense.shape, dense if dense.stride(1) == 1 else dense.contiguous()
    blocks = cdiv(k, BLOCK)
    sizes = blocks * 4 * bits, blocks * (BLOCK // group)
    words, constants = (torch.empty(n, size, dtype=torch.int32, device=dense.device) for size in sizes)
    with _packing:
        _pack[(cdiv(n, 4) * blocks,)](
            dense, words, constants, n, k, dense.stride(0), blocks, BITS=bits, GROUP=group, WHOLE=whole, N=4,
            num_warps=4, **_pdl(),
        )  # fmt: skip
    return words, constants


def unpack(weight: Integers, dtype: torch.dtype) -> Tensor:
    """The dense ``[n, k]``."""
    words, constants = weight.tensors
    out = torch.empty(weight.n, weight.k, dtype=dtype, device=words.device)
    blocks = constants.shape[1] * weight.group // BLOCK
    _unpack[(cdiv(weight.n, 64) * blocks,)](
        words, constants, out, weight.n, weight.k, blocks, BITS=weight.bits, GROUP=weight.group,
        WHOLE=weight.whole, N=64, num_warps=4, **_pdl(),
    )  # fmt: skip
    return out

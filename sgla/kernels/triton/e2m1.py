# mypy: allow-untyped-defs
"""Products of experts and layers whose weights are packed, in MXFP4 or NVFP4 (``quant/e2m1.py``), in integers
(``quant/integers.py``), in e4m3 with scales of groups (``quant/channels.py``), or as places in a table
(``quant/coded.py``), and become bfloat16 in registers, where all of these are exact but for scales. Weights
are the left side of the tensor cores' instruction, which may come from registers, so they never go through
shared memory again.

Pairs, blocks and places are those of ``moe.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.device import this_device
from sgla.kernels.integers import KINDS
from sgla.kernels.routing import Clamped, Gating
from sgla.kernels.triton import integers
from sgla.kernels.triton.common import _activate, _begin, _pdl, cdiv
from sgla.kernels.triton.integers import _numbers as _integers
from sgla.kernels.triton.integers import _scale
from sgla.kernels.triton.moe import Groups

FEW = 16  # pairs up to which each is a block of its own, and nothing is sorted
SILU, GELU, CLAMPED = range(3)
LIFT = tl.constexpr(2.0**64)  # what sums are too small by: see ``quant/e2m1.py``
# What BITS says of weights that are no integers.
MXFP4, NVFP4, CODED = tl.constexpr(0), tl.constexpr(2), tl.constexpr(6)
E4M3, MXFP8 = tl.constexpr(1), tl.constexpr(3)  # odd: a byte for each number
OTHERS = {"mxfp4": 0, "fp8g128": 1, "nvfp4": 2, "mxfp8": 3, "nf4": 6, "fp4": 6}
E4M3_LIFT = tl.constexpr(2.0**120)  # what its bits are too small by where float32 has its own
FACTOR = tl.constexpr(2.0**62)  # of NVFP4's scales, so that numbers times these are as small
# Sign and lower bits of two codes, where bfloat16 has them, as int32.
SIGNS, LOWER = tl.constexpr(0x80008000 - (1 << 32)), tl.constexpr(0x01C001C0)
BOTH = tl.constexpr(0x81C081C0 - (1 << 32))


class Packed(Protocol):
    """A weight in one of these."""

    kind: ClassVar[str]
    tensors: tuple[Tensor, ...]


class Tile(NamedTuple):
    """How a product is cut: ``n`` outputs (of gate and of up each) of a program, and ``splits`` of k where
    each pair is a block."""

    n: int
    warps: int
    stages: int
    splits: int = 1


class Tiles(NamedTuple):
    """Pairs in a block (None: each is one), and the cuts of the two products."""

    rows: int | None
    gate_up: Tile
    down: Tile


def tiles_for(pairs: int, experts: int, itemsize: int, hopper: bool, integers: bool = False) -> Tiles:
    """For so many pairs, as measured on an H200 with gpt-oss, or dots.llm1 in ``integers``. Without the
    shared memory of ``hopper``, and for float32, cuts are small."""
    mean = pairs / experts
    if integers and hopper and itemsize == 2 and mean <= 24:
        if pairs <= FEW:
            return Tiles(None, Tile(64, 4, 4, 4), Tile(64, 4, 4, 4))
        return Tiles(16 if mean <= 12 else 32, Tile(64, 4, 4), Tile(128, 4, 3))
    if pairs <= FEW:
        splits = 4 if pairs <= 8 else 2
        return Tiles(None, Tile(32, 2, 4, splits), Tile(32, 2, 4, splits))
    small = not hopper or itemsize == 4
    if mean <= (16 if small else 14):
        return Tiles(16, Tile(64, 4, 3), Tile(64, 4, 3))
    if small:
        return Tiles(32 if itemsize == 4 else 64, Tile(64, 4, 2), Tile(64, 4, 2))
    if mean <= 48:
        return Tiles(32, Tile(64, 4, 3), Tile(128, 4, 3))
    if mean <= 96:
        return Tiles(64, Tile(64, 4, 3), Tile(128, 8, 3))
    return Tiles(128, Tile(128, 8, 3), Tile(128, 8, 3))


@triton.jit
def _pairs(words, G: tl.constexpr):
    """Two numbers of each word, group G of a block, as bfloat16 that is 2 ** -126 times what they are."""
    if G == 0:
        pairs = words & BOTH
    elif G == 1:
        pairs = (words << 3) & BOTH
    elif G == 2:
        pairs = ((words << 2) & SIGNS) | ((words << 6) & LOWER)
    else:
        pairs = ((words << 1) & SIGNS) | ((words >> 3) & LOWER)
    return pairs


@triton.jit
def _numbers(words, exponents, G: tl.constexpr, N: tl.constexpr, BF16: tl.constexpr):
    """``[N, 32]``: group G of a block, of words ``[N, 16]`` and the block's four exponents in an int32[N]."""
    pairs = _pairs(words, G)
    exponent = (exponents >> (8 * G)) & 255
    if BF16:
        lower, upper = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, zero;
                mov.b32 zero, 0x80008000;
                fma.rn.bf16x2 x, $2, $3, zero;
                mov.b32 {$0, $1}, x;
            }
            """,
            "=h,=h,r,r", [pairs, (exponent * 0x00800080)[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        factor = (exponent << 23).to(tl.float32, bitcast=True)[:, None]
        lower = (pairs << 16).to(tl.float32, bitcast=True) * factor
        upper = (pairs & -65536).to(tl.float32, bitcast=True) * factor
    return tl.reshape(tl.join(lower, upper), [N, 32])


@triton.jit
def _block(words, exponents, N: tl.constexpr, BF16: tl.constexpr):
    """``[N, 128]``: all groups of a block."""
    even = tl.join(_numbers(words, exponents, 0, N, BF16), _numbers(words, exponents, 2, N, BF16))
    odd = tl.join(_numbers(words, exponents, 1, N, BF16), _numbers(words, exponents, 3, N, BF16))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [N, 128])


@triton.jit
def _scaled(words, scales, G: tl.constexpr, N: tl.constexpr, BF16: tl.constexpr):
    """The same of NVFP4, with the two scales of the group ``[N, 2]``, float32."""
    pairs = _pairs(words, G)
    factor = tl.reshape(tl.broadcast_to(scales[:, :, None], [N, 2, 8]), [N, 16]) * FACTOR
    if BF16:
        bits = (factor.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        lower, upper = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 x, zero;
                mov.b32 zero, 0x80008000;
                fma.rn.bf16x2 x, $2, $3, zero;
                mov.b32 {$0, $1}, x;
            }
            """,
            "=h,=h,r,r", [pairs, bits | (bits << 16)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lower = (pairs << 16).to(tl.float32, bitcast=True) * factor
        upper = (pairs & -65536).to(tl.float32, bitcast=True) * factor
    return tl.reshape(tl.join(lower, upper), [N, 32])


@triton.jit
def _scaled_block(words, scales, N: tl.constexpr, BF16: tl.constexpr):
    """``[N, 128]``: a block of NVFP4, of its words and its scales ``[N, 8]``, float32."""
    lower, upper = tl.split(tl.permute(tl.reshape(scales, [N, 2, 2, 2]), (0, 2, 3, 1)))
    s0, s1 = tl.split(tl.permute(lower, (0, 2, 1)))
    s2, s3 = tl.split(tl.permute(upper, (0, 2, 1)))
    even = tl.join(_scaled(words, s0, 0, N, BF16), _scaled(words, s2, 2, N, BF16))
    odd = tl.join(_scaled(words, s1, 1, N, BF16), _scaled(words, s3, 3, N, BF16))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [N, 128])


@triton.jit
def _coded(words, table, scales, N: tl.constexpr):
    """``[N, 128]``, bfloat16: places ``[N, 16]`` in a table, times the scales ``[N, 2]`` of their groups. The
    table: upper bytes of its 16 numbers, then lower ones; ``prmt`` takes four at a time of eight, and those
    of places from 8 on stand in another word's."""
    factor = tl.reshape(tl.broadcast_to(scales[:, :, None], [N, 2, 8]), [N, 16])
    bits = factor.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        """
        {
            .reg .b32 zero, ones, places, which, from, low, high, upper, lower, x;
            mov.b32 zero, 0x80008000;
            mov.b32 ones, 0x80808080;
            mov.b32 places, $8;
            and.b32 which, places, 0x7777;
            prmt.b32 from, ones, ones, places;
            shl.b32 x, from, 1;
            and.b32 from, from, 0x7f7f7f7f;
            and.b32 x, x, ones;
            or.b32 from, from, x;
            prmt.b32 low, $10, $11, which;
            prmt.b32 high, $12, $13, which;
            lop3.b32 upper, from, high, low, 0xca;
            prmt.b32 low, $14, $15, which;
            prmt.b32 high, $16, $17, which;
            lop3.b32 lower, from, high, low, 0xca;
            prmt.b32 x, lower, upper, 0x5140;
            fma.rn.bf16x2 x, x, $9, zero;
            mov.b32 {$0, $1}, x;
            prmt.b32 x, lower, upper, 0x7362;
            fma.rn.bf16x2 x, x, $9, zero;
            mov.b32 {$2, $3}, x;
            shr.u32 places, places, 16;
            and.b32 which, places, 0x7777;
            prmt.b32 from, ones, ones, places;
            shl.b32 x, from, 1;
            and.b32 from, from, 0x7f7f7f7f;
            and.b32 x, x, ones;
            or.b32 from, from, x;
            prmt.b32 low, $10, $11, which;
            prmt.b32 high, $12, $13, which;
            lop3.b32 upper, from, high, low, 0xca;
            prmt.b32 low, $14, $15, which;
            prmt.b32 high, $16, $17, which;
            lop3.b32 lower, from, high, low, 0xca;
            prmt.b32 x, lower, upper, 0x5140;
            fma.rn.bf16x2 x, x, $9, zero;
            mov.b32 {$4, $5}, x;
            prmt.b32 x, lower, upper, 0x7362;
            fma.rn.bf16x2 x, x, $9, zero;
            mov.b32 {$6, $7}, x;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r,r",
        [
            words, bits | (bits << 16), tl.load(table), tl.load(table + 1), tl.load(table + 2),
            tl.load(table + 3), tl.load(table + 4), tl.load(table + 5), tl.load(table + 6),
            tl.load(table + 7),
        ],
        dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), [N, 128])


@triton.jit
def _numeric(x):
    """Numbers in e4m3, or of their bytes, which GPUs without such numbers read: float32. None is NaN."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.int32)
        x = (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * E4M3_LIFT
    return x


@triton.jit
def _gate(gate, up, alpha, limit, more, KIND: tl.constexpr):
    """See ``ops.gated``."""
    if KIND == 2:
        gate = tl.minimum(gate, limit)
        return gate * tl.sigmoid(gate * alpha) * (tl.minimum(tl.maximum(up, -limit), limit) + more)
    return _activate(gate, KIND == 1) * up


@triton.jit
def _join(
    part, bias, ids, out, pairs, n, alpha, limit, more, GATED: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK outputs of a pair, of the sums ``[SPLITS, pairs, n or 2 n]``."""
    _begin(PDL)
    pair, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = 2 * n if GATED else n
    acc = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = part + (split * pairs + pair) * width + i
        acc += tl.load(at, mask=i < n, other=0.0)
        if GATED:
            up += tl.load(at + n, mask=i < n, other=0.0)
    if BIAS:
        expert = tl.load(ids + pair)
        own = bias + expert * width + i
        here = tl.where(expert < 0, 0, n)
        acc += tl.load(own, mask=i < here, other=0.0)
        if GATED:
            up += tl.load(own + n, mask=i < here, other=0.0)
    if GATED:
        acc = _gate(acc, up, alpha, limit, more, KIND)
    tl.store(out + pair * n + i, acc, mask=i < n)


@triton.jit
def _times(
    numbers, constants, factors, a, acc, inside, left, N: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BF16: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """acc ``[N, M]`` and what a block of the weights, at these places, makes of ``a`` ``[M, 128]``.
    ``left``: channels from this block on. Of E4M3 ``constants`` are the scales themselves."""
    if BITS == MXFP4:
        w = _block(tl.load(numbers, inside[:, None]), tl.load(constants, inside), N, BF16)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    elif BITS == NVFP4:
        scales = tl.load(constants[:, None] + tl.arange(0, 8)[None, :], inside[:, None], other=0.0)
        w = _scaled_block(tl.load(numbers, inside[:, None]), _numeric(scales).to(tl.float32), N, BF16)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    elif BITS == E4M3:
        here = inside[:, None] & (tl.arange(0, 128) < left)[None, :]
        w = _numeric(tl.load(numbers, here, other=0.0)).to(a.dtype)
        acc += tl.dot(w, tl.trans(a), input_precision="ieee") * constants[:, None]
    elif BITS == MXFP8:
        here = inside[:, None] & (tl.arange(0, 128) < left)[None, :]
        exponents = tl.load(constants, inside, other=0)[:, None] >> (8 * tl.arange(0, 4))[None, :]
        scales = tl.exp2((exponents & 255).to(tl.float32) - 127.0)
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [N, 4, 32]), [N, 128])
        w = (_numeric(tl.load(numbers, here, other=0.0)).to(tl.float32) * scales).to(a.dtype)
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    elif BITS == CODED:
        scales = tl.load(constants[:, None] + tl.arange(0, 2)[None, :], inside[:, None], other=0.0)
        words = tl.load(numbers, inside[:, None], other=0)
        if BF16:
            w = _coded(words, factors, scales, N)
        else:
            codes = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
            scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [N, 2, 64]), [N, 128])
            w = tl.load(factors + tl.reshape(codes, [N, 128])) * scales
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        of_groups = tl.load(constants[:, None] + tl.arange(0, 128 // GROUP)[None, :], inside[:, None])
        words = tl.load(numbers, inside[:, None])
        w = _integers(words, of_groups, N, BITS, GROUP, GROUP < 128, BF16, WHOLE)
        if GROUP < 128:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc += tl.dot(w, tl.trans(a), input_precision="ieee") * _scale(of_groups)
    return acc


@triton.jit
def _experts(
    x, w, constants, factors, bias, ids, order, table, out, n, k, blocks, top_k, pairs, alpha, limit, more,
    DENSE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr,
    SPLITS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, BF16: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of the pairs of one block.

    GATED: x is by token, w has gate rows and up rows of each expert, out is in the pairs' order. Otherwise x
    is in that order and out by pair. Not SORTED: a block is a pair. DENSE: there is one expert, and blocks
    are ``pairs`` in their order. SPLITS: of k, whose sums are ``_join``ed.
    """
    _begin(PDL)
    tiles = tl.cdiv(n, BN)
    block = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BN
    share = tl.cdiv(blocks, SPLITS)
    begin = tl.program_id(1) * share
    m = tl.arange(0, BM)
    if DENSE:
        expert = block * 0
        place = block * BM + m
        live = place < pairs
        pair = place
    elif SORTED:
        expert = tl.load(table + block * 3)
        if expert < 0:
            return
        place = tl.load(table + block * 3 + 1) + m
        live = place < tl.load(table + block * 3 + 2)
        pair = tl.load(order + place, mask=live, other=0)
    else:
        expert = tl.load(ids + block)
        if expert < 0:
            return
        place = block + m * 0
        live = m < 1
        pair = place
    c = tl.arange(0, 128)
    source = x + (pair // top_k if GATED else place).to(tl.int64)[:, None] * k + c[None, :]
    rows: tl.constexpr = 2 * BN if GATED else BN  # of gate, then of up
    r = tl.arange(0, rows)
    column = first + r % BN
    inside = column < n
    row = expert.to(tl.int64) * (2 * n if GATED else n) + r // BN * n + column
    bytewise: tl.constexpr = BITS % 2 == 1
    words: tl.constexpr = 128 if bytewise else 4 * BITS if BITS % 4 == 0 and BITS > 0 else 16  # of a block
    per: tl.constexpr = 8 if BITS == NVFP4 else 2 if BITS == CODED else 128 // GROUP  # constants
    w += row[:, None] * (k if bytewise else blocks * words) + tl.arange(0, words)[None, :]
    constants += row * (blocks * per)
    acc = tl.zeros([rows, BM], tl.float32)
    last = blocks - 1
    if BITS == E4M3:  # Triton has those loads run ahead that products wait for, and no others
        ahead = tl.load(constants + tl.minimum(begin, last), inside, other=0.0)
    for at in range(begin, tl.minimum(begin + share, blocks)):
        here = live[:, None] & (at * 128 + c < k)[None, :]
        a = tl.load(source + at * 128, mask=here, other=0.0)
        numbers, own = w + at * words, constants + at * per
        if BITS == E4M3:
            own = ahead
            ahead = tl.load(constants + tl.minimum(at + 1, last), inside, other=0.0)
        left = k - at * 128
        acc = _times(numbers, own, factors, a, acc, inside, left, rows, BITS, GROUP, BF16, WHOLE)
    if BITS == MXFP4:
        acc *= LIFT
    if BITS == NVFP4:
        acc *= (tl.load(factors + row, mask=inside, other=0.0) * LIFT)[:, None]
    if SPLITS > 1:
        part = (tl.program_id(1) * pairs + place) * (2 * n if GATED else n)
        to = out + part[None, :] + (r // BN * n + column)[:, None]
        tl.store(to, acc, mask=inside[:, None] & live[None, :])
        return
    if BIAS:
        acc += tl.load(bias + row, mask=inside, other=0.0)[:, None]
    target = pair
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BN, BM]), (1, 2, 0)))
        acc = _gate(gate, up, alpha, limit, more, KIND)
        target = place
    column = first + tl.arange(0, BN)
    to = out + target.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, tl.trans(acc), mask=live[:, None] & (column < n)[None, :])


def product(
    x: Tensor,
    w: Packed,
    bias: Tensor | None,
    n: int,
    ids: Tensor,
    groups: Groups | None,
    tile: Tile,
    activation: Gating | None = None,
) -> Tensor:
    """One product of the pairs ids int32 ``[T, top_k]`` with the ``n`` outputs of their experts, whose
    weights are ``w``; bias float32, as long as these.

    With ``activation`` the product of gate and up: x by token ``[T, k]``, w of ``[E * 2 n, k]`` -> ``[P, n]``
    in the pairs' order. Without: x in that order ``[P, k]``, w of ``[E * n, k]`` -> ``[P, n]`` by pair. k is
    a multiple of 32. Without ``groups`` the order is that of the pairs, and each is read for itself.
    """
    words, constants, factors, bits, group, blocks = _parts(w, x.dtype)
    whole = getattr(w, "whole", True)
    (pairs, k), top_k, gated = (ids.numel(), x.shape[1]), ids.shape[1], activation is not None
    out = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    order, table, rows = (ids, ids, 16) if groups is None else (groups.order, groups.blocks, groups.rows)
    count = pairs if groups is None else table.shape[0]
    splits = tile.splits if groups is None else 1
    part = out
    if splits > 1:
        part = torch.empty(splits, pairs, n * (1 + gated), dtype=torch.float32, device=x.device)
    clamped = activation if isinstance(activation, Clamped) else Clamped(0.0, 0.0)
    numbers = clamped.alpha, clamped.limit, clamped.more
    kind = CLAMPED if isinstance(activation, Clamped) else GELU if activation == "gelu_tanh" else SILU
    added = bias if bias is not None else x
    same = {"GATED": gated, "KIND": kind, "BIAS": bias is not None, "SPLITS": splits}
    _experts[(count * cdiv(n, tile.n), splits)](
        x, words, constants, factors, added, ids, order, table, part, n, k, blocks, top_k, pairs,
        *numbers, DENSE=False, SORTED=groups is not None, BITS=bits, GROUP=group, WHOLE=whole,
        BF16=x.dtype == torch.bfloat16, BM=rows, BN=tile.n, num_warps=tile.warps, num_stages=tile.stages,
        **same, **_pdl(),
    )  # fmt: skip
    if splits > 1:
        _join[(pairs, cdiv(n, 512))](
            part, added, ids, out, pairs, n, *numbers, BLOCK=512, num_warps=4, **same, **_pdl()
        )
    return out


class _Parts(NamedTuple):
    """What kernels are given of a weight; ``blocks``: of a row."""

    words: Tensor
    constants: Tensor
    factors: Tensor
    bits: int
    group: int
    blocks: int


def _parts(w: Packed, dtype: torch.dtype) -> _Parts:
    """For x of this type."""
    words, constants, *more = w.tensors
    bits, group = KINDS.get(w.kind, (OTHERS.get(w.kind, 0), 128))
    factors = more[0] if more else constants
    if bits == OTHERS["nf4"]:
        coded: Any = w
        factors = coded.values(words.device)
        if dtype == torch.bfloat16:
            factors = _bytes_of(tuple(coded.table), words.device)
    if not this_device().fp8:
        words, constants = map(_as_bytes, (words, constants))
    if w.kind == "mxfp8":
        constants = constants.view(torch.int32)  # loads of a byte each would not run ahead
    if w.kind in ("mxfp8", "fp8g128"):
        return _Parts(words, constants, factors, bits, group, constants.shape[1])
    if w.kind == "mxfp4" or w.kind in KINDS:
        constants = constants.view(torch.int32)
    each = 4 * bits if w.kind in KINDS else 16
    return _Parts(words, constants, factors, bits, group, words.shape[1] // each)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


@lru_cache(8)
def _bytes_of(table: tuple[float, ...], device: torch.device) -> Tensor:
    """What ``_coded`` reads of a table: int32 ``[8]``."""
    halves = torch.tensor(table, device="cpu").bfloat16().view(torch.uint8).view(-1, 2)
    return halves.flip(1).t().contiguous().view(torch.int32).flatten().to(device)


class Cut(NamedTuple):
    """Rows of x in a block, and the cut of the weight."""

    rows: int
    tile: Tile


def cut(m: int, n: int, blocks: int, itemsize: int = 2) -> Cut:
    """Of ``linear``."""
    if this_device().wgmma and itemsize == 2 and 32 < m <= 64:
        rows, *tiled = integers.tile_for(m, n, 128 * blocks, itemsize)
        return Cut(rows, Tile(*tiled))
    rows, tile = 16, Tile(64, 4, 3)
    if m > 16:
        found = tiles_for(max(m, FEW + 1), 1, itemsize, this_device().wgmma)
        rows, tile = found.rows or rows, found.down
    programs = cdiv(m, rows) * cdiv(n, tile.n)
    return Cut(rows, tile._replace(splits=_splits(programs, blocks)))


def linear(x: Tensor, w: Packed, bias: Tensor | None = None, fixed: bool = False) -> Tensor:
    """``x @ w.T + bias`` of no integers, x ``[m, k]`` contiguous, k a multiple of 16: the product of the one
    expert that there is. ``fixed``: cut alike for every number of rows."""
    (m, k), (words, constants, factors, bits, group, blocks) = x.shape, _parts(w, x.dtype)
    n = words.shape[0]
    cuts = Cut(16, Tile(64, 4, 3)) if fixed else cut(m, n, blocks, x.itemsize)
    (rows, tile), splits = cuts, cuts.tile.splits
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    grid = cdiv(m, rows) * cdiv(n, tile.n)
    part = out if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    added = bias is not None and splits == 1
    _experts[(grid, splits)](
        x, words, constants, factors, bias.float() if added and bias is not None else x, x, x, x, part, n, k,
        blocks, 1, m, 0.0, 0.0, 0.0, DENSE=True, GATED=False, KIND=SILU, BIAS=added, SORTED=False,
        SPLITS=splits, BITS=bits, GROUP=group, WHOLE=True, BF16=x.dtype == torch.bfloat16, BM=rows, BN=tile.n,
        num_warps=tile.warps, num_stages=tile.stages, **_pdl(),
    )  # fmt: skip
    return out if splits == 1 else integers.join(part, bias, out)


def _splits(programs: int, blocks: int) -> int:
    """Of k, so that a GPU has work for its multiprocessors."""
    splits = 1
    while 2 * splits * programs <= 2 * this_device().multiprocessors and blocks >= 8 * splits:
        splits *= 2
    return splits

# mypy: allow-untyped-defs
"""Products of experts whose weights are in MXFP4 (``quant/e2m1.py``): e2m1 numbers become bfloat16 in
registers. Weights are the left side of the tensor cores' instruction, which may come from registers, so they
never go through shared memory again.

Pairs, blocks and places are those of ``moe.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.routing import Clamped, Gating
from sgla.kernels.triton.elementwise import _activate, _begin, _pdl
from sgla.kernels.triton.moe import Groups

FEW = 16  # pairs up to which each is a block of its own, and nothing is sorted
SILU, GELU, CLAMPED = range(3)
LIFT = tl.constexpr(2.0**64)  # what sums are too small by: see ``quant/e2m1.py``
# Sign and lower bits of two codes, where bfloat16 has them, as int32.
SIGNS, LOWER = tl.constexpr(0x80008000 - (1 << 32)), tl.constexpr(0x01C001C0)
BOTH = tl.constexpr(0x81C081C0 - (1 << 32))


class Tile(NamedTuple):
    """How a product is cut: ``n`` outputs (of gate and of up each) of a program."""

    n: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Pairs in a block (None: each is one), and the cuts of the two products."""

    rows: int | None
    gate_up: Tile
    down: Tile


def choose(pairs: int, experts: int, itemsize: int, hopper: bool) -> Tiles:
    """For so many pairs. Without the shared memory of ``hopper``, and for float32, cuts are small."""
    mean = pairs / experts
    if pairs <= FEW:
        return Tiles(None, Tile(64, 4, 4), Tile(64, 4, 4))
    if mean <= 16:
        return Tiles(16, Tile(64, 4, 3), Tile(64, 4, 4))
    if mean <= 96 or not hopper or itemsize == 4:
        return Tiles(32 if itemsize == 4 else 64, Tile(64, 4, 2), Tile(64, 4, 2))
    return Tiles(128, Tile(128, 8, 3), Tile(128, 4, 3))


@triton.jit
def _numbers(words, exponents, G: tl.constexpr, N: tl.constexpr, BF16: tl.constexpr):
    """``[N, 32]``: group G of a block, of words ``[N, 16]`` and the block's four exponents in an int32[N]."""
    if G == 0:
        pairs = words & BOTH
    elif G == 1:
        pairs = (words << 3) & BOTH
    elif G == 2:
        pairs = ((words << 2) & SIGNS) | ((words << 6) & LOWER)
    else:
        pairs = ((words << 1) & SIGNS) | ((words >> 3) & LOWER)
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
def _words(w, exponents, row, inside, at, blocks):
    """Block ``at`` of some rows."""
    words = tl.load(w + row[:, None] * (blocks * 16) + (at * 16 + tl.arange(0, 16))[None, :], inside[:, None])
    return words, tl.load(exponents + row * blocks + at, inside)


@triton.jit
def _experts(
    x, w, exponents, bias, ids, order, table, out, n, k, blocks, top_k, alpha, limit,
    GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, BF16: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of the pairs of one block.

    GATED: x is by token, w has gate rows and up rows of each expert, out is in the pairs' order. Otherwise x
    is in that order and out by pair. Not SORTED: a block is a pair.
    """
    _begin(PDL)
    tiles = tl.cdiv(n, BN)
    block = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BN
    m = tl.arange(0, BM)
    if SORTED:
        expert = tl.load(table + block * 3)
        if expert < 0:
            return
        place = tl.load(table + block * 3 + 1) + m
        live = place < tl.load(table + block * 3 + 2)
        pair = tl.load(order + place, mask=live, other=0)
    else:
        expert = tl.load(ids + block)
        place = block + m * 0
        live = m < 1
        pair = place
    c = tl.arange(0, 32)
    source = x + (pair // top_k if GATED else place).to(tl.int64)[:, None] * k + c[None, :]
    column = first + tl.arange(0, BN)
    inside = column < n
    top = expert.to(tl.int64) * (2 * n if GATED else n)
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for at in range(0, blocks):
        words, scales = _words(w, exponents, top + column, inside, at, blocks)
        if GATED:
            up_words, up_scales = _words(w, exponents, top + n + column, inside, at, blocks)
        for i in tl.static_range(4):
            depth = at * 128 + i * 32
            here = live[:, None] & (depth + c < k)[None, :]
            a = tl.trans(tl.load(source + depth, mask=here, other=0.0))
            acc = tl.dot(_numbers(words, scales, i, BN, BF16), a, acc, input_precision="ieee")
            if GATED:
                up = tl.dot(_numbers(up_words, up_scales, i, BN, BF16), a, up, input_precision="ieee")
    acc *= LIFT
    at_bias = bias + top + column
    if BIAS:
        acc += tl.load(at_bias, mask=inside, other=0.0)[:, None]
    target = pair
    if GATED:
        up *= LIFT
        if BIAS:
            up += tl.load(at_bias + n, mask=inside, other=0.0)[:, None]
        if KIND == 2:
            acc = tl.minimum(acc, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1
            acc = acc * tl.sigmoid(acc * alpha) * up
        else:
            acc = _activate(acc, KIND == 1) * up
        target = place
    to = out + target.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, tl.trans(acc), mask=live[:, None] & inside[None, :])


def product(
    x: Tensor,
    w: tuple[Tensor, ...],
    bias: Tensor | None,
    n: int,
    ids: Tensor,
    groups: Groups | None,
    tile: Tile,
    activation: Gating | None = None,
) -> Tensor:
    """One product of the pairs ids int32 ``[T, top_k]`` with the ``n`` outputs of their experts, whose
    weights are the tensors of an ``E2M1``; bias float32, as long as these.

    With ``activation`` the product of gate and up: x by token ``[T, k]``, w of ``[E * 2 n, k]`` -> ``[P, n]``
    in the pairs' order. Without: x in that order ``[P, k]``, w of ``[E * n, k]`` -> ``[P, n]`` by pair. k is
    a multiple of 32. Without ``groups`` the order is that of the pairs, and each is read for itself.
    """
    words, exponents = w
    (pairs, k), top_k = (ids.numel(), x.shape[1]), ids.shape[1]
    out = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    order, table, rows = (ids, ids, 16) if groups is None else (groups.order, groups.blocks, groups.rows)
    count = pairs if groups is None else table.shape[0]
    alpha, limit = (activation.alpha, activation.limit) if isinstance(activation, Clamped) else (0.0, 0.0)
    kind = CLAMPED if isinstance(activation, Clamped) else GELU if activation == "gelu_tanh" else SILU
    _experts[(count * triton.cdiv(n, tile.n),)](
        x, words, exponents.view(torch.int32), bias if bias is not None else x, ids, order, table, out, n, k,
        words.shape[1] // 16, top_k, alpha, limit, GATED=activation is not None, KIND=kind,
        BIAS=bias is not None, SORTED=groups is not None, BF16=x.dtype == torch.bfloat16, BM=rows, BN=tile.n,
        num_warps=tile.warps, num_stages=tile.stages, **_pdl(),
    )  # fmt: skip
    return out

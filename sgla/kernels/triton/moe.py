# mypy: allow-untyped-defs
"""Mixture of experts on the GPU: routing, grouped matrix products, and vector products for very few tokens.

A *pair* is one token's choice of one expert: token ``p // top_k``. Sorted by expert, pairs form *blocks* of
equal size, each of one expert, with a table int32 ``[blocks, 3]``: expert (-1: nothing to do), first and last
+ 1 place in the order. Grids depend on the number of tokens alone, so that every launch can be captured.

A pair whose expert is on another rank has the expert -1 and the probability 0. It is in no block, and what
stands in its place of a product is anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgla.kernels.ops import NO_BIASES, Biases
from sgla.kernels.rehearsal import under_way
from sgla.kernels.routing import Routing
from sgla.kernels.triton.common import _activate, _begin, _pdl, cdiv, next_power_of_2


class Tile(NamedTuple):
    """How one grouped product is cut: ``n`` outputs (of gate and of up each) and ``k`` inputs at a time."""

    n: int
    k: int
    warps: int
    stages: int
    swap: bool  # weights are the wide side of the tensor-core instruction: for blocks of few rows
    bulk: bool  # weights come through the bulk copy engine (TMA)


class Tiles(NamedTuple):
    """For up to ``tokens`` tokens: pairs in a block, and the cuts of the two products."""

    tokens: int
    rows: int
    gate_up: Tile
    down: Tile


class Groups(NamedTuple):
    """Pairs sorted by expert: ``order`` int32 ``[T * top_k]``, and ``blocks`` of ``rows`` pairs at most."""

    order: Tensor
    blocks: Tensor
    top_k: int
    rows: int


class Sorting(NamedTuple):
    """What is compiled to sort pairs: how many a program takes, and the blocks that there is room for."""

    chunk: int
    room: int


class Cut(NamedTuple):
    """How a product for few tokens is cut: ``n`` outputs of a program, ``k`` inputs at a time."""

    n: int
    k: int
    warps: int


class Few(NamedTuple):
    """How both products of few tokens are cut. ``two``: a token's experts lie in two tiles of ``down`` where
    fewer places stay empty so."""

    gate_up: Cut = Cut(4, 2048, 4)
    down: Cut = Cut(2, 2048, 2)  # k of a token's experts together
    two: bool = False


ROUTER = Cut(4, 2048, 4)  # fewer experts where a row is wider
LARGE = 4 << 20  # weights of an expert's matrix: fewer rows at a time in e4m3, and more of each
EARLY = 2  # tokens up to which shared experts are loaded before it is known who else is chosen


def few_cuts(tokens: int, top_k: int, f: int, d: int, size: int) -> Few:
    """As measured on an H200 with nine experts of 512, eight of 1408 and five of 1536, and in e4m3 nine of
    1408 and 3072 in models of the width 4096 (``bench/gpu_moe.py layers``). ``size``: bytes of a weight."""
    full, narrow = top_k == next_power_of_2(top_k), f <= 512
    if size == 1 and f * d >= LARGE:
        return Few(Cut(2, 4096, 4), Cut(1, 4096, 2), True)
    if size == 2 and full and top_k > 4:
        return Few(down=Cut(1, 4096, 1))
    if size == 2 and narrow:
        return Few(Cut(2, 2048, 2), Cut(1, 4096, 1), True)
    if size == 1 and not full and narrow and tokens == 1:
        return Few(down=Cut(1, 2048, 1), two=True)
    return Few()


@triton.jit
def _norm_router(
    x, norm, router, normed, logits, eps, d, experts,
    HAS_NORM: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the logits of BE experts for one token, and from the first one the normed token too.
    EARLY, here and below: the next kernel starts at once, whose first loads need nothing of this one."""
    if EARLY and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    i = tl.arange(0, D)
    mask = (e < experts)[:, None] & (i < d)[None, :]
    w = tl.load(router + e[:, None] * d + i[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        n = tl.load(norm + i, mask=i < d, other=0.0).to(tl.float32)
    _begin(PDL)
    v = tl.load(x + token * d + i, mask=i < d, other=0.0)
    if HAS_NORM:
        f = v.to(tl.float32)
        v = (f * tl.rsqrt(tl.sum(f * f) / d + eps) * n).to(v.dtype)
        if tl.program_id(1) == 0:
            tl.store(normed + token * d + i, v, mask=i < d)
    y = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], 1)
    tl.store(logits + token * experts + e, y, mask=e < experts)


@triton.jit
def _best_groups(ranked, i, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr):
    """``ranked`` ``[BT, E]`` where all but the KEPT best groups of SIZE experts are -inf."""
    column = tl.arange(0, GROUPS)[None, :]
    best = tl.full([ranked.shape[0], GROUPS], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where((i // SIZE == g)[None, :], ranked, float("-inf"))
        value, place = tl.max(own, 1, return_indices=True)
        if TWO:
            value += tl.max(tl.where(i[None, :] == place[:, None], float("-inf"), own), 1)
        best = tl.where(column == g, value[:, None], best)
    stays = tl.zeros(ranked.shape, tl.int32)
    for _ in tl.static_range(KEPT):
        _, g = tl.max(best, 1, return_indices=True)
        stays += (i // SIZE)[None, :] == g[:, None]
        best = tl.where(column == g[:, None], float("-inf"), best)
    return tl.where(stays > 0, ranked, float("-inf"))


@triton.jit
def _ordered(x):
    """int32 in the order of float32: a warp finds the largest of integers in one instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # of -0 as of 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits, bias, correction, factor, homes, lives, ids, probabilities, done, tokens, experts, top_k, places,
    least, scale, s_logits, jitter,
    PLACES: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, SPARSE: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr, FACTOR: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr, LEAST: tl.constexpr,
    HELD: tl.constexpr, PADDED: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the best experts of BT tokens; equal ones go to the lower number. SHARED: and so many
    more, with the sigmoid of the logit behind the others' if they are GATED. The first program clears
    ``done``. GROUPS: 0, or a power of two of at least as many groups of SIZE. SPARSE: by ``sparsemixer``,
    whose ``jitter`` is doubled. HELD: experts become their places on this rank, as ``homes`` has them, and
    those whose turn is another rank's -1. PADDED: so do those of tokens with 0 in ``lives``."""
    if EARLY and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _begin(PDL)
    if PLACES > 0 and tl.program_id(0) == 0:
        z = tl.arange(0, PLACES)
        tl.store(done + z, tl.zeros([PLACES], tl.int32), mask=z < places)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    i = tl.arange(0, E)
    live = (t < tokens)[:, None]
    there = (i < experts)[None, :]
    at = logits + t[:, None] * s_logits + i[None, :]
    v = tl.load(at, mask=live & there, other=float("-inf"))
    if BIAS:
        v += tl.load(bias + i, mask=i < experts, other=0.0)[None, :]
    ranked = v  # in the order of the scores, and finer
    scores = v
    # Only those of the chosen ones are wanted then.
    BY_LOGITS: tl.constexpr = not CORRECTION and GROUPS == 0 and not SPARSE
    if not BY_LOGITS and not SPARSE:
        if SIGMOID:
            scores = tl.sigmoid(v)
        else:
            scores = tl.exp(v - tl.max(v, 1)[:, None])
            scores = scores / tl.sum(scores, 1)[:, None]
        ranked = scores
        if CORRECTION:
            ranked += tl.load(correction + i, mask=i < experts, other=0.0)[None, :]
        ranked = tl.where(there, ranked, float("-inf"))
    if GROUPS > 0:
        ranked = _best_groups(ranked, i, GROUPS, SIZE, KEPT, TWO)
    column = tl.arange(0, K)[None, :]
    chosen = tl.zeros([BT, K], tl.int32)
    p = tl.full([BT, K], float("-inf") if BY_LOGITS else 0.0, tl.float32)
    order = _ordered(ranked)
    for j in range(top_k):
        best = tl.max(order, 1)[:, None]
        expert = tl.min(tl.where(order == best, i[None, :], E - 1), 1)[:, None]
        own = i[None, :] == expert
        if CORRECTION:
            score = tl.sum(tl.where(own, scores, 0.0), 1)[:, None]
        else:
            score = tl.where(best < 0, best ^ 0x7FFFFFFF, best).to(tl.float32, bitcast=True)
        if SPARSE:
            out = (score - v) / tl.maximum(tl.abs(v), score) > jitter
            score = 1 / tl.sum(tl.where(out | (order == -0x80000000), 0.0, tl.exp(v - score)), 1)[:, None]
        chosen = tl.where(column == j, expert, chosen)
        p = tl.where(column == j, score, p)
        order = tl.where(own, -0x80000000, order)
    if BY_LOGITS:
        if SIGMOID:
            p = tl.sigmoid(p)
        else:
            top = tl.max(p, 1)[:, None]
            p = tl.exp(p - top)
            if not NORMALIZE or LEAST:
                p = p / tl.sum(tl.exp(v - top), 1)[:, None]
    if NORMALIZE:
        total = tl.sum(p, 1)
        p = p / (tl.maximum(total, least) if LEAST else total)[:, None]
    chosen = tl.minimum(chosen, experts - 1)  # within bounds even for NaN
    p *= scale
    if FACTOR:
        p *= tl.load(factor + chosen)
    width = top_k + SHARED
    if SHARED:
        own = tl.zeros([BT], tl.float32) + 1
        if GATED:
            own = tl.sigmoid(tl.load(logits + t * s_logits + experts, mask=t < tokens, other=0.0))
        chosen = tl.where(column >= top_k, experts + column - top_k, chosen)
        p = tl.where(column >= top_k, own[:, None], p)
    if HELD:
        home = tl.load(homes + chosen)
        here = ((home & 0xFFFF) > 0) & (t[:, None] % ((home >> 16) & 0xFF) == (home >> 24))
        chosen = tl.where(here, (home & 0xFFFF) - 1, -1)
        p = tl.where(here, p, 0.0)
    if PADDED:
        alive = tl.load(lives + t, mask=t < tokens, other=0)[:, None] != 0
        chosen = tl.where(alive, chosen, -1)
        p = tl.where(alive, p, 0.0)
    pair = t[:, None] * width + column
    mask = live & (column < width)
    tl.store(ids + pair, chosen, mask=mask)
    tl.store(probabilities + pair, p, mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One program: how often each expert is in CHUNK pairs."""
    _begin(PDL)
    chunk = tl.program_id(0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + i, mask=i < pairs, other=-1)
    found = tl.histogram(tl.maximum(expert, 0), E, mask=expert >= 0)
    tl.store(counts + chunk * E + tl.arange(0, E), found)


@triton.jit(do_not_specialize=["pairs", "count"])
def _group(
    ids, counts, order, blocks, pairs, count,
    ROWS: tl.constexpr, E: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the places of one expert's pairs of one chunk in the order. The first chunk's: its blocks
    too, which are about equal."""
    _begin(PDL)
    expert = tl.program_id(0)
    own_chunk = tl.program_id(1)
    bins = tl.arange(0, E)
    sizes = tl.zeros([E], tl.int32)
    earlier = tl.zeros([E], tl.int32)
    for chunk in range(0, tl.num_programs(1)):
        found = tl.load(counts + chunk * E + bins)
        sizes += found
        if chunk < own_chunk:
            earlier += found
    needed = (sizes + ROWS - 1) // ROWS
    start = tl.sum(tl.where(bins < expert, sizes, 0))
    first = tl.sum(tl.where(bins < expert, needed, 0))
    size = tl.sum(tl.where(bins == expert, sizes, 0))
    own = (size + ROWS - 1) // ROWS
    each = (size + own - 1) // tl.maximum(own, 1)
    if own_chunk == 0:
        b = tl.arange(0, BLOCKS)
        entry = blocks + (first + b) * 3
        tl.store(entry, tl.zeros([BLOCKS], tl.int32) + expert, mask=b < own)
        tl.store(entry + 1, start + b * each, mask=b < own)
        tl.store(entry + 2, tl.minimum(start + (b + 1) * each, start + size), mask=b < own)
        if expert == tl.num_programs(0) - 1:
            tl.store(blocks + b * 3, tl.full([BLOCKS], -1, tl.int32), mask=(b >= first + own) & (b < count))
    i = own_chunk * CHUNK + tl.arange(0, CHUNK)
    mine = tl.load(ids + i, mask=i < pairs, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0)
    before = start + tl.sum(tl.where(bins == expert, earlier, 0))
    tl.store(order + before + rank - 1, i, mask=mine)


@triton.jit
def _weight(
    w, row, last, k, depth, BN: tl.constexpr, BK: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr
):
    """``w[row : row + BN, k : k + BK]``; rows from ``last`` on are anything."""
    if BULK:
        tile = w.load([row, k])
    else:
        r = row + tl.arange(0, BN)
        c = k + tl.arange(0, BK)
        at = w + r.to(tl.int64)[:, None] * depth + c[None, :]
        if EVEN:
            tile = tl.load(at, mask=(r < last)[:, None], other=0.0)
        else:
            tile = tl.load(at, mask=(r < last)[:, None] & (c < depth)[None, :], other=0.0)
    return tile


@triton.jit
def _dot(x, w, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _experts(
    x, x_scale, w, w_scale, order, blocks, out, n, k, top_k,
    GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, SWAP: tl.constexpr, BULK: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of the pairs of one block.

    GATED: x is by token, w has gate rows and up rows of each expert, out is in the pairs' order. Otherwise x
    is in that order and out by pair.
    """
    _begin(PDL)
    tiles = tl.cdiv(n, BN)
    block = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BN
    expert = tl.load(blocks + block * 3)
    if expert < 0:
        return
    place = tl.load(blocks + block * 3 + 1) + tl.arange(0, BM)
    live = place < tl.load(blocks + block * 3 + 2)
    pair = tl.load(order + place, mask=live, other=0)
    row = pair // top_k if GATED else place
    c = tl.arange(0, BK)
    at = x + row.to(tl.int64)[:, None] * k + c[None, :]
    top = expert * (2 * n if GATED else n) + first
    last = top - first + n
    shape: tl.constexpr = [BN, BM] if SWAP else [BM, BN]
    acc = tl.zeros(shape, tl.float32)
    up = tl.zeros(shape, tl.float32)
    for depth in range(0, k, BK):
        if EVEN:
            a = tl.load(at + depth, mask=live[:, None], other=0.0)
        else:
            a = tl.load(at + depth, mask=live[:, None] & (depth + c < k)[None, :], other=0.0)
        acc = _dot(a, _weight(w, top, last, depth, k, BN, BK, BULK, EVEN), acc, SWAP)
        if GATED:
            up = _dot(a, _weight(w, top + n, last + n, depth, k, BN, BK, BULK, EVEN), up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    column = first + tl.arange(0, BN)
    inside = column < n
    if SCALED:
        by_row = tl.load(x_scale + row, mask=live, other=0.0)[:, None]
        by_column = w_scale + expert * (2 * n if GATED else n) + column
        acc = acc * by_row * tl.load(by_column, mask=inside, other=0.0)[None, :]
        if GATED:
            up = up * by_row * tl.load(by_column + n, mask=inside, other=0.0)[None, :]
    target = pair
    if GATED:
        acc = _activate(acc, GELU) * up
        target = place
    to = out + target.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, acc, mask=live[:, None] & inside[None, :])


@triton.jit
def _combine(
    y, probabilities, residual, norm, out, total, eps, d, TOP_K: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the weighted sum of one token's experts. ADD: into the residual.
    NORM: and the norm of that."""
    _begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    v = tl.zeros([D], tl.float32)
    if ADD:
        v = tl.load(residual + token * d + i, mask=i < d, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        p = tl.load(probabilities + token * TOP_K + j)
        here = tl.where(p == 0, 0, d)
        made = tl.load(y + (token * TOP_K + j) * d + i, mask=i < here, other=0.0)
        v += p * made.to(tl.float32)
    h = v.to(total.dtype.element_ty)
    tl.store(total + token * d + i, h, mask=i < d)
    if NORM:
        v = h.to(tl.float32)
        w = tl.load(norm + i, mask=i < d, other=0.0).to(tl.float32)
        tl.store(out + token * d + i, v * tl.rsqrt(tl.sum(v * v) / d + eps) * w, mask=i < d)


@triton.jit
def _sum_rows(rows, at, out, d, COUNT: tl.constexpr, D: tl.constexpr):
    """One program: a part of one sum."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * D + tl.arange(0, D)
    v = tl.zeros([D], tl.float32)
    for j in tl.static_range(COUNT):
        row = tl.load(at + token * COUNT + j).to(tl.int64)
        there = tl.where(row < 0, 0, d)
        v += tl.load(rows + row * d + i, mask=i < there, other=0.0).to(tl.float32)
    tl.store(out + token * d + i, v.to(out.dtype.element_ty), mask=i < d)


@triton.jit
def _few_gate_up(
    x, probabilities, ids, w, w_scale, out, f, experts,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN inner activations of one pair, times its probability. The last SHARED of the TOP_K
    experts of a token are the last of all: they need no ``ids``, so those programs come first and load
    weights before the wait."""
    pair = tl.num_programs(1) - 1 - tl.program_id(1)
    token = pair // TOP_K
    place = pair % TOP_K
    r = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    expert = experts - TOP_K + place
    if place < TOP_K - SHARED:
        _begin(PDL)
        expert = tl.load(ids + pair)
    here = tl.where(expert < 0, 0, f)
    source = w + (expert.to(tl.int64) * 2 * f + r)[:, None] * D + k[None, :]
    above = f.to(tl.int64) * D
    mask = (r < here)[:, None] & (k < D)[None, :]
    g = tl.load(source, mask=mask, other=0.0)
    u = tl.load(source + above, mask=mask, other=0.0)
    if place >= TOP_K - SHARED:
        _begin(PDL)
    p = tl.load(probabilities + pair)
    row = x + token.to(tl.int64) * D + k
    a = tl.load(row, mask=k < D, other=0.0).to(tl.float32)[None, :]
    gate = g.to(tl.float32) * a
    up = u.to(tl.float32) * a
    for at in tl.static_range(BK, D, BK):
        mask = (r < here)[:, None] & (at + k < D)[None, :]
        g = tl.load(source + at, mask=mask, other=0.0)
        u = tl.load(source + above + at, mask=mask, other=0.0)
        a = tl.load(row + at, mask=at + k < D, other=0.0).to(tl.float32)[None, :]
        gate += g.to(tl.float32) * a
        up += u.to(tl.float32) * a
    g = tl.sum(gate, 1)
    u = tl.sum(up, 1)
    if SCALED:
        scale = w_scale + expert * 2 * f + r
        g *= tl.load(scale, mask=r < here, other=0.0)
        u *= tl.load(scale + f, mask=r < here, other=0.0)
    tl.store(out + pair.to(tl.int64) * f + r, p * _activate(g, GELU) * u, mask=r < f)


@triton.jit
def _few_rows(ids, pair, c, d, FIRST: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr):
    """Of K experts of a token from the place FIRST on: the rows of the outputs c ``[BN, K]``, whether they
    are there, and the places of their inner activations."""
    j = FIRST + tl.arange(0, K)
    expert = tl.load(ids + pair + j, mask=j < TOP_K, other=-1, cache_modifier=".cg").to(tl.int64)
    row = tl.maximum(expert, 0)[None, :] * d + c[:, None]
    return row, (c < d)[:, None] & (expert >= 0)[None, :], tl.where(j < TOP_K, pair + j, pair)


@triton.jit
def _few_weights(w, row, inside, k, F: tl.constexpr):
    return tl.load(
        w + row[:, :, None] * F + k[None, None, :],
        mask=inside[:, :, None] & (k < F)[None, None, :],
        other=0.0,
    )


@triton.jit
def _few_inner(x, places, k, F: tl.constexpr):
    at = x + places[None, :, None] * F + k[None, None, :]
    return tl.load(at, mask=(k < F)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def _few_down(
    x, w, w_scale, ids, out, d,
    TOP_K: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    REST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of one token, summed over its experts, K of them and up to REST behind these.
    The first weights are loaded before the wait for ``x``: the kernel that makes it lets this one start
    behind its own wait, so ``ids`` are there."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pair = token * TOP_K
    row, inside, places = _few_rows(ids, pair, c, d, 0, TOP_K, K)
    weight = _few_weights(w, row, inside, k, F)
    if REST > 0:
        rest, there, others = _few_rows(ids, pair, c, d, K, TOP_K, REST)
        more = _few_weights(w, rest, there, k, F)
    _begin(PDL)
    part = tl.sum(weight.to(tl.float32) * _few_inner(x, places, k, F), 2)
    if REST > 0:
        behind = tl.sum(more.to(tl.float32) * _few_inner(x, others, k, F), 2)
    for at in tl.static_range(BK, F, BK):
        weight = _few_weights(w, row, inside, at + k, F)
        part += tl.sum(weight.to(tl.float32) * _few_inner(x, places, at + k, F), 2)
        if REST > 0:
            more = _few_weights(w, rest, there, at + k, F)
            behind += tl.sum(more.to(tl.float32) * _few_inner(x, others, at + k, F), 2)
    if SCALED:
        part *= tl.load(w_scale + row, mask=inside, other=0.0)
    y = tl.sum(part, 1)
    if REST > 0:
        if SCALED:
            behind *= tl.load(w_scale + rest, mask=there, other=0.0)
        y += tl.sum(behind, 1)
    to = out + token * d + c
    if ADD:
        y += tl.load(to, mask=c < d, other=0.0).to(tl.float32)
    tl.store(to, y, mask=c < d)


def norm_router(
    x: Tensor, norm: Tensor | None, eps: float, router: Tensor, early: bool = True
) -> tuple[Tensor, Tensor]:
    """``(normed x, router logits float32 [T, E])``; for few tokens. Without ``norm`` x itself. ``early``: see
    ``route``."""
    tokens, d = x.shape
    experts = router.shape[0]
    normed = x if norm is None else torch.empty_like(x)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    width = next_power_of_2(d)
    each = max(1, min(ROUTER.n * ROUTER.k // width, next_power_of_2(experts)))
    _norm_router[(tokens, cdiv(experts, each))](
        x, norm if norm is not None else x, router, normed, logits, eps, d, experts,
        HAS_NORM=norm is not None, D=width, BE=each, EARLY=early and tokens <= EARLY,
        num_warps=ROUTER.warps, **_pdl(),
    )  # fmt: skip
    return normed, logits


def _indices(*shape: int, device: torch.device) -> Tensor:
    """Room for int32. Zeros in a rehearsal, when no kernel writes what torch's operations may read."""
    make = torch.zeros if under_way() else torch.empty
    return make(*shape, dtype=torch.int32, device=device)


def route_refuses(routing: Routing) -> str | None:
    """Why ``route`` does not choose so, or None."""
    if routing.score == "sqrtsoftplus" or routing.zeros:
        return "scores are roots, or experts of other groups count as 0"
    return None


def route(
    logits: Tensor,
    routing: Routing,
    biases: Biases = NO_BIASES,
    done: Tensor | None = None,
    early: bool = True,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``ops.route``: ``(probabilities float32 [T, top_k], ids int32 [T, top_k])``; the ids are places of
    whole experts on this rank, or -1. ``done`` int32[n] becomes zeros. ``early``: what follows gains by
    starting at once where tokens are few; kernels of CUDA, which fill the multiprocessors, lose. ``live``
    int32[T]: tokens with 0 choose no expert."""
    tokens, shared = logits.shape[0], routing.common
    experts, width = routing.experts(logits.shape[1]) - shared, routing.top_k + shared
    ids = _indices(tokens, width, device=logits.device)
    probabilities = torch.empty(tokens, width, dtype=torch.float32, device=logits.device)
    each = 1 if tokens <= 512 else 4
    given = biases.logits, biases.correction, biases.factor, biases.places, live
    vectors = (logits if b is None else b for b in given)
    places = 0 if done is None else done.numel()
    _route[(cdiv(tokens, each),)](
        logits, *vectors, ids, probabilities, ids if done is None else done, tokens, experts,
        routing.top_k, places, routing.least, routing.scale, logits.stride(0), 2 * routing.jitter,
        PLACES=next_power_of_2(places) if places else 0,
        NORMALIZE=routing.normalize, SIGMOID=routing.score == "sigmoid",
        SPARSE=routing.score == "sparsemixer", BIAS=biases.logits is not None,
        CORRECTION=biases.correction is not None, FACTOR=biases.factor is not None,
        SHARED=shared, GATED=routing.shared == "gated",
        GROUPS=max(2, next_power_of_2(routing.groups)) if routing.groups > 1 else 0,
        SIZE=experts // routing.groups, KEPT=routing.kept, TWO=routing.two,
        LEAST=routing.least > 0, HELD=biases.places is not None, PADDED=live is not None,
        E=next_power_of_2(experts), K=next_power_of_2(width), BT=each, EARLY=early and tokens <= EARLY,
        num_warps=each, **_pdl(),
    )  # fmt: skip
    return probabilities, ids


def blocks_of(pairs: int, experts: int, rows: int) -> int:
    """How many blocks of at most ``rows`` pairs there may be."""
    active = min(experts, pairs)
    return active + (pairs - active) // rows


def sorting(pairs: int, experts: int, rows: int) -> Sorting:
    """Of so many pairs into blocks of at most ``rows``."""
    return Sorting(min(4096, next_power_of_2(pairs)), next_power_of_2(blocks_of(pairs, experts, rows)))


def group(ids: Tensor, experts: int, rows: int) -> Groups:
    """Sort the pairs of ids int32 ``[T, top_k]`` by expert, into blocks of at most ``rows`` pairs. Where some
    are -1, as many places of the order stay anything."""
    pairs = ids.numel()
    count, (chunk, room) = blocks_of(pairs, experts, rows), sorting(pairs, experts, rows)
    order = _indices(pairs, device=ids.device)
    blocks = torch.empty(count, 3, dtype=torch.int32, device=ids.device)
    bins, chunks, warps = next_power_of_2(experts), cdiv(pairs, chunk), 8 if chunk > 1024 else 4
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    _count[(chunks,)](ids, counts, pairs, E=bins, CHUNK=chunk, num_warps=warps, **_pdl())
    _group[(experts, chunks)](
        ids, counts, order, blocks, pairs, count, ROWS=rows, E=bins, BLOCKS=room, CHUNK=chunk,
        num_warps=warps, **_pdl(),
    )  # fmt: skip
    return Groups(order, blocks, ids.shape[1], rows)


def experts(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    n: int,
    groups: Groups,
    tile: Tile,
    activation: str | None = None,
) -> Tensor:
    """One product of the grouped pairs with the ``n`` outputs of their experts.

    With ``activation`` the product of gate and up: x by token ``[T, k]``, w ``[E * 2 n, k]`` -> ``[P, n]`` in
    the pairs' order. Without: x in that order ``[P, k]``, w ``[E * n, k]`` -> ``[P, n]`` by pair. Scales: of
    e4m3 x ``[rows of x]`` and w ``[rows of w]``; the result is bfloat16 then.
    """
    order, blocks, top_k, rows = groups
    pairs, k = order.numel(), x.shape[1]
    out = torch.empty(pairs, n, dtype=x.dtype if x_scale is None else torch.bfloat16, device=x.device)
    bulk = tile.bulk and k * w.element_size() % 16 == 0
    source = TensorDescriptor.from_tensor(w, [tile.n, tile.k]) if bulk else w
    _experts[(blocks.shape[0] * cdiv(n, tile.n),)](
        x, x_scale if x_scale is not None else x, source, w_scale if w_scale is not None else x, order,
        blocks, out,
        n, k, top_k, GATED=activation is not None, GELU=activation == "gelu_tanh", SCALED=x_scale is not None,
        SWAP=tile.swap, BULK=bulk, EVEN=k % tile.k == 0, BM=rows, BN=tile.n, BK=tile.k,
        num_warps=tile.warps, num_stages=tile.stages, **_pdl(),
    )  # fmt: skip
    return out


def combine(y: Tensor, probabilities: Tensor, out: Tensor | None = None) -> Tensor:
    """The weighted sums over each token's experts: y ``[T * top_k, d]``, probabilities ``[T, top_k]`` ->
    ``[T, d]``; with ``out`` added to that in place."""
    total = (
        torch.empty(probabilities.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
        if out is None
        else out
    )
    _launch_combine(y, probabilities, total, out is not None, None, 0.0)
    return total


def sum_rows(rows: Tensor, at: Tensor) -> Tensor:
    """The sums of the rows ``at`` int32 ``[T, k]``, in that order, -1: none: ``[R, d]`` -> ``[T, d]``."""
    out, d = rows.new_empty(len(at), rows.shape[1]), rows.shape[1]
    width = min(1024, next_power_of_2(d))
    _sum_rows[(len(at), cdiv(d, width))](rows, at, out, d, COUNT=at.shape[1], D=width)
    return out


def combine_norm(y: Tensor, probabilities: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add the weighted sums to the residual in place and return its RMSNorm."""
    return _launch_combine(y, probabilities, residual, True, weight, eps)


def _launch_combine(
    y: Tensor, probabilities: Tensor, total: Tensor, add: bool, norm: Tensor | None, eps: float
) -> Tensor:
    tokens, top_k = probabilities.shape
    d = y.shape[1]
    out = total if norm is None else torch.empty_like(total)
    width = next_power_of_2(d)
    _combine[(tokens,)](
        y, probabilities, total, norm if norm is not None else total, out, total, eps, d, TOP_K=top_k,
        ADD=add, NORM=norm is not None, D=width, num_warps=4 if width <= 4096 else 8, **_pdl(),
    )  # fmt: skip
    return out


def few_gate_up(
    x: Tensor,
    probabilities: Tensor,
    ids: Tensor,
    w: Tensor,
    w_scale: Tensor | None,
    f: int,
    activation: str,
    shared: int = 0,
) -> Tensor:
    """The inner activations times the experts' probabilities: x ``[T, d]``, ids int32 ``[T, top_k]``, w ``[E
    * 2 f, d]`` -> ``[T * top_k, f]``. ``shared``: so many of each token's experts, the last ones, are the
    last of all."""
    (tokens, d), top_k = x.shape, ids.shape[1]
    out = torch.empty(ids.numel(), f, dtype=x.dtype, device=x.device)
    cut = few_cuts(tokens, top_k, f, d, w.element_size()).gate_up
    _few_gate_up[(cdiv(f, cut.n), ids.numel())](
        x, probabilities, ids, w, w_scale if w_scale is not None else x, out, f, w.shape[0] // (2 * f),
        TOP_K=top_k, SHARED=shared if tokens <= EARLY else 0, GELU=activation == "gelu_tanh",
        SCALED=w_scale is not None, D=d, BN=cut.n, BK=min(cut.k, next_power_of_2(d)),
        num_warps=cut.warps, **_pdl(),
    )  # fmt: skip
    return out


def few_down(
    x: Tensor, w: Tensor, w_scale: Tensor | None, ids: Tensor, d: int, out: Tensor | None = None
) -> Tensor:
    """The sums over each token's experts of what ``few_gate_up`` returned:
    ``[T, d]``; with ``out`` added to that in place."""
    (tokens, top_k), f = ids.shape, x.shape[1]
    total = torch.empty(tokens, d, dtype=x.dtype, device=x.device) if out is None else out
    _, cut, two = few_cuts(tokens, top_k, f, d, w.element_size())
    places, rest = split(top_k) if two else (next_power_of_2(top_k), 0)
    k = min(cut.k // places, next_power_of_2(f))
    if top_k < places and f >= 6 * k:  # as much is on its way although some places are empty
        k *= 2
    _few_down[(tokens, cdiv(d, cut.n))](
        x, w, w_scale if w_scale is not None else x, ids, total, d, TOP_K=top_k, ADD=out is not None,
        SCALED=w_scale is not None, F=f, K=places, REST=rest, BN=cut.n, BK=k, num_warps=cut.warps, **_pdl(),
    )  # fmt: skip
    return total


def split(top_k: int) -> tuple[int, int]:
    """The places that a token's experts take, powers of two: all in one tile, or in two where fewer stay
    empty so."""
    whole = next_power_of_2(top_k)
    first = whole // 2
    rest = next_power_of_2(top_k - first) if first < top_k < whole else whole
    return (first, rest) if first + rest < whole else (whole, 0)

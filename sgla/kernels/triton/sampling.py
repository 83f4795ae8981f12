# mypy: allow-untyped-defs
"""Sampling without sorting the vocabulary.

The draw of ``sgla/sampling/draw.py``, Gumbel-max sampling, in float32: the largest ``logit / T - log(E)``
wins, E exponential noise from a hash of (seed, position, token), so neither batch nor history of the process
can change a draw. Of all tokens only an upper bound of that is computed, for half the work; then the chunks
are searched that can hold the winner, mostly one. top-k, top-p and min-p (in this order, each on the
renormalised rest) become one threshold on the logits, found by searching the bits of the float order: eight
passes of 16 thresholds each, no sort.

A NaN counts as +inf. So the best score of a row is finite, or the row has no token: ``out`` then gets
NOT_NUMBERS (+inf) or NONE_LEFT (-inf, all are), and the token table 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from sgla.kernels.triton.common import _begin, _pdl, cdiv, next_power_of_2
from sgla.kernels.triton.tokens import TokenTable, _token

CHUNK = 4096  # logits a program masks
LOGITS = 2048  # that a program bounds
# Logits of a piece, at most and at least, and neighbours among them; pieces of a row, if these are enough.
PIECE, NEAR, PIECES = 512, 8, 256
COLD = tl.constexpr(1e-5)  # temperatures below are greedy
LOG2_E = tl.constexpr(1.4426950408889634)
WORST = -(1 << 63)  # key of a rank that has no candidate
INF_ORDER = tl.constexpr(
    0x7F800000
)  # upper half of the key of a score of +inf; that of -inf is its complement
NOT_NUMBERS, NONE_LEFT = tl.constexpr(-1), tl.constexpr(-2)  # as in ``sampling/faults.py``


@triton.jit
def _mix64(z):
    """The finaliser of splitmix64."""
    z = (z + 0x9E3779B97F4A7C15).to(tl.uint64)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9).to(tl.uint64)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB).to(tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _hash(seed, position, token):
    """uint32: a row's random multiple of what its random start makes of the token.
    The upper bits of the product."""
    row = _mix64(_mix64(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    low, high = row.to(tl.uint32), (row >> 32).to(tl.uint32)
    t = (token.to(tl.uint32) * 0x9E3779B1 + high).to(tl.uint32)
    t ^= t >> 16
    return (tl.umulhi(t, low) + (t * high + low * 0x85EBCA6B).to(tl.uint32)).to(tl.uint32)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def _noise(h, FAST: tl.constexpr):
    """log2 of E = -log(1 - v), v uniform: its first 23 bits are the last of the hash. The winners have small
    ones, for which the logarithm of 1 - v would be too coarse."""
    v = (((h << 9) | (h >> 23)).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    v = tl.minimum(v, 0.99999994)  # E is finite: the only token that is left must win
    e = tl.where(v < 0.015625, v * (1.0 + v * (0.5 + v * 0.33333334)), -0.6931472 * _log2(1.0 - v, FAST))
    return _log2(e, FAST)


@triton.jit
def _least_noise(h, FAST: tl.constexpr):
    """A little less than ``_noise``, since E > v, for a third of its work:
    the bits of v become those of a float in [1, 2)."""
    bits = (h & 0x7FFFFF) | 0x3F800000
    return _log2(bits.to(tl.float32, bitcast=True) - 1.0, FAST)


@triton.jit
def _usable(x, threshold):
    """Logits above the threshold; a NaN, which the threshold must not hide, is +inf."""
    x = tl.where(x < threshold, float("-inf"), x)
    return tl.where(x != x, float("inf"), x)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _bound_scores(
    logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first,
    HAS_THRESHOLDS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What no token of a chunk exceeds."""
    _begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf"))
    x = _usable(x, tl.load(thresholds + row) if HAS_THRESHOLDS else float("-inf"))
    if temperature >= COLD:
        h = _hash(tl.load(seeds + slot), tl.load(positions + row), first + i)
        x = x * (LOG2_E / temperature) - _least_noise(h, FAST)
    tl.store(bounds + row * chunks + chunk, tl.max(x, 0))


@triton.jit
def _find(
    logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first, winner,
    HAS_THRESHOLDS: tl.constexpr, FAST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The best score of a row and its token, looked for in the chunks whose bounds are not below it; with
    ``SECOND`` that without the ``winner``. Where it is not finite: what is to stand for the token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    threshold = tl.load(thresholds + row) if HAS_THRESHOLDS else float("-inf")
    seed, position = tl.load(seeds + slot), tl.load(positions + row)
    c = tl.arange(0, CHUNKS)
    bound = tl.load(bounds + row * chunks + c, mask=c < chunks, other=float("-inf"))
    most, chunk = tl.max(bound, 0, return_indices=True, return_indices_tie_break_left=True)
    best = tl.full([], float("-inf"), dtype=tl.float32)
    token = tl.full([], 0, dtype=tl.int32) + first
    while (most > float("-inf")) & (most >= best - (1e-5 + 1e-6 * tl.abs(best))):
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf"))
        x = _usable(x, threshold)
        if temperature >= COLD:
            x = x * (LOG2_E / temperature) - _noise(_hash(seed, position, first + i), FAST)
        if SECOND:
            x = tl.where(first + i == winner, float("-inf"), x)
        top, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        found = first + chunk * BLOCK + at
        better = (top > best) | ((top == best) & (found < token))
        best, token = tl.where(better, top, best), tl.where(better, found, token)
        bound = tl.where(c == chunk, float("-inf"), bound)
        most, chunk = tl.max(bound, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.where(best == float("inf"), NOT_NUMBERS, token)
    return best, tl.where(best == float("-inf"), NONE_LEFT, token)


@triton.jit
def _land(token, row, landing, stride, place, LANDS: tl.constexpr):
    if LANDS:
        tl.store(landing + tl.load(place) * stride + row, token)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "out", "place", "beside"])
def _finish(
    logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first,
    tokens, pages, stride, held, page_size, base, out, landing, landing_stride, place, beside,
    SECOND: tl.constexpr, LANDS: tl.constexpr, HAS_THRESHOLDS: tl.constexpr, FAST: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, token = _find(
        logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first, 0,
        HAS_THRESHOLDS, FAST, False, BLOCK, CHUNKS,
    )  # fmt: skip
    tl.store(out + row, token)
    _land(token, row, landing, landing_stride, place, LANDS)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    at = _token(tokens, pages, stride, held, page_size, base, slot, position)
    tl.store(at, tl.maximum(token, 0), mask=position > 0)
    if SECOND:
        other = tl.load(beside + row)
        if other > 0:
            _, second = _find(
                logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first,
                token, HAS_THRESHOLDS, FAST, True, BLOCK, CHUNKS,
            )  # fmt: skip
            tl.store(_token(tokens, pages, stride, held, page_size, base, slot, other), tl.maximum(second, 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "winners"])
def _make_keys(
    logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first, keys, winners,
    SECOND: tl.constexpr, HAS_THRESHOLDS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The winner of each row as an integer: the larger the better, and the lower id among equals. Never 0.
    With ``SECOND`` the one without the ``winners``."""
    _begin(PDL)
    winner = tl.load(winners + tl.program_id(0)) if SECOND else 0
    best, token = _find(
        logits, slots, positions, seeds, temperatures, thresholds, bounds, vocab, chunks, first, winner,
        HAS_THRESHOLDS, FAST, SECOND, BLOCK, CHUNKS,
    )  # fmt: skip
    bits = best.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low = (~token).to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(keys + tl.program_id(0).to(tl.int64), (order.to(tl.int64) << 32) | low)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "out", "place"])
def _use_keys(
    keys, slots, positions, tokens, pages, stride, held, page_size, base, out, landing, landing_stride,
    place, LANDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys + row)
    order = (key >> 32).to(tl.int32)
    token = tl.where(order >= INF_ORDER, NOT_NUMBERS, ~key.to(tl.int32))
    token = tl.where(order <= ~INF_ORDER, NONE_LEFT, token)
    tl.store(keys + row, -(1 << 63))
    tl.store(out + row, token)
    _land(token, row, landing, landing_stride, place, LANDS)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    at = _token(tokens, pages, stride, held, page_size, base, slot, position)
    tl.store(at, tl.maximum(token, 0), mask=position > 0)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "hidden"])
def _sharpen(
    logits, slots, positions, seeds, temperatures, thresholds, hidden, weight, rows, vocab, k, stride, pieces,
    first, HAS_THRESHOLDS: tl.constexpr, HAS_ROWS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
    PIECE: tl.constexpr, NEAR: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    threshold = tl.load(thresholds + row) if HAS_THRESHOLDS else float("-inf")
    e = tl.arange(0, PIECE)
    i = (e // NEAR * pieces + piece) * NEAR + e % NEAR
    x = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf"))
    x = _usable(x, threshold)
    if temperature >= COLD:
        h = _hash(tl.load(seeds + slot), tl.load(positions + row), first + i)
        x = x * (LOG2_E / temperature) - _noise(h, FAST)
    top, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    best = (at // NEAR * pieces + piece) * NEAR + at % NEAR
    there = top > float("-inf")
    source = tl.where(there, best, 0)
    source = tl.load(rows + source) if HAS_ROWS else source
    line, end = weight + source.to(tl.int64) * k, tl.where(there, k, 0)
    total = tl.zeros([K], dtype=tl.float32)
    for start in range(0, k, K):
        c = start + tl.arange(0, K)
        a = tl.load(hidden + row * stride + c, mask=c < k, other=0.0).to(tl.float32)
        total += a * tl.load(line + c, mask=c < end, other=0.0).to(tl.float32)
    exact = tl.where(there, tl.maximum(tl.sum(total, 0), threshold), float("-inf"))
    tl.store(logits + row * vocab + i, tl.where(i == best, exact, float("-inf")), mask=i < vocab)


@triton.jit
def _ordered(x):
    """float32 -> uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _unordered(u):
    bits = tl.where(u >> 31 == 1, u & 0x7FFFFFFF, u ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reach(row_logits, vocab, top, inverse, floor, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Largest threshold t (in float order) such that the tokens with logit >= max(t, floor) number,
    or weigh, >= target."""
    t = tl.zeros([], dtype=tl.uint32)
    digit = tl.arange(0, 16).to(tl.uint32)
    shift = tl.full([], 28, dtype=tl.uint32)
    for _ in range(8):
        tries = t + (digit << shift)
        sums = tl.zeros([16], dtype=tl.float32)
        for start in range(0, vocab, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(row_logits + i, mask=i < vocab, other=float("-inf"))
            keep = (i < vocab) & (x >= floor)
            value = tl.where(keep, tl.exp((x - top) * inverse) if BY_MASS else 1.0, 0.0)
            sums += tl.sum(tl.where(_ordered(x)[None, :] >= tries[:, None], value[None, :], 0.0), 1)
        fits = tl.where(sums >= target, digit.to(tl.int32), 0)
        t += tl.max(fits, 0).to(tl.uint32) << shift
        shift -= 4
    return _unordered(t)


@triton.jit
def _find_thresholds(
    logits, slots, temperatures, top_ks, top_ps, min_ps, thresholds, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    threshold = float("-inf")
    if temperature >= COLD:
        row_logits = logits + row * vocab
        running = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        for start in range(0, vocab, BLOCK):
            i = start + tl.arange(0, BLOCK)
            running = tl.maximum(running, tl.load(row_logits + i, mask=i < vocab, other=float("-inf")))
        top = tl.max(running, 0)
        inverse = 1.0 / temperature
        if (top_k > 0) & (top_k < vocab):
            threshold = _reach(row_logits, vocab, top, inverse, threshold, top_k.to(tl.float32), False, BLOCK)
        if top_p < 1.0:
            total = 0.0
            for start in range(0, vocab, BLOCK):
                i = start + tl.arange(0, BLOCK)
                x = tl.load(row_logits + i, mask=i < vocab, other=float("-inf"))
                total += tl.sum(tl.where((i < vocab) & (x >= threshold), tl.exp((x - top) * inverse), 0.0))
            threshold = tl.maximum(
                threshold, _reach(row_logits, vocab, top, inverse, threshold, top_p * total, True, BLOCK)
            )
        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + temperature * tl.log(min_p))
        threshold = tl.minimum(threshold, top)
    tl.store(thresholds + row, threshold)


@triton.jit
def _allowed(words, width, i, vocab):
    word = tl.load(words + tl.program_id(0).to(tl.int64) * width + i // 32, mask=i < vocab, other=0)
    return ((word >> (i % 32)) & 1) == 1


@triton.jit(do_not_specialize_on_alignment=["rows", "words"])
def _mask(logits, rows, words, left, vocab, width, chunks, BLOCK: tl.constexpr):
    n, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    at = logits + tl.load(rows + n).to(tl.int64) * vocab + i
    x = tl.load(at, mask=i < vocab, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)  # which a maximum would not show
    x = tl.where(_allowed(words, width, i, vocab), x, float("-inf"))
    tl.store(at, x, mask=i < vocab)
    tl.store(left + n * chunks + chunk, tl.max(x, 0))


@triton.jit(do_not_specialize_on_alignment=["rows", "words", "ends"])
def _level(logits, rows, words, ends, left, vocab, width, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    n, chunk = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, CHUNKS)
    top = tl.max(tl.load(left + n * chunks + c, mask=c < chunks, other=float("-inf")), 0)
    if (top == float("-inf")) & (tl.load(ends + n) != 0):
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        at = logits + tl.load(rows + n).to(tl.int64) * vocab + i
        tl.store(at, 0.0, mask=(i < vocab) & _allowed(words, width, i, vocab))


def mask(logits: Tensor, rows: Tensor, words: Tensor, ends: Tensor | None = None) -> None:
    """Leave in ``logits[rows[n]]``, float32[S, V], the tokens whose bits are set in ``words[n]``, int32[n,
    ceil(V / 32)]. Where they are all -inf and ``ends[n]``, int32[n], is not 0, each becomes as likely as the
    next."""
    vocab, width = logits.shape[1], words.shape[1]
    chunks = cdiv(vocab, CHUNK)
    left = logits.new_empty(len(rows), chunks)
    grid = (len(rows), chunks)
    _mask[grid](logits, rows, words, left, vocab, width, chunks, BLOCK=CHUNK, num_warps=8)
    if ends is None:
        return
    block = next_power_of_2(chunks)
    _level[grid](
        logits, rows, words, ends, left, vocab, width, chunks, CHUNKS=block, BLOCK=CHUNK, num_warps=8
    )


def find_thresholds(
    logits: Tensor, slots: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Smallest logit float32[S] that may be drawn in each row of ``logits`` float32[S, V];
    -inf for greedy rows.

    The parameter tables are indexed by slot: float32, except ``top_ks`` int32.
    """
    thresholds = logits.new_empty(logits.shape[0])
    _find_thresholds[(logits.shape[0],)](
        logits,
        slots,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        thresholds,
        logits.shape[1],
        BLOCK=1024,
        num_warps=8,
    )
    return thresholds


class Exact(NamedTuple):
    """What logits are rounded of: those of a token are ``hidden`` [S, k] times a row of ``weight`` [*, k],
    the one with its number, or that which ``rows`` int32[V] has there."""

    hidden: Tensor
    weight: Tensor
    rows: Tensor | None = None


def sharpen(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    exact: Exact,
    thresholds: Tensor | None = None,
    first: int = 0,
) -> None:
    """Leave in each of many pieces of ``logits`` float32[S, V] the token that would be drawn from it, with
    its exact logit, which is not below the threshold. A piece is taken from all over the vocabulary, whose
    first tokens are the frequent ones. The rest is as in ``sample``."""
    count, vocab = logits.shape
    size = min(PIECE, next_power_of_2(max(NEAR, vocab // PIECES)))
    pieces = cdiv(vocab, size)
    hidden, weight, rows = exact
    _sharpen[(count, pieces)](
        logits, slots, positions, seeds, temperatures, logits if thresholds is None else thresholds, hidden,
        weight, logits if rows is None else rows, vocab, weight.shape[1], hidden.stride(0), pieces, first,
        HAS_THRESHOLDS=thresholds is not None, HAS_ROWS=rows is not None, FAST=logits.is_cuda, PIECE=size,
        NEAR=NEAR, K=1024, num_warps=4, **_pdl(),
    )  # fmt: skip


class Landing(NamedTuple):
    """Where tokens of a step go besides: row ``place`` int32[1] of ``tokens`` int32[places, rows], which is
    pinned memory of the host. A copy to the host would take the GPU 11 us."""

    tokens: Tensor
    place: Tensor


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    tokens: TokenTable,
    out: Tensor,
    thresholds: Tensor | None = None,
    first: int = 0,
    best_of_ranks: Callable[[Tensor], None] | None = None,
    landing: Landing | None = None,
    beside: Tensor | None = None,
) -> None:
    """Draw the token at ``positions[s]`` of ``slots[s]`` from ``logits[s]``: into ``out`` int32[S] (see above
    for what is no token), and into ``tokens`` if the position is above 0. ``seeds`` int64 and
    ``temperatures`` float32 by slot.

    ``logits`` may be the part of the vocabulary from ``first`` on; then ``best_of_ranks`` replaces keys
    int64[S] by the largest that any rank has. ``beside`` int32[S]: where in ``tokens`` the one goes that
    would have been drawn without the first, if that is above 0."""
    rows, vocab = logits.shape
    chunks = cdiv(vocab, LOGITS)
    bounds = logits.new_empty(rows, chunks)
    given = (
        logits, slots, positions, seeds, temperatures, thresholds if thresholds is not None else bounds,
        bounds, vocab, chunks, first
    )  # fmt: skip
    options = {"HAS_THRESHOLDS": thresholds is not None, "FAST": logits.is_cuda, "BLOCK": LOGITS, **_pdl()}
    _bound_scores[(rows, chunks)](*given, **options, num_warps=4)
    options |= {"CHUNKS": next_power_of_2(chunks), "num_warps": 8}
    if best_of_ranks is None:
        _finish[(rows,)](
            *given, *tokens.arguments, out, *_landing(landing, out), out if beside is None else beside,
            SECOND=beside is not None, LANDS=landing is not None, **options,
        )  # fmt: skip
        return
    keys = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _make_keys[(rows,)](*given, keys, out, SECOND=False, **options)
    follow(keys, slots, positions, tokens, out, best_of_ranks, landing)
    if beside is not None:
        _make_keys[(rows,)](*given, keys, out, SECOND=True, **options)
        follow(keys, slots, beside, tokens, torch.empty_like(out), best_of_ranks)


def follow(
    keys: Tensor,
    slots: Tensor,
    positions: Tensor,
    tokens: TokenTable,
    out: Tensor,
    best_of_ranks: Callable[[Tensor], None] | None = None,
    landing: Landing | None = None,
) -> None:
    """The end of ``sample``. A rank that does not draw has ``keys`` of ``WORST``, which it leaves."""
    if best_of_ranks is not None:
        best_of_ranks(keys)
    _use_keys[(keys.shape[0],)](
        keys,
        slots,
        positions,
        *tokens.arguments,
        out,
        *_landing(landing, out),
        LANDS=landing is not None,
        num_warps=1,
        **_pdl(),
    )


def _landing(landing: Landing | None, unused: Tensor) -> tuple[Tensor, int, Tensor]:
    return (landing.tokens, landing.tokens.stride(0), landing.place) if landing else (unused, 0, unused)

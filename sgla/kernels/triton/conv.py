# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
"""Short causal convolutions whose last inputs are kept as a state: see ``ops.causal_conv``."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin_early, _pdl, cdiv

CHANNELS, TOKENS = 64, 64  # of a tile of a prompt
DECODE_CHANNELS, RUN = 256, 8  # of a tile of decode rows, and how many of these go on from each other


@triton.jit
def _activated(y, SILU: tl.constexpr):
    return y * tl.sigmoid(y) if SILU else y


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "marks", "runs"])
def _decode(
    x, weight, bias, state, out, reads, writes, marks, runs, s_x, s_out, s_weight, s_unit, s_channel,
    s_place, channels, K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, RUNS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some channels of a row of one token, or (``RUNS``) of the rows that go on from each other,
    TOKENS at a time. The last of them may write to the unit that the first one reads. No kernel near before
    this one writes to the state."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    count = 1
    if RUNS:
        count = tl.load(runs + row)
        if count == 0:
            return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    read = tl.load(reads + row).to(tl.int64)
    begun = c < tl.where(read > 0, channels, 0)
    at = state + c * s_channel
    before = ()
    targets = ()
    factors = ()
    for i in tl.static_range(K - 1):
        before += (tl.load(at + read * s_unit + i * s_place, mask=begun, other=0.0),)
    for k in tl.static_range(K):
        factors += (tl.load(weight + c * s_weight + k, mask=live, other=0.0).to(tl.float32),)
    for t in tl.static_range(TOKENS):
        targets += (tl.load(writes + row + t, mask=t < count, other=0),)
        targets += (tl.load(marks + 3 * (row + t) + 2, mask=t < count, other=0),)
    start = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_BIAS:
        start += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for first in range(0, count, TOKENS):
        source = x + (row + first).to(tl.int64) * s_x + c
        inputs = ()
        for i in tl.static_range(K - 1):
            old = before[i].to(x.dtype.element_ty)
            if RUNS:
                again = c < tl.where(first > 0, channels, 0)
                old = tl.where(first > 0, tl.load(source + (i - K + 1) * s_x, mask=again, other=0.0), old)
            inputs += (old,)
        for t in tl.static_range(TOKENS):
            there = c < tl.where(first + t < count, channels, 0)
            inputs += (tl.load(source + t * s_x, mask=there, other=0.0),)
        for t in tl.static_range(TOKENS):
            if first + t < count:
                token = row + first + t
                y = start
                for k in tl.static_range(K):
                    y += factors[k] * inputs[t + k].to(tl.float32)
                tl.store(out + token.to(tl.int64) * s_out + c, _activated(y, SILU), mask=live)
                write = targets[2 * t]
                mark = targets[2 * t + 1]
                if RUNS:
                    write = tl.where(first > 0, tl.load(writes + token), write)
                    mark = tl.where(first > 0, tl.load(marks + 3 * token + 2), mark)
                marked = c < tl.where(mark > 0, channels, 0)
                for i in tl.static_range(K - 1):
                    place = at + i * s_place
                    tl.store(place + write.to(tl.int64) * s_unit, inputs[t + 1 + i], mask=live)
                    tl.store(place + mark.to(tl.int64) * s_unit, inputs[t + 1 + i], mask=marked)


@triton.jit
def _inputs(x, state, s_x, s_place, t, begin, unit, c, live, K: tl.constexpr):
    """Of channels c, the inputs at the tokens t: those before the row's first token, ``begin``, are in the
    unit that it begins with, at whose channels ``state`` points."""
    t += tl.zeros_like(c)
    before = K - 1 + t - begin
    new = tl.load(x + t.to(tl.int64) * s_x + c, mask=live & (t >= begin), other=0.0)
    old = tl.load(state + before * s_place, mask=live & (t < tl.where(unit > 0, begin, -K)), other=0.0)
    return tl.where(t >= begin, new, old.to(new.dtype))


@triton.jit(do_not_specialize_on_alignment=["reads", "first", "segments", "chunks"])
def _prompt(
    x, weight, bias, state, out, reads, first, segments, chunks, s_x, s_out, s_weight, s_unit, s_channel,
    s_place, channels, K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some channels of a chunk of tokens of a row."""
    _begin_early(PDL)
    chunk = chunks + 4 * tl.program_id(0)
    start, count, row = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    if count == 0:
        return
    begin = tl.load(segments + 4 * tl.load(first + row))
    unit = tl.load(reads + row).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    i = tl.arange(0, TOKENS)[:, None]
    live = (c < channels) & (i < count)
    at = state + unit * s_unit + c * s_channel
    y = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    source = x + (start - (K - 1) + i).to(tl.int64) * s_x + c
    for k in tl.static_range(K):
        if start - begin < K - 1:
            v = _inputs(x, at, s_x, s_place, start + i - (K - 1) + k, begin, unit, c, live, K)
        else:
            v = tl.load(source + k * s_x, mask=live, other=0.0)
        y += v.to(tl.float32) * tl.load(weight + c * s_weight + k, mask=c < channels, other=0.0).to(
            tl.float32
        )
    if HAS_BIAS:
        y += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)
    tl.store(out + (start + i).to(tl.int64) * s_out + c, _activated(y, SILU), mask=live)


@triton.jit(do_not_specialize_on_alignment=["reads", "first", "segments"])
def _leave(
    x, state, reads, first, segments, s_x, s_unit, s_channel, s_place, channels, K: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the states of some channels that a row leaves. The unit that it begins with may be the
    last of those that it writes, and no place of it is read once it is written."""
    _begin_early(PDL)
    row = tl.program_id(0)
    here, end = tl.load(first + row), tl.load(first + row + 1)
    if here == end:
        return
    begin = tl.load(segments + 4 * here)
    unit = tl.load(reads + row).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    at = state + c * s_channel
    for segment in range(here, end):
        last = tl.load(segments + 4 * segment) + tl.load(segments + 4 * segment + 1)
        target = tl.load(segments + 4 * segment + 2).to(tl.int64)
        left = c < tl.where(target > 0, channels, 0)
        for i in tl.static_range(K - 1):
            v = _inputs(x, at + unit * s_unit, s_x, s_place, last - (K - 1) + i, begin, unit, c, live, K)
            tl.store(at + target * s_unit + i * s_place, v, mask=left)


class Rows(NamedTuple):
    """Rows of several tokens: the units that they begin with, and ``first``, ``segments`` and ``chunks`` of
    ``gpu/states.py: Stretches``."""

    reads: Tensor
    first: Tensor
    segments: Tensor
    chunks: Tensor


def decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    reads: Tensor,
    writes: Tensor,
    marks: Tensor,
    out: Tensor,
    silu: bool = True,
    runs: Tensor | None = None,
) -> None:
    """Rows of one token: x and out ``[R, C]``, state ``[units, C, K - 1]``; ``marks`` int32[R, 3]: in its
    last column a second unit for each row, or 0. ``runs``: see ``gpu/states.py: DeviceStates``."""
    (rows, channels), k = x.shape, weight.shape[1]
    grid = (rows, cdiv(channels, DECODE_CHANNELS))
    _decode[grid](
        x, weight, weight if bias is None else bias, state, out, reads, writes, marks,
        reads if runs is None else runs, x.stride(0), out.stride(0), weight.stride(0), *state.stride(),
        channels, K=k, HAS_BIAS=bias is not None, SILU=silu, RUNS=runs is not None,
        TOKENS=1 if runs is None else max(RUN, k - 1), BLOCK=DECODE_CHANNELS, num_warps=4, **_pdl(),
    )  # fmt: skip


def prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: Rows,
    out: Tensor,
    silu: bool = True,
) -> None:
    """Rows of several tokens: x and out ``[T, C]``."""
    reads, first, segments, chunks = rows
    channels, k = x.shape[1], weight.shape[1]
    blocks = cdiv(channels, CHANNELS)
    _prompt[chunks.shape[0], blocks](
        x, weight, weight if bias is None else bias, state, out, reads, first, segments, chunks, x.stride(0),
        out.stride(0), weight.stride(0), *state.stride(), channels, K=k, HAS_BIAS=bias is not None, SILU=silu,
        TOKENS=TOKENS, BLOCK=CHANNELS, num_warps=4, **_pdl(),
    )  # fmt: skip
    if k > 1:
        _leave[first.shape[0] - 1, blocks](
            x, state, reads, first, segments, x.stride(0), *state.stride(), channels, K=k, BLOCK=CHANNELS,
            num_warps=4, **_pdl(),
        )  # fmt: skip

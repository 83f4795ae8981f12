# mypy: allow-untyped-defs
"""Short causal convolutions whose last inputs are kept as a state: see ``ops.causal_conv``."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import _begin_early, _pdl

CHANNELS, TOKENS = 64, 64  # of a tile of a prompt
DECODE_CHANNELS = 256


@triton.jit
def _activated(y, SILU: tl.constexpr):
    return y * tl.sigmoid(y) if SILU else y


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "marks"])
def _decode(
    x, weight, bias, state, out, reads, writes, marks, s_x, s_out, s_weight, s_unit, s_channel, s_place,
    channels, K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some channels of a row of one token. A place of the state is read before the one in front
    of it is written."""
    _begin_early(PDL)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    read = tl.load(reads + row).to(tl.int64)
    write = tl.load(writes + row).to(tl.int64)
    mark = tl.load(marks + 3 * row + 2).to(tl.int64)
    begun, marked = c < tl.where(read > 0, channels, 0), c < tl.where(mark > 0, channels, 0)
    at = state + c * s_channel
    new = tl.load(x + row.to(tl.int64) * s_x + c, mask=live, other=0.0)
    y = new.to(tl.float32) * tl.load(weight + c * s_weight + K - 1, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(K - 1):
        old = tl.load(at + read * s_unit + i * s_place, mask=begun, other=0.0)
        y += old.to(tl.float32) * tl.load(weight + c * s_weight + i, mask=live, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(at + write * s_unit + (i - 1) * s_place, old, mask=live)
            tl.store(at + mark * s_unit + (i - 1) * s_place, old, mask=marked)
    if K > 1:
        tl.store(at + write * s_unit + (K - 2) * s_place, new, mask=live)
        tl.store(at + mark * s_unit + (K - 2) * s_place, new, mask=marked)
    tl.store(out + row.to(tl.int64) * s_out + c, _activated(y, SILU), mask=live)


@triton.jit
def _inputs(x, state, s_x, s_place, t, begin, unit, c, live, K: tl.constexpr):
    """Of channels c, the inputs at the tokens t: those before the row's first token, ``begin``, are in the
    unit that it begins with, at whose channels ``state`` points."""
    t += tl.zeros_like(c)
    before = K - 1 + t - begin
    new = tl.load(x + t.to(tl.int64) * s_x + c, mask=live & (t >= begin), other=0.0)
    old = tl.load(state + before * s_place, mask=live & (t < tl.where(unit > 0, begin, -K)), other=0.0)
    return tl.where(t >= begin, new, old.to(new.dtype))


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "marks", "runs"])
def _run(
    x, weight, bias, state, out, reads, writes, marks, runs, s_x, s_out, s_weight, s_unit, s_channel,
    s_place, channels, K: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some channels of the rows of one token that go on from each other. The last of them may
    write to the unit that the first one reads, as in ``_leave``."""
    _begin_early(PDL)
    row = tl.program_id(0)
    count = tl.load(runs + row)
    if count == 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < channels
    read = tl.load(reads + row).to(tl.int64)
    at = state + c * s_channel
    for t in range(0, count):
        token = row + t
        y = tl.zeros([BLOCK], dtype=tl.float32)
        for k in tl.static_range(K):
            v = _inputs(x, at + read * s_unit, s_x, s_place, token - (K - 1) + k, row, read, c, live, K)
            y += v.to(tl.float32) * tl.load(weight + c * s_weight + k, mask=live, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
        tl.store(out + token.to(tl.int64) * s_out + c, _activated(y, SILU), mask=live)
        write, mark = tl.load(writes + token).to(tl.int64), tl.load(marks + 3 * token + 2).to(tl.int64)
        marked = c < tl.where(mark > 0, channels, 0)
        for k in tl.static_range(K - 1):
            v = _inputs(x, at + read * s_unit, s_x, s_place, token - (K - 2) + k, row, read, c, live, K)
            tl.store(at + write * s_unit + k * s_place, v, mask=live)
            tl.store(at + mark * s_unit + k * s_place, v, mask=marked)


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
    grid = (rows, triton.cdiv(channels, DECODE_CHANNELS))
    units = (reads, writes, marks) if runs is None else (reads, writes, marks, runs)
    (_decode if runs is None else _run)[grid](
        x, weight, weight if bias is None else bias, state, out, *units, x.stride(0), out.stride(0),
        weight.stride(0), *state.stride(), channels, K=k, HAS_BIAS=bias is not None, SILU=silu,
        BLOCK=DECODE_CHANNELS, num_warps=4, **_pdl(),
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
    blocks = triton.cdiv(channels, CHANNELS)
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

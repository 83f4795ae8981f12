# mypy: allow-untyped-defs
"""The state space model of Mamba: see ``ops.selective_scan``, whose S is the state of a head, ``memory``.

A row of one token reads S once, changes it in registers and leaves it where it belongs. Long rows of Mamba 2
go by chunks of 64 tokens (arXiv 2405.21060): what the tokens of a chunk are to each other is a product of
matrices, for all chunks at the same time. What is left to do one chunk after another is what they have of S,
and the next S. Mamba 1 has a decay for each place of S, so its rows go token by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.device import this_device
from sgla.kernels.ops import TimeSteps
from sgla.kernels.triton.common import _begin_early, _pdl, cdiv, next_power_of_2
from sgla.kernels.triton.conv import Rows
from sgla.kernels.triton.delta import _precision, _rows, _side

CHUNK = 64
WIDEST = 256  # values of a head, and of its state for each, that a chunk's products take
PLACES = 32  # of a head in a program that goes from chunk to chunk: fewer fill the chip with one row
CHANNELS = 64  # of Mamba 1 in a program


@triton.jit
def _time(dt, bias, least, most, STEPS: tl.constexpr):
    """Time steps: see ``ops.TimeSteps``. The logarithm of 1 and little is a series."""
    dt = dt.to(tl.float32)
    if STEPS:
        x = dt + bias
        u = tl.exp(tl.minimum(x, 20.0))
        small = u * (1 - u * (0.5 - u * (1 / 3 - u * 0.25)))
        dt = tl.where(x > 20, x, tl.where(u < 0.01, small, tl.log(1 + u)))
        dt = tl.minimum(tl.maximum(dt, least), most)
    return dt


@triton.jit
def _token(S, x, dt, a, b, c):
    """S [P, N] after one token, and its output."""
    S = S * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
    return S, tl.sum(S * c[None, :], 1)


@triton.jit
def _step(
    S, x, dt, b, c, d, out, a_h, bias_h, s_x, s_dt, s_b, s_c, group, least, most, token, i, j,
    P: tl.constexpr, N: tl.constexpr, STEPS: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """S of the program's head after ``token``, whose output it stores."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    x_t = tl.load(x + token * s_x + head * P + i, mask=i < P, other=0.0).to(tl.float32)
    b_t = tl.load(b + token * s_b + (head // group) * N + j, mask=j < N, other=0.0).to(tl.float32)
    c_t = tl.load(c + token * s_c + (head // group) * N + j, mask=j < N, other=0.0).to(tl.float32)
    dt_t = _time(tl.load(dt + token * s_dt + head), bias_h, least, most, STEPS)
    S, y = _token(S, x_t, dt_t, a_h, b_t, c_t)
    if HAS_D:
        y += tl.load(d + head) * x_t
    tl.store(out + (token * heads + head) * P + i, y, mask=i < P)
    return S


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "marks", "runs"])
def _decode(
    x, dt, a, b, c, d, bias, memory, out, reads, writes, marks, runs, s_x, s_dt, s_b, s_c, s_unit, s_head,
    group, least, most, P: tl.constexpr, PB: tl.constexpr, N: tl.constexpr, NB: tl.constexpr,
    STEPS: tl.constexpr, HAS_D: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some values of a head, of a row of one token, or (``RUNS``) of the rows that go on from
    each other. No kernel near before this one writes to S."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    count = 1
    if RUNS:
        count = tl.load(runs + row)
        if count == 0:
            return
    i, j = tl.program_id(2) * PB + tl.arange(0, PB), tl.arange(0, NB)
    token = row.to(tl.int64)
    read = tl.load(reads + row).to(tl.int64)
    at = memory + head * s_head + i[:, None] * N + j[None, :]
    inside = (i < P)[:, None] & (j < N)[None, :]
    S = tl.load(at + read * s_unit, mask=inside & (j < tl.where(read > 0, N, 0))[None, :], other=0.0)
    a_h = tl.load(a + head)
    bias_h = tl.load(bias + head) if STEPS else 0.0
    if PDL:
        tl.extra.cuda.gdc_wait()
    if RUNS:
        for t in range(0, count - 1):
            S = _step(
                S, x, dt, b, c, d, out, a_h, bias_h, s_x, s_dt, s_b, s_c, group, least, most, token + t, i, j,
                P, N, STEPS, HAS_D,
            )  # fmt: skip
            tl.store(at + tl.load(writes + row + t).to(tl.int64) * s_unit, S, mask=inside)
        row += count - 1
        token += count - 1
    S = _step(
        S, x, dt, b, c, d, out, a_h, bias_h, s_x, s_dt, s_b, s_c, group, least, most, token, i, j, P, N,
        STEPS, HAS_D,
    )  # fmt: skip
    tl.store(at + tl.load(writes + row).to(tl.int64) * s_unit, S, mask=inside)
    mark = tl.load(marks + 3 * row + 2).to(tl.int64)
    if mark > 0:
        tl.store(at + mark * s_unit, S, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["reads", "first", "segments"])
def _tokens(
    x, dt, a, b, c, d, bias, memory, out, reads, first, segments, s_x, s_dt, s_b, s_c, s_unit, s_head, group,
    least, most, P: tl.constexpr, PB: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, STEPS: tl.constexpr,
    HAS_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some values of a head, of a row of several tokens, one after another."""
    _begin_early(PDL)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    here, end = tl.load(first + row), tl.load(first + row + 1)
    if here == end:
        return
    i, j = tl.program_id(2) * PB + tl.arange(0, PB), tl.arange(0, NB)
    at = memory + head * s_head + i[:, None] * N + j[None, :]
    inside = (i < P)[:, None] & (j < N)[None, :]
    read = tl.load(reads + row).to(tl.int64)
    S = tl.load(at + read * s_unit, mask=inside & (j < tl.where(read > 0, N, 0))[None, :], other=0.0)
    a_h = tl.load(a + head)
    bias_h = tl.load(bias + head) if STEPS else 0.0
    source = (head // group) * N + j
    for segment in range(here, end):
        begin = tl.load(segments + 4 * segment).to(tl.int64)
        for t in range(0, tl.load(segments + 4 * segment + 1)):
            token = begin + t
            x_t = tl.load(x + token * s_x + head * P + i, mask=i < P, other=0.0).to(tl.float32)
            b_t = tl.load(b + token * s_b + source, mask=j < N, other=0.0).to(tl.float32)
            c_t = tl.load(c + token * s_c + source, mask=j < N, other=0.0).to(tl.float32)
            dt_t = _time(tl.load(dt + token * s_dt + head), bias_h, least, most, STEPS)
            S, y = _token(S, x_t, dt_t, a_h, b_t, c_t)
            if HAS_D:
                y += tl.load(d + head) * x_t
            tl.store(out + (token * heads + head) * P + i, y, mask=i < P)
        target = tl.load(segments + 4 * segment + 2).to(tl.int64)
        if target > 0:
            tl.store(at + target * s_unit, S, mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["chunks"])
def _prepare(
    x, dt, a, b, c, d, bias, inner, factors, chunks, s_x, s_dt, s_b, s_c, group, least, most, tokens,
    P: tl.constexpr, PB: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, STEPS: tl.constexpr,
    HAS_D: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head of a chunk. ``inner`` [T, H, P]: what outputs have of the tokens of their chunk;
    ``factors`` [3, T, H]: of ``S c``, of ``x b^T`` in the next S, and of S itself."""
    _begin_early(PDL)
    start = tl.load(chunks + 4 * tl.program_id(0)).to(tl.int64)
    count = tl.load(chunks + 4 * tl.program_id(0) + 1)
    if count == 0:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    t = tl.arange(0, 64)
    live, token = t < count, start + t
    i, j = tl.arange(0, PB), tl.arange(0, NB)
    bias_h = tl.load(bias + head) if STEPS else 0.0
    time = _time(tl.load(dt + token * s_dt + head, mask=live, other=0.0), bias_h, least, most, STEPS)
    time = tl.where(live, time, 0.0)
    decay = time * tl.load(a + head)
    total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
    source, known = (head // group) * N + j[None, :], live[:, None] & (j < N)[None, :]
    C = tl.load(c + token[:, None] * s_c + source, mask=known, other=0.0)
    B = tl.load(b + token[:, None] * s_b + source, mask=known, other=0.0)
    left = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * time[None, :]
    M = tl.dot(C, tl.trans(B), input_precision=PRECISION) * left
    M = tl.where(t[:, None] >= t[None, :], M, 0.0)
    there = live[:, None] & (i < P)[None, :]
    X = tl.load(x + token[:, None] * s_x + head * P + i[None, :], mask=there, other=0.0)
    Y = tl.dot(M.to(X.dtype), X, input_precision=PRECISION)
    if HAS_D:
        Y += tl.load(d + head) * X.to(tl.float32)
    at, plane = token * heads + head, tokens * heads
    tl.store(inner + at[:, None] * P + i[None, :], Y, mask=there)
    tl.store(factors + at, tl.exp(total), mask=live)
    tl.store(factors + plane + at, time * tl.exp(last - total), mask=live)
    tl.store(factors + 2 * plane + at, tl.exp(last) + tl.zeros([64], dtype=tl.float32), mask=live)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["reads", "first", "segments"])
def _scan(
    x, b, c, inner, factors, memory, out, reads, first, segments, s_x, s_b, s_c, s_unit, s_head, group,
    tokens, P: tl.constexpr, PB: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: some values of a head, of a row, one chunk after another."""
    _begin_early(PDL)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    here, end = tl.load(first + row), tl.load(first + row + 1)
    if here == end:
        return
    t, i, j = tl.arange(0, 64), tl.program_id(2) * PB + tl.arange(0, PB), tl.arange(0, NB)
    at = memory + head * s_head + i[:, None] * N + j[None, :]
    inside = (i < P)[:, None] & (j < N)[None, :]
    read = tl.load(reads + row).to(tl.int64)
    S = tl.load(at + read * s_unit, mask=inside & (j < tl.where(read > 0, N, 0))[None, :], other=0.0)
    source, plane = (head // group) * N + j[None, :], tokens * heads
    for segment in range(here, end):
        begin = tl.load(segments + 4 * segment).to(tl.int64)
        count = tl.load(segments + 4 * segment + 1)
        for start in tl.range(0, count, 64, num_stages=STAGES):
            live, token = start + t < count, begin + start + t
            known, there = live[:, None] & (j < N)[None, :], live[:, None] & (i < P)[None, :]
            C = tl.load(c + token[:, None] * s_c + source, mask=known, other=0.0)
            B = tl.load(b + token[:, None] * s_b + source, mask=known, other=0.0)
            X = tl.load(x + token[:, None] * s_x + head * P + i[None, :], mask=there, other=0.0)
            place = token * heads + head
            Y = tl.load(inner + place[:, None] * P + i[None, :], mask=there, other=0.0)
            of_y = tl.load(factors + place, mask=live, other=0.0)
            of_x = tl.load(factors + plane + place, mask=live, other=0.0)
            of_s = tl.load(factors + 2 * plane + (begin + start) * heads + head)
            Y += tl.dot(C, tl.trans(S.to(C.dtype)), input_precision=PRECISION) * of_y[:, None]
            X = (X.to(tl.float32) * of_x[:, None]).to(B.dtype)
            S = tl.dot(tl.trans(X), B, S * of_s, input_precision=PRECISION)
            tl.store(out + place[:, None] * P + i[None, :], Y, mask=there)
        target = tl.load(segments + 4 * segment + 2).to(tl.int64)
        if target > 0:
            tl.store(at + target * s_unit, S, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "marks", "runs", "first", "segments"])
def _channels(
    x, dt, a, b, c, d, bias, memory, out, reads, writes, marks, runs, first, segments, s_x, s_dt, s_b, s_c,
    s_unit, channels, least, most, N: tl.constexpr, NB: tl.constexpr, ONE: tl.constexpr, RUNS: tl.constexpr,
    STEPS: tl.constexpr, HAS_D: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some channels of Mamba 1, of a row, one token after another. ``ONE``: rows have one
    token, with ``writes``, ``marks`` and ``runs`` as ``_decode`` has them; else ``first`` and
    ``segments``."""
    _begin_early(PDL)
    row, j = tl.program_id(0), tl.arange(0, NB)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, inside = i < channels, (i < channels)[:, None] & (j < N)[None, :]
    at = memory + i[:, None] * N + j[None, :]
    here, end = row, row + 1
    if RUNS:
        end = row + tl.load(runs + row)
        if here == end:
            return
    if not ONE:
        here, end = tl.load(first + row), tl.load(first + row + 1)
    read = tl.load(reads + row).to(tl.int64)
    S = tl.load(at + read * s_unit, mask=inside & (j < tl.where(read > 0, N, 0))[None, :], other=0.0)
    A = tl.load(a + i[:, None] * N + j[None, :], mask=inside, other=0.0)
    skip = tl.load(d + i, mask=live, other=0.0) if HAS_D else 0.0
    beside = tl.load(bias + i, mask=live, other=0.0) if STEPS else 0.0
    for segment in range(here, end):
        begin, count = (row + (segment - here)).to(tl.int64), 1
        if not ONE:
            begin = tl.load(segments + 4 * segment).to(tl.int64)
            count = tl.load(segments + 4 * segment + 1)
        for t in range(0, count):
            token = begin + t
            x_t = tl.load(x + token * s_x + i, mask=live, other=0.0).to(tl.float32)
            b_t = tl.load(b + token * s_b + j, mask=j < N, other=0.0).to(tl.float32)
            c_t = tl.load(c + token * s_c + j, mask=j < N, other=0.0).to(tl.float32)
            time = _time(tl.load(dt + token * s_dt + i, mask=live, other=0.0), beside, least, most, STEPS)
            S = S * tl.exp(time[:, None] * A) + (time * x_t)[:, None] * b_t[None, :]
            y = tl.sum(S * c_t[None, :], 1)
            if HAS_D:
                y += skip * x_t
            tl.store(out + token * channels + i, y, mask=live)
        if ONE:
            tl.store(at + tl.load(writes + segment).to(tl.int64) * s_unit, S, mask=inside)
            target = tl.load(marks + 3 * segment + 2).to(tl.int64)
        else:
            target = tl.load(segments + 4 * segment + 2).to(tl.int64)
        if target > 0:
            tl.store(at + target * s_unit, S, mask=inside)


@triton.jit
def _gated_norm(
    x, gate, weight, out, d, s_x, s_gate, eps, NORM: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: a group of a token."""
    _begin_early(PDL)
    token, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, BLOCK)
    at, live = group * d + i, i < d
    v = tl.load(x + token * s_x + at, mask=live, other=0.0).to(tl.float32)
    z = tl.load(gate + token * s_gate + at, mask=live, other=0.0).to(tl.float32)
    v *= z * tl.sigmoid(z)
    if NORM:
        v *= tl.rsqrt(tl.sum(v * v, 0) / d + eps) * tl.load(weight + at, mask=live, other=0.0)
    tl.store(out + token * groups * d + at, v, mask=live)


class Ends(NamedTuple):
    """Where rows of one token begin and end: ``marks`` int32[R, 3] has in its last column a second unit for
    each row, or 0. ``runs``: see ``gpu/states.py: DeviceStates``."""

    reads: Tensor
    writes: Tensor
    marks: Tensor
    runs: Tensor | None = None


def _given(x: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(x), _rows(b), _rows(c)


def _steps(steps: TimeSteps | None, a: Tensor) -> tuple[Tensor, float, float]:
    return (a, 0.0, 0.0) if steps is None else (steps.bias, steps.least, steps.most)


def decode(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    steps: TimeSteps | None,
    memory: Tensor,
    ends: Ends,
    out: Tensor,
) -> None:
    """Rows of one token: x and out ``[R, H, P]``, b and c ``[R, G, N]``, dt ``[R, H]``, memory ``[units, H,
    P, N]``."""
    x, b, c = _given(x, b, c)
    (rows, heads, width), size = x.shape, b.shape[2]
    padded = next_power_of_2(size)
    few = rows * heads <= this_device().multiprocessors
    block = min(next_power_of_2(width), 16 if few else max(16, 8192 // padded))
    bias, least, most = _steps(steps, a)
    _decode[rows, heads, cdiv(width, block)](
        x, dt, a, b, c, a if d is None else d, bias, memory, out, *ends[:3],
        ends.reads if ends.runs is None else ends.runs, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        memory.stride(0), memory.stride(1), heads // b.shape[1], least, most, P=width, PB=block, N=size,
        NB=padded, STEPS=steps is not None, HAS_D=d is not None, RUNS=ends.runs is not None,
        num_warps=max(1, min(8, padded * block // 2048)), **_pdl(),
    )  # fmt: skip


def by_token(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    steps: TimeSteps | None,
    memory: Tensor,
    rows: Rows,
    out: Tensor,
) -> None:
    """Rows of several tokens, for every shape: as ``decode``."""
    x, b, c = _given(x, b, c)
    (_, heads, width), size = x.shape, b.shape[2]
    block = min(16, next_power_of_2(width))
    bias, least, most = _steps(steps, a)
    _tokens[rows.first.shape[0] - 1, heads, cdiv(width, block)](
        x, dt, a, b, c, a if d is None else d, bias, memory, out, rows.reads, rows.first, rows.segments,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), memory.stride(0), memory.stride(1),
        heads // b.shape[1], least, most, P=width, PB=block, N=size, NB=next_power_of_2(size),
        STEPS=steps is not None, HAS_D=d is not None, num_warps=2, **_pdl(),
    )  # fmt: skip


def chunks_refuse(x: Tensor, memory: Tensor) -> str | None:
    """Why ``by_chunk`` cannot be used, or None."""
    widest = WIDEST // 2 if x.dtype == torch.float32 else WIDEST
    return f"heads or their states are wider than {widest}" if max(memory.shape[2:]) > widest else None


def by_chunk(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    steps: TimeSteps | None,
    memory: Tensor,
    rows: Rows,
    out: Tensor,
) -> None:
    """Rows of several tokens, where nothing refuses it."""
    x, b, c = _given(x, b, c)
    (tokens, heads, width), size = x.shape, b.shape[2]
    inner = x.new_empty(tokens, heads, width, dtype=torch.float32)
    factors = x.new_empty(3, tokens, heads, dtype=torch.float32)
    bias, least, most = _steps(steps, a)
    group, exact, padded = heads // b.shape[1], x.dtype == torch.float32, _side(size)
    _prepare[rows.chunks.shape[0], heads](
        x, dt, a, b, c, a if d is None else d, bias, inner, factors, rows.chunks, x.stride(0), dt.stride(0),
        b.stride(0), c.stride(0), group, least, most, tokens, P=width, PB=_side(width), N=size, NB=padded,
        STEPS=steps is not None, HAS_D=d is not None, PRECISION=_precision(x), num_warps=4, **_pdl(),
    )  # fmt: skip
    block = min(_side(width), PLACES)
    _scan[rows.first.shape[0] - 1, heads, cdiv(width, block)](
        x, b, c, inner, factors, memory, out, rows.reads, rows.first, rows.segments, x.stride(0), b.stride(0),
        c.stride(0), memory.stride(0), memory.stride(1), group, tokens, P=width, PB=block, N=size, NB=padded,
        PRECISION=_precision(x), STAGES=1 if exact or padded > 128 else 2, num_warps=4, **_pdl(),
    )  # fmt: skip


def by_channel(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    steps: TimeSteps | None,
    memory: Tensor,
    rows: Ends | Rows,
    out: Tensor,
) -> None:
    """Mamba 1: x and out ``[T, C, 1]``, b and c ``[T, 1, N]``, dt ``[T, C]``, a ``[C, N]``, memory ``[units,
    C, 1, N]``; rows of one token, or longer ones."""
    x = x if x.stride(1) == 1 else x.contiguous()
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    b, c = _rows(b), _rows(c)
    channels, size = a.shape
    one, reads, runs = isinstance(rows, Ends), rows.reads, None
    if isinstance(rows, Rows):
        count, places = rows.first.shape[0] - 1, (reads, reads, reads, rows.first, rows.segments)
    else:
        runs = rows.runs
        count, places = reads.shape[0], (*rows[1:3], reads if runs is None else runs, reads, reads)
    bias, least, most = _steps(steps, a)
    _channels[count, cdiv(channels, CHANNELS)](
        x, dt, a, b, c, a if d is None else d, bias, memory, out, reads, *places, x.stride(0), dt.stride(0),
        b.stride(0), c.stride(0), memory.stride(0), channels, least, most, N=size,
        NB=next_power_of_2(size), ONE=one, RUNS=runs is not None, STEPS=steps is not None,
        HAS_D=d is not None, BLOCK=CHANNELS, num_warps=2, **_pdl(),
    )  # fmt: skip


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, groups: int) -> Tensor:
    """See ``ops.gated_group_norm``."""
    x = x if x.stride(1) == 1 else x.contiguous()
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    tokens, width = x.shape[0], x.shape[1] // groups
    out = x.new_empty(x.shape)
    block = next_power_of_2(width)
    _gated_norm[tokens, groups](
        x, gate, x if weight is None else weight, out, width, x.stride(0), gate.stride(0), eps,
        NORM=weight is not None, BLOCK=block,
        num_warps=max(1, min(16, block // 512)), **_pdl(),
    )  # fmt: skip
    return out

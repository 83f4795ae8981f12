# mypy: allow-untyped-defs
"""The gated delta rule: see ``ops.gated_delta``, whose S is the state of a head, ``memory``.

A row of one token, and any row whose decay differs by channel, goes token by token: S is read once, changed
in registers and left where it belongs. Long rows go by chunks of 64 tokens (arXiv 2406.06484, 2412.06464). In
a chunk, u of token t, of which it writes ``k u^T``, depends on those of the tokens before it: a triangular
system whose inverse is applied to k (``w``) and to v (``u``) for all chunks at the same time. What is left
to do one chunk after another is ``u - w S``, outputs and the next S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.device import this_device
from sgla.kernels.triton.common import _begin_early, _pdl, cdiv, next_power_of_2
from sgla.kernels.triton.conv import Rows

CHUNK = 64
COLUMNS = 32  # of S in a program that goes from chunk to chunk: fewer fill the chip with one row
EPS: tl.constexpr = tl.constexpr(1e-6)  # beside the squares of q and k


class Rates(NamedTuple):
    decay: Tensor
    beta: Tensor


class Gates(NamedTuple):
    """What these are made of: see ``ops.decay_rates``."""

    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor


@triton.jit
def _rates(a, b, a_log, dt_bias):
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    softplus = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(a_log.to(tl.float32)) * softplus, tl.sigmoid(b.to(tl.float32))


@triton.jit
def _token(S, q, k, v, kept, beta, scale):
    """S after one token, and its output; ``kept``: the factor of S, of each row or of all."""
    k *= tl.rsqrt(tl.sum(k * k) + EPS)
    q *= tl.rsqrt(tl.sum(q * q) + EPS) * scale
    S *= kept
    found = tl.sum(S * k[:, None], 0)
    S += k[:, None] * (beta * (v - found))[None, :]
    return S, tl.sum(S * q[:, None], 0)


@triton.jit
def _inputs(
    q, k, v, decay, beta, s_q, s_k, s_v, s_decay, s_beta, group, token, i, j, DK: tl.constexpr,
    DV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What the program's head has of ``token``."""
    head = tl.program_id(1)
    source = (head // group) * DK + i
    q_t = tl.load(q + token * s_q + source, mask=i < DK, other=0.0).to(tl.float32)
    k_t = tl.load(k + token * s_k + source, mask=i < DK, other=0.0).to(tl.float32)
    v_t = tl.load(v + token * s_v + head * DV + j, mask=j < DV, other=0.0).to(tl.float32)
    b_t = tl.load(beta + token * s_beta + head)
    if CHANNELS:
        d_t = tl.load(decay + token * s_decay + head * DK + i, mask=i < DK, other=0.0)
    else:
        d_t = tl.load(decay + token * s_decay + head)
    return q_t, k_t, v_t, d_t, b_t


@triton.jit
def _step(
    S, q, k, v, decay, beta, out, a_log, dt_bias, scale, token, j, DV: tl.constexpr, CHANNELS: tl.constexpr,
    GATES: tl.constexpr,
):  # fmt: skip
    """S of the program's head, whose ``a_log`` and ``dt_bias`` these are, after ``token``, whose output it
    stores."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    if CHANNELS:
        S, o = _token(S, q, k, v, tl.exp(decay)[:, None], beta, scale)
    else:
        if GATES:
            decay, beta = _rates(decay, beta, a_log, dt_bias)
        S, o = _token(S, q, k, v, tl.exp(decay), beta, scale)
    tl.store(out + (token * heads + head) * DV + j, o, mask=j < DV)
    return S


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "marks", "runs"])
def _decode(
    q, k, v, decay, beta, memory, out, reads, writes, marks, runs, a_log, dt_bias, s_q, s_k, s_v, s_decay,
    s_beta, s_unit, s_head, group, scale, DK: tl.constexpr, KB: tl.constexpr, DV: tl.constexpr,
    VB: tl.constexpr, CHANNELS: tl.constexpr, GATES: tl.constexpr, RUNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the S of a head, of a row of one token, or (``RUNS``) of the rows that go
    on from each other. ``GATES``: ``decay`` and ``beta`` are a and b of ``_rates``. No kernel near before
    this one writes to S."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    count = 1
    if RUNS:
        count = tl.load(runs + row)
        if count == 0:
            return
    i, j = tl.arange(0, KB), tl.program_id(2) * VB + tl.arange(0, VB)
    token = row.to(tl.int64)
    read = tl.load(reads + row).to(tl.int64)
    at = memory + head * s_head + i[:, None] * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    S = tl.load(at + read * s_unit, mask=inside & (i < tl.where(read > 0, DK, 0))[:, None], other=0.0)
    last = tl.load(writes + row + count - 1).to(tl.int64)
    mark = tl.load(marks + 3 * (row + count - 1) + 2).to(tl.int64)
    a, bias = 0.0, 0.0
    if GATES:
        a, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_t, k_t, v_t, d_t, b_t = _inputs(
        q, k, v, decay, beta, s_q, s_k, s_v, s_decay, s_beta, group, token, i, j, DK, DV, CHANNELS
    )
    if RUNS:
        for _ in range(0, count - 1):
            q_n, k_n, v_n, d_n, b_n = _inputs(
                q, k, v, decay, beta, s_q, s_k, s_v, s_decay, s_beta, group, token + 1, i, j, DK, DV, CHANNELS
            )
            write = tl.load(writes + token).to(tl.int64)
            S = _step(S, q_t, k_t, v_t, d_t, b_t, out, a, bias, scale, token, j, DV, CHANNELS, GATES)
            tl.store(at + write * s_unit, S, mask=inside)
            q_t, k_t, v_t, d_t, b_t = q_n, k_n, v_n, d_n, b_n
            token += 1
    S = _step(S, q_t, k_t, v_t, d_t, b_t, out, a, bias, scale, token, j, DV, CHANNELS, GATES)
    tl.store(at + last * s_unit, S, mask=inside)
    if mark > 0:
        tl.store(at + mark * s_unit, S, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["reads", "first", "segments"])
def _tokens(
    q, k, v, decay, beta, memory, out, reads, first, segments, s_q, s_k, s_v, s_decay, s_beta, s_unit, s_head,
    group, scale, DK: tl.constexpr, KB: tl.constexpr, DV: tl.constexpr, VB: tl.constexpr,
    CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the S of a head, of a row of several tokens, one after another."""
    _begin_early(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    here, end = tl.load(first + row), tl.load(first + row + 1)
    if here == end:
        return
    i, j = tl.arange(0, KB), tl.program_id(2) * VB + tl.arange(0, VB)
    at = memory + head * s_head + i[:, None] * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    read = tl.load(reads + row).to(tl.int64)
    S = tl.load(at + read * s_unit, mask=inside & (i < tl.where(read > 0, DK, 0))[:, None], other=0.0)
    source, heads = (head // group) * DK + i, tl.num_programs(1)
    for segment in range(here, end):
        begin = tl.load(segments + 4 * segment).to(tl.int64)
        for t in range(0, tl.load(segments + 4 * segment + 1)):
            token = begin + t
            q_t = tl.load(q + token * s_q + source, mask=i < DK, other=0.0).to(tl.float32)
            k_t = tl.load(k + token * s_k + source, mask=i < DK, other=0.0).to(tl.float32)
            v_t = tl.load(v + token * s_v + head * DV + j, mask=j < DV, other=0.0).to(tl.float32)
            b_t = tl.load(beta + token * s_beta + head)
            if CHANNELS:
                d_t = tl.load(decay + token * s_decay + head * DK + i, mask=i < DK, other=0.0)
                S, o = _token(S, q_t, k_t, v_t, tl.exp(d_t)[:, None], b_t, scale)
            else:
                d_t = tl.load(decay + token * s_decay + head)
                S, o = _token(S, q_t, k_t, v_t, tl.exp(d_t), b_t, scale)
            tl.store(out + (token * heads + head) * DV + j, o, mask=j < DV)
        target = tl.load(segments + 4 * segment + 2).to(tl.int64)
        if target > 0:
            tl.store(at + target * s_unit, S, mask=inside)


@triton.jit
def _joined(D, A, i, j, step, PRECISION: tl.constexpr):
    """The inverse of blocks of ``2 << step``, of that of their halves."""
    joined = tl.where((i >> (step + 1) == j >> (step + 1)) & (i >> step != j >> step), A, 0.0)
    return D - tl.dot(tl.dot(D, joined, input_precision=PRECISION), D, input_precision=PRECISION)


@triton.jit
def _inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1, A [64, 64] below the diagonal: of blocks of 2, then of those of twice as many, until they
    are one. Powers of A would do with fewer products, but equal keys make them large, and their sum loses all
    digits."""
    t = tl.arange(0, 64)
    i, j = t[:, None], t[None, :]
    D = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, A, 0.0)
    if PRECISION == "ieee":  # without tensor cores; unrolled, its sums take minutes to compile
        for step in range(1, 6):
            D = _joined(D, A, i, j, step, PRECISION)
    else:
        for step in tl.static_range(1, 6):
            D = _joined(D, A, i, j, step, PRECISION)
    return D


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["chunks"])
def _prepare(
    q, k, v, decay, beta, u, w, inner, factors, chunks, s_q, s_k, s_v, s_decay, s_beta, group, scale, tokens,
    DK: tl.constexpr, KB: tl.constexpr, DV: tl.constexpr, VB: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head of a chunk. ``inner`` [T, H, 64]: what an output has of each u of its chunk;
    ``factors`` [3, T, H]: of ``q S``, of u in the next S, and of S itself."""
    _begin_early(PDL)
    start = tl.load(chunks + 4 * tl.program_id(0)).to(tl.int64)
    count = tl.load(chunks + 4 * tl.program_id(0) + 1)
    if count == 0:
        return
    head, heads = tl.program_id(1), tl.num_programs(1)
    t = tl.arange(0, 64)
    live, token = t < count, start + t
    i, j = tl.arange(0, KB), tl.arange(0, VB)
    source, known = (head // group) * DK + i[None, :], live[:, None] & (i < DK)[None, :]
    K = tl.load(k + token[:, None] * s_k + source, mask=known, other=0.0)
    d = tl.load(decay + token * s_decay + head, mask=live, other=0.0)
    b = tl.load(beta + token * s_beta + head, mask=live, other=0.0)
    g = tl.cumsum(d, 0)
    total = tl.sum(d, 0)
    K32 = K.to(tl.float32)
    of_k = tl.rsqrt(tl.sum(K32 * K32, 1) + EPS)
    left = tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0)) * of_k[None, :]
    Q = tl.load(q + token[:, None] * s_q + source, mask=known, other=0.0)
    Q32 = Q.to(tl.float32)
    of_q = tl.rsqrt(tl.sum(Q32 * Q32, 1) + EPS) * scale
    B = tl.dot(Q, tl.trans(K), input_precision=PRECISION) * left * of_q[:, None]
    B = tl.where(t[:, None] >= t[None, :], B, 0.0)
    place = (token * heads + head)[:, None]
    tl.store(inner + place * 64 + t[None, :], B, mask=live[:, None])
    A = tl.dot(K, tl.trans(K), input_precision=PRECISION) * left * (of_k * b)[:, None]
    X = _inverse(tl.where(t[:, None] > t[None, :], A, 0.0), PRECISION)
    W = tl.dot((X * (b * of_k * tl.exp(g))[None, :]).to(K.dtype), K, input_precision=PRECISION)
    tl.store(w + place * DK + i[None, :], W, mask=known)
    there = live[:, None] & (j < DV)[None, :]
    V = tl.load(v + token[:, None] * s_v + head * DV + j[None, :], mask=there, other=0.0)
    U = tl.dot((X * b[None, :]).to(V.dtype), V, input_precision=PRECISION)
    tl.store(u + place * DV + j[None, :], U, mask=there)
    at, plane = token * heads + head, tokens * heads
    tl.store(factors + at, of_q * tl.exp(g), mask=live)
    tl.store(factors + plane + at, of_k * tl.exp(total - g), mask=live)
    tl.store(factors + 2 * plane + at, tl.exp(total) + tl.zeros([64], dtype=tl.float32), mask=live)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["reads", "first", "segments"])
def _scan(
    q, k, u, w, inner, factors, memory, out, reads, first, segments, s_q, s_k, s_unit, s_head, group, tokens,
    DK: tl.constexpr, KB: tl.constexpr, DV: tl.constexpr, VB: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: some columns of the S of a head, of a row, one chunk after another."""
    _begin_early(PDL)
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    here, end = tl.load(first + row), tl.load(first + row + 1)
    if here == end:
        return
    t, i, j = tl.arange(0, 64), tl.arange(0, KB), tl.program_id(2) * VB + tl.arange(0, VB)
    at = memory + head * s_head + i[:, None] * DV + j[None, :]
    inside = (i < DK)[:, None] & (j < DV)[None, :]
    read = tl.load(reads + row).to(tl.int64)
    S = tl.load(at + read * s_unit, mask=inside & (i < tl.where(read > 0, DK, 0))[:, None], other=0.0)
    source = (head // group) * DK + i
    plane = tokens * heads
    for segment in range(here, end):
        begin = tl.load(segments + 4 * segment).to(tl.int64)
        count = tl.load(segments + 4 * segment + 1)
        for c in tl.range(0, count, 64, num_stages=STAGES):
            live, token = c + t < count, begin + c + t
            known = live[:, None] & (i < DK)[None, :]
            place = token * heads + head
            W = tl.load(w + place[:, None] * DK + i[None, :], mask=known, other=0.0)
            Q = tl.load(q + token[:, None] * s_q + source[None, :], mask=known, other=0.0)
            K = tl.load(k + token[:, None] * s_k + source[None, :], mask=known, other=0.0)
            there = live[:, None] & (j < DV)[None, :]
            U = tl.load(u + place[:, None] * DV + j[None, :], mask=there, other=0.0)
            B = tl.load(inner + place[:, None] * 64 + t[None, :], mask=live[:, None], other=0.0)
            of_q = tl.load(factors + place, mask=live, other=0.0)
            of_u = tl.load(factors + plane + place, mask=live, other=0.0)
            of_s = tl.load(factors + 2 * plane + (begin + c) * heads + head)
            rounded = S.to(W.dtype)
            U = U.to(tl.float32) - tl.dot(W, rounded, input_precision=PRECISION)
            Y = tl.dot(Q, rounded, input_precision=PRECISION) * of_q[:, None]
            Y = tl.dot(B, U.to(B.dtype), Y, input_precision=PRECISION)
            S = tl.dot(tl.trans(K), (U * of_u[:, None]).to(K.dtype), S * of_s, input_precision=PRECISION)
            tl.store(out + place[:, None] * DV + j[None, :], Y, mask=there)
        target = tl.load(segments + 4 * segment + 2).to(tl.int64)
        if target > 0:
            tl.store(at + target * s_unit, S, mask=inside)


@triton.jit
def _decay_rates(
    a, b, a_log, dt_bias, decay, beta, s_a, s_b, tokens, heads, PDL: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    _begin_early(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    h = tl.arange(0, BLOCK)[None, :]
    live = (token < tokens) & (h < heads)
    d, rate = _rates(
        tl.load(a + token * s_a + h, mask=live, other=0.0),
        tl.load(b + token * s_b + h, mask=live, other=0.0),
        tl.load(a_log + h, mask=h < heads, other=0.0),
        tl.load(dt_bias + h, mask=h < heads, other=0.0),
    )  # fmt: skip
    tl.store(decay + token * heads + h, d, mask=live)
    tl.store(beta + token * heads + h, rate, mask=live)


@triton.jit
def _gated_norm(
    x, gate, weight, out, heads, d, s_x, s_gate, eps, SILU: tl.constexpr, PDL: tl.constexpr,
    HB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some heads of a token."""
    _begin_early(PDL)
    token = tl.program_id(0).to(tl.int64)
    h, i = tl.program_id(1) * HB + tl.arange(0, HB)[:, None], tl.arange(0, BLOCK)[None, :]
    live = (h < heads) & (i < d)
    v = tl.load(x + token * s_x + h * d + i, mask=live, other=0.0).to(tl.float32)
    z = tl.load(gate + token * s_gate + h * d + i, mask=live, other=0.0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 1) / d + eps)[:, None]
    v *= tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32) * tl.sigmoid(z)
    tl.store(out + (token * heads + h) * d + i, v * z if SILU else v, mask=live)


def _rows(x: Tensor) -> Tensor:
    """x ``[T, H, d]`` with the values of a token side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def decay_rates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See ``ops.decay_rates``; a and b ``[T, H]``."""
    tokens, heads = a.shape
    decay, beta = (a.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2))
    _decay_rates[(cdiv(tokens, 16),)](
        a, b, a_log, dt_bias, decay, beta, a.stride(0), b.stride(0), tokens, heads, TOKENS=16,
        BLOCK=next_power_of_2(heads), num_warps=1, **_pdl(),
    )  # fmt: skip
    return decay, beta


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool = True) -> Tensor:
    """See ``ops.gated_rms_norm``; x and gate ``[T, H, d]``."""
    x, gate = _rows(x), _rows(gate)
    tokens, heads, d = x.shape
    block = next_power_of_2(d)
    some = min(next_power_of_2(heads), max(1, 1024 // block))
    out = x.new_empty(x.shape)
    _gated_norm[tokens, cdiv(heads, some)](
        x, gate, weight, out, heads, d, x.stride(0), gate.stride(0), eps, SILU=silu, HB=some, BLOCK=block,
        num_warps=4, **_pdl(),
    )  # fmt: skip
    return out


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Rates | Gates,
    memory: Tensor,
    reads: Tensor,
    writes: Tensor,
    marks: Tensor,
    out: Tensor,
    columns: int | None = None,
    runs: Tensor | None = None,
) -> None:
    """Rows of one token: q, k ``[R, Hk, dk]``, v and out ``[R, Hv, dv]``, memory ``[units, Hv, dk, dv]``;
    ``marks`` int32[R, 3]: in its last column a second unit for each row, or 0. ``columns``: of S in a
    program. ``runs``: see ``gpu/states.py: DeviceStates``."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    rows, heads, dv = v.shape
    dk, padded = k.shape[2], next_power_of_2(k.shape[2])
    block = min(next_power_of_2(dv), columns or decode_columns(rows * heads))
    decay, beta, gates = rates[0], rates[1], isinstance(rates, Gates)
    a_log, dt_bias = (rates.a_log, rates.dt_bias) if isinstance(rates, Gates) else (decay, decay)
    _decode[rows, heads, cdiv(dv, block)](
        q, k, v, decay, beta, memory, out, reads, writes, marks, reads if runs is None else runs, a_log,
        dt_bias, q.stride(0), k.stride(0), v.stride(0), decay.stride(0), beta.stride(0), memory.stride(0),
        memory.stride(1), heads // k.shape[1], dk**-0.5, DK=dk, KB=padded, DV=dv, VB=block,
        CHANNELS=decay.dim() == 3, GATES=gates, RUNS=runs is not None,
        num_warps=max(1, min(8, padded * block // 2048)), **_pdl(),
    )  # fmt: skip


def decode_columns(states: int) -> int:
    """Of S in a program: few where there are few ``states``, so that all multiprocessors have several."""
    return 16 if states <= this_device().multiprocessors else 64


def by_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, rows: Rows, out: Tensor
) -> None:
    """Rows of several tokens, for every shape: as ``decode``."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    heads, (dk, dv) = v.shape[1], memory.shape[2:]
    block = min(32, next_power_of_2(dv))
    _tokens[rows.first.shape[0] - 1, heads, cdiv(dv, block)](
        q, k, v, decay, beta, memory, out, rows.reads, rows.first, rows.segments, q.stride(0), k.stride(0),
        v.stride(0), decay.stride(0), beta.stride(0), memory.stride(0), memory.stride(1), heads // k.shape[1],
        dk**-0.5, DK=dk, KB=next_power_of_2(dk), DV=dv, VB=block, CHANNELS=decay.dim() == 3,
        num_warps=2, **_pdl(),
    )  # fmt: skip


def chunks_refuse(memory: Tensor, decay: Tensor) -> str | None:
    """Why ``by_chunk`` cannot be used, or None."""
    if decay.dim() == 3:
        return "each channel has a decay of its own"
    if max(memory.shape[2:]) > 128:
        return "heads are wider than 128"
    return None


class Prepared(NamedTuple):
    """What ``_prepare`` leaves to ``_scan``."""

    u: Tensor
    w: Tensor
    inner: Tensor
    factors: Tensor


def by_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, rows: Rows, out: Tensor
) -> None:
    """Rows of several tokens, where nothing refuses it."""
    q, k = _rows(q), _rows(k)
    scan(q, k, prepare(q, k, _rows(v), decay, beta, rows.chunks), memory, rows, out)


def prepare(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunks: Tensor) -> Prepared:
    """Of all chunks at the same time. V is padded to 64 columns: behind a narrower tile, whose swizzle is not
    that of the other tiles, ptxas 12.8 takes a register that was never set for the address of V."""
    (tokens, heads, dv), dk = v.shape, k.shape[2]
    made = Prepared(
        v.new_empty(v.shape),
        v.new_empty(tokens, heads, dk),
        v.new_empty(tokens, heads, CHUNK),
        beta.new_empty(3, tokens, heads),
    )
    _prepare[chunks.shape[0], heads](
        q, k, v, decay, beta, *made, chunks, q.stride(0), k.stride(0), v.stride(0), decay.stride(0),
        beta.stride(0), heads // k.shape[1], dk**-0.5, tokens, DK=dk, KB=_side(dk), DV=dv,
        VB=max(64, _side(dv)), PRECISION=_precision(v), num_warps=4, **_pdl(),
    )  # fmt: skip
    return made


def scan(q: Tensor, k: Tensor, made: Prepared, memory: Tensor, rows: Rows, out: Tensor) -> None:
    """One chunk after another."""
    count, (tokens, heads, dv), dk = rows.first.shape[0] - 1, made.u.shape, k.shape[2]
    block = min(_side(dv), COLUMNS)
    _scan[count, heads, cdiv(dv, block)](
        q, k, *made, memory, out, rows.reads, rows.first, rows.segments, q.stride(0), k.stride(0),
        memory.stride(0), memory.stride(1), heads // k.shape[1], tokens, DK=dk, KB=_side(dk), DV=dv, VB=block,
        PRECISION=_precision(out), STAGES=1 if out.dtype == torch.float32 else 2, num_warps=4, **_pdl(),
    )  # fmt: skip


def _side(width: int) -> int:
    """Of a tile that is multiplied."""
    return max(16, next_power_of_2(width))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"

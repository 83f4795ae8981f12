"""How rows of a step on a GPU go from state to state: tables that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import StateRows
from sgla.kernels.ops import StateLayer, TimeSteps
from sgla.kernels.triton import conv, delta, ssd

CHUNK = 64  # tokens


class Stretches(NamedTuple):
    """Rows of several tokens, cut where they leave states: int32. A row begins at the first token of its
    first segment. ``first`` [P + 1]: the segments of each row; ``segments`` [*, 4]: first token, how many
    (the last may have none), the unit for the state behind it or 0; ``chunks`` [*, 4]: first token, how many
    of at most ``CHUNK``, the row. Chunks lie in segments, those without tokens are padding."""

    first: Any
    segments: Any
    chunks: Any


@dataclass(slots=True)
class DeviceStates(StateRows):
    """The first ``decode_rows`` of a batch have one token each, and the first as many ``marks`` are theirs,
    in their order, with unit 0 where there is none. ``stretches``: of the other rows. ``runs`` int32[at least
    ``decode_rows``]: with how many rows of one token a run begins, in which each row goes on from the state
    of the one before, and only the first one reads a unit; 0: the row is a later one of a run. None: each is
    a run of its own."""

    stretches: Stretches | None = None
    runs: Tensor | None = None


def device_states(
    reads: Any,
    writes: Any,
    marks: Any,
    q_start: Any,
    decodes: int,
    send: Callable[[list[Any]], list[Tensor]],
    runs: Any = None,
) -> DeviceStates:
    """Of rows of which the first ``decodes`` have one token: ``StateRows`` and ``runs`` in numpy; ``send``
    brings columns to the device."""
    every = np.concatenate([marks_of(marks, decodes), marks[marks[:, 0] >= decodes]])
    columns = [reads, writes, every.ravel(), *([] if runs is None else [runs])]
    if len(reads) > decodes:
        parts = stretches(q_start[decodes:], writes[decodes:], marks, decodes)
        columns += (part.ravel() for part in parts)
    sent = send(columns)
    chained = sent.pop(3) if runs is not None else None
    made = Stretches(sent[3], sent[4].view(-1, 4), sent[5].view(-1, 4)) if len(sent) > 3 else None
    return DeviceStates(sent[0], sent[1], sent[2].view(-1, 3), made, chained)


def marks_of(marks: Any, decodes: int) -> Any:
    """int32[decodes, 3]: one for each of the rows of one token."""
    made = np.zeros((decodes, 3), np.int32)
    made[:, 0], made[:, 1] = np.arange(decodes), 1
    own = marks[marks[:, 0] < decodes]
    made[own[:, 0]] = own
    return made


def stretches(q_start: Any, writes: Any, marks: Any, decodes: int) -> Stretches:
    """Of the rows behind ``decodes`` others, among whose ``marks`` are theirs."""
    rest = marks[marks[:, 0] >= decodes] - np.array([decodes, 0, 0], np.int32)
    return cut(q_start[:-1], np.diff(q_start), writes, rest)


def cut(begins: Any, q_lens: Any, writes: Any, marks: Any) -> Stretches:
    """On the host: rows of ``q_lens`` tokens, of which ``begins`` are the first ones, leave their last states
    in ``writes``, and on the way ``marks`` int32[M, 3]."""
    rows = len(q_lens)
    order = np.lexsort((marks[:, 1], marks[:, 0]))
    row = np.concatenate([marks[order, 0], np.arange(rows)])
    end = np.concatenate([marks[order, 1], q_lens])
    unit = np.concatenate([marks[order, 2], writes])
    order = np.argsort(row, kind="stable")  # marks come before the end of their row
    row, end, unit = row[order], end[order], unit[order]
    start = np.where(np.diff(row, prepend=-1) > 0, 0, np.roll(end, 1))
    segments = np.zeros((len(row), 4), np.int32)
    segments[:, 0], segments[:, 1], segments[:, 2] = begins[row] + start, end - start, unit
    counts = -(-segments[:, 1] // CHUNK)
    of = np.repeat(np.arange(len(row)), counts)
    offset = (np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)) * CHUNK
    chunks = np.zeros((len(of), 4), np.int32)
    chunks[:, 0] = segments[of, 0] + offset
    chunks[:, 1] = np.minimum(CHUNK, segments[of, 1] - offset)
    chunks[:, 2] = row[of]
    first = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    return Stretches(first, segments, chunks)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateLayer, batch: Any, silu: bool
) -> Tensor:
    """``ops.causal_conv``."""
    if not isinstance(batch.states, DeviceStates):
        return ops.causal_conv.body(x, weight, bias, state, batch, "silu" if silu else "none")
    out, n, states, units = x.new_empty(x.shape), batch.decode_rows, batch.states, state.conv
    if x.stride(1) != 1:
        x = x.contiguous()
    if n:
        reads, writes, marks = states.reads[:n], states.writes[:n], states.marks[:n]
        conv.decode(x[:n], weight, bias, units, reads, writes, marks, out[:n], silu, states.runs)
    if states.stretches is not None:
        conv.prompts(x, weight, bias, units, conv.Rows(states.reads[n:], *states.stretches), out, silu)
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: StateLayer, batch: Any
) -> Tensor:
    """``ops.gated_delta``."""
    if not isinstance(batch.states, DeviceStates):
        return ops.gated_delta.body(q, k, v, decay, beta, state, batch)
    out, n, states, units = v.new_empty(v.shape), batch.decode_rows, batch.states, state.memory
    if n:
        reads, writes, marks = states.reads[:n], states.writes[:n], states.marks[:n]
        rates = delta.Rates(decay[:n], beta[:n])
        delta.decode(q[:n], k[:n], v[:n], rates, units, reads, writes, marks, out[:n], runs=states.runs)
    if states.stretches is not None:
        rows = conv.Rows(states.reads[n:], *states.stretches)
        run = delta.by_token if delta.chunks_refuse(units, decay) else delta.by_chunk
        run(q, k, v, decay, beta, units, rows, out)
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: StateLayer,
    batch: Any,
    steps: TimeSteps | None,
) -> Tensor:
    """``ops.selective_scan``."""
    if not isinstance(batch.states, DeviceStates):
        return ops.selective_scan.body(x, dt, a, b, c, d, state, batch, steps)
    out, n, states, units = x.new_empty(x.shape), batch.decode_rows, batch.states, state.memory
    first = a.dim() > 1  # Mamba 1
    if n:
        ends = ssd.Ends(states.reads[:n], states.writes[:n], states.marks[:n], states.runs)
        decode = ssd.by_channel if first else ssd.decode
        decode(x[:n], dt[:n], a, b[:n], c[:n], d, steps, units, ends, out[:n])
    if states.stretches is not None:
        rows = conv.Rows(states.reads[n:], *states.stretches)
        run = ssd.by_token if ssd.chunks_refuse(x, units) else ssd.by_chunk
        (ssd.by_channel if first else run)(x, dt, a, b, c, d, steps, units, rows, out)
    return out

"""How rows of a step on a GPU go from state to state: tables that kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sgla.kernels.batch import StateRows
from sgla.kernels.ops import StateLayer
from sgla.kernels.triton import conv, delta

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
    """The first ``decode_rows`` of a batch have one token each, and as many ``marks`` in their order, with
    unit 0 where there is none. ``stretches``: of the other rows."""

    stretches: Stretches | None = None

    @staticmethod
    def of(
        decodes: int,
        q_start: Any,
        host_writes: Any,
        marks: Any,
        reads: Tensor,
        writes: Tensor,
        upload: Callable[[Any], Tensor],
    ) -> DeviceStates:
        """Rows of which ``decodes`` have one token and come first, in numpy arrays and on the device."""
        made = None
        if len(q_start) - 1 > decodes:
            rest = marks[decodes:] - (decodes, 0, 0)
            lengths = np.diff(q_start[decodes:])
            cuts = cut(q_start[decodes:-1], lengths, host_writes[decodes:], rest.astype(np.int32))
            made = Stretches(*(upload(column) for column in cuts))
        return DeviceStates(reads, writes, upload(marks), made)


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
    out, n, states, units = x.new_empty(x.shape), batch.decode_rows, batch.states, state.conv
    if x.stride(1) != 1:
        x = x.contiguous()
    if n:
        reads, writes, marks = states.reads[:n], states.writes[:n], states.marks[:n]
        conv.decode(x[:n], weight, bias, units, reads, writes, marks, out[:n], silu)
    if states.stretches is not None:
        conv.prompts(x, weight, bias, units, conv.Rows(states.reads[n:], *states.stretches), out, silu)
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: StateLayer, batch: Any
) -> Tensor:
    """``ops.gated_delta``."""
    out, n, states, units = v.new_empty(v.shape), batch.decode_rows, batch.states, state.memory
    if n:
        reads, writes, marks = states.reads[:n], states.writes[:n], states.marks[:n]
        delta.decode(q[:n], k[:n], v[:n], decay[:n], beta[:n], units, reads, writes, marks, out[:n])
    if states.stretches is not None:
        rows = conv.Rows(states.reads[n:], *states.stretches)
        run = delta.by_token if delta.chunks_refuse(units, decay) else delta.by_chunk
        run(q, k, v, decay, beta, units, rows, out)
    return out

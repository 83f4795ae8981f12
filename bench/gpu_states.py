"""Layers that keep a state, kernel by kernel, on a GPU: one JSON line each.

    python bench/gpu_states.py [--heads 32] [--key-heads 16] [--dim 128] [--rows 1,16,64,256] [--tokens 8192]

``us``: of a layer, median of replays of a graph of several layers, each with states of its own. ``floor_us``:
what it reads and writes at 4.34 TB/s. ``error``: the largest difference from the op's body in torch, of
outputs and of states, by the largest value.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import lines
import numpy as np
import torch
from gpu_kernels import time_us
from limits import READ
from torch import Tensor

from sgla.attention import DeviceBatch
from sgla.kernels import ops
from sgla.kernels.dispatch import using
from sgla.kernels.gpu import GpuOps
from sgla.kernels.gpu.states import device_states
from sgla.kernels.ops import StateLayer
from sgla.kernels.triton import delta
from sgla.kernels.triton.conv import Rows
from sgla.worker.device_state import upload, upload_columns

K, EPS = 4, 1e-6
BF16 = torch.bfloat16


class Shape(NamedTuple):
    heads: int
    key_heads: int
    dim: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * self.dim


def batch_of(lengths: list[int], marks: Sequence[tuple[int, int, int]] = ()) -> DeviceBatch:
    """Rows that begin with the units 1, 2, .. and leave their states there; decode rows come first."""
    rows, decodes = len(lengths), lengths.count(1)
    q_start = np.cumsum([0, *lengths]).astype(np.int32)
    units = np.arange(1, rows + 1, dtype=np.int32)
    made = np.array(list(marks), np.int32).reshape(-1, 3)
    states = device_states(units, units, made, q_start, decodes, upload_columns)
    fields = ("ids", "positions", "slots", "kv_len", "out_loc", "page_table", "sample_rows")
    given: dict[str, Any] = dict.fromkeys(fields, states.reads)
    given |= {"rows": rows, "tokens": int(q_start[-1]), "q_start": upload(q_start), "page_size": 16}
    return DeviceBatch(**given, states=states, decode_rows=decodes)


class Inputs:
    """Of a layer: what its projection makes for each token, and its parameters."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        sizes = [shape.channels, shape.heads * shape.dim, shape.heads, shape.heads]
        made = torch.randn(tokens, sum(sizes), device="cuda", dtype=BF16)
        self.qkv, gate, self.b, self.a = made.split(sizes, 1)
        self.gate = gate.unflatten(1, (shape.heads, -1))
        self.weight = torch.randn(shape.channels, K, device="cuda", dtype=BF16) / 2
        self.a_log, self.dt_bias = (torch.rand(shape.heads, device="cuda") for _ in range(2))
        self.norm, self.shape = torch.rand(shape.dim, device="cuda", dtype=BF16), shape

    def heads(self, y: Tensor) -> tuple[Tensor, ...]:
        shape = self.shape
        counts = shape.key_heads, shape.key_heads, shape.heads
        parts = y.split([n * shape.dim for n in counts], 1)
        return tuple(x.unflatten(1, (n, -1)) for x, n in zip(parts, counts))


def layer(x: Inputs, state: StateLayer, batch: Any) -> Tensor:
    y = ops.causal_conv(x.qkv, x.weight, None, state, batch)
    rates = ops.decay_rates(x.a, x.b, x.a_log, x.dt_bias)
    q, k, v = x.heads(y)
    return ops.gated_rms_norm(ops.gated_delta(q, k, v, *rates, state, batch), x.gate, x.norm, EPS)


def states(shape: Shape, units: int) -> StateLayer:
    conv = torch.randn(units, K - 1, shape.channels, device="cuda", dtype=BF16).transpose(1, 2)
    return StateLayer(conv, torch.randn(units, shape.heads, shape.dim, shape.dim, device="cuda"))


def check(shape: Shape) -> Iterator[dict[str, Any]]:
    """Against the body."""
    for lengths, marks in (([1] * 5, ()), ([1, 1, 70, 500], ((2, 64, 5), (3, 16, 6), (3, 496, 7)))):
        units = 9
        x, batch, mine = Inputs(shape, sum(lengths)), batch_of(lengths, marks), states(shape, units)
        theirs = StateLayer(mine.conv.clone(), mine.memory.clone())
        expected = layer(x, theirs, batch)
        with using(GpuOps(None)):  # type: ignore[arg-type]
            found = layer(x, mine, batch)
        pairs = ((found, expected), (mine.memory[1:], theirs.memory[1:]), (mine.conv[1:], theirs.conv[1:]))
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
        yield {"check": lengths, "error": max(errors), "errors": errors}


def decoding(shape: Shape, rows: int) -> Iterator[dict[str, Any]]:
    layers = max(2, min(16, int(30e9 // (4 * shape.heads * shape.dim**2 * (rows + 1)))))
    x, batch = Inputs(shape, rows), batch_of([1] * rows)
    pools = [states(shape, rows + 1) for _ in range(layers)]
    q, k, v = x.heads(x.qkv)
    rates = delta.Rates(*delta.decay_rates(x.a, x.b, x.a_log, x.dt_bias))
    given, out = batch.states, torch.empty_like(v)
    assert given is not None
    units = given.reads, given.writes, given.marks
    gates = delta.Gates(x.a, x.b, x.a_log, x.dt_bias)
    size = 8 * rows * shape.heads * shape.dim**2

    def conv_and_delta(s: StateLayer) -> None:
        y = ops.causal_conv(x.qkv, x.weight, None, s, batch)
        q, k, v = x.heads(y)
        delta.decode(q, k, v, gates, s.memory, *units, out)

    kinds: dict[str, tuple[Callable[[StateLayer], Any], int]] = {
        "conv and delta": (conv_and_delta, size),
        "conv": (
            lambda s: ops.causal_conv(x.qkv, x.weight, None, s, batch),
            rows * shape.channels * 2 * (2 * K),
        ),
        "layer": (lambda s: layer(x, s, batch), size),
        "gates and delta": (lambda s: delta.decode(q, k, v, gates, s.memory, *units, out), size),
    }
    for columns in (8, 16, 32, 64, 128):

        def run(s: StateLayer, columns: int = columns) -> None:
            delta.decode(q, k, v, rates, s.memory, *units, out, columns=columns)

        kinds[f"delta, {columns} columns"] = (run, size)
    for name, (call, nbytes) in kinds.items():
        with using(GpuOps(None)):  # type: ignore[arg-type]
            us = time_us(lambda: [call(pool) for pool in pools], layers)  # noqa: B023
        yield {
            "decode": name,
            "rows": rows,
            "us": round(us, 2),
            "floor_us": round(nbytes / READ * 1e6, 2),
        }


def reading(shape: Shape, lengths: list[int]) -> Iterator[dict[str, Any]]:
    tokens = sum(lengths)
    x, batch, pool = Inputs(shape, tokens), batch_of(lengths), states(shape, len(lengths) + 1)
    q, k, v = x.heads(x.qkv)
    decay, beta = delta.decay_rates(x.a, x.b, x.a_log, x.dt_bias)
    held: Any = batch.states
    assert held.stretches is not None
    rows, out = Rows(held.reads, *held.stretches), torch.empty_like(v)
    made = delta.prepare(q, k, v, decay, beta, rows.chunks)
    size = sum(part.nbytes for part in made)
    kinds: dict[str, tuple[Callable[[], Any], int]] = {
        "prepare": (lambda: delta.prepare(q, k, v, decay, beta, rows.chunks), size),
        "scan": (lambda: delta.scan(q, k, made, pool.memory, rows, out), size + 2 * v.numel()),
        "conv": (lambda: ops.causal_conv(x.qkv, x.weight, None, pool, batch), 4 * tokens * shape.channels),
        "delta": (
            lambda: ops.gated_delta(q, k, v, decay, beta, pool, batch),
            2 * x.qkv.numel() + 2 * v.numel(),
        ),
        "gates": (lambda: ops.decay_rates(x.a, x.b, x.a_log, x.dt_bias), 12 * x.a.numel()),
        "norm": (lambda: ops.gated_rms_norm(v, x.gate, x.norm, EPS), 6 * v.numel()),
        "layer": (lambda: layer(x, pool, batch), 4 * tokens * shape.channels + 6 * v.numel()),
    }
    for name, (call, nbytes) in kinds.items():
        with using(GpuOps(None)):  # type: ignore[arg-type]
            us = time_us(lambda: [call() for _ in range(4)], 4)  # noqa: B023
        yield {
            "prompts": name,
            "lengths": lengths,
            "us": round(us, 2),
            "floor_us": round(nbytes / READ * 1e6, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = Shape(args.heads, args.key_heads, args.dim)
    for line in check(shape):
        lines.emit({"bench": "states"} | line)
    for rows in map(int, args.rows.split(",")):
        for line in decoding(shape, rows):
            lines.emit({"bench": "states"} | line)
    for lengths in ([args.tokens], [args.tokens // 8] * 8):
        for line in reading(shape, lengths):
            lines.emit({"bench": "states"} | line)


if __name__ == "__main__":
    main()

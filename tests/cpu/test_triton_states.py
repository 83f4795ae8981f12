"""Kernels of layers that keep a state against the bodies of their ops, in Triton's interpreter."""

from __future__ import annotations

import os
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu has the same on the device", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from recurrence import batch_of
from torch import Tensor

from sgla.attention.base import DeviceBatch
from sgla.dist import Shard
from sgla.kernels import gpu, ops
from sgla.kernels.dispatch import using
from sgla.kernels.gpu.ops import GpuOps
from sgla.kernels.gpu.rewrite import Asked
from sgla.kernels.gpu.states import device_states
from sgla.kernels.triton import conv, delta, ssd

UNITS = 14
LENGTHS, READS, WRITES = [1, 1, 1, 50, 9, 131, 2], [3, 0, 5, 0, 4, 6, 12], [3, 1, 7, 2, 4, 6, 12]
FEW = 5  # rows, for kernels that go token by token
MARKS = [(1, 1, 11), (3, 48, 9), (3, 16, 8), (4, 9, 10), (6, 1, 13)]


def batch(decodes: int, rows: int = len(LENGTHS)) -> DeviceBatch:
    """The first ``rows``; of those of one token so many are decode rows."""
    marks = [mark for mark in MARKS if mark[0] < rows]
    made = batch_of(LENGTHS[:rows], READS[:rows], WRITES[:rows], marks)
    assert made.states is not None
    columns = (made.states.reads.numpy(), made.states.writes.numpy(), np.array(marks, np.int32))
    device = device_states(*columns, made.q_start.numpy(), decodes, lambda x: list(map(torch.from_numpy, x)))
    fields = {name: getattr(made, name) for name in made.__slots__} | {"states": device}
    return DeviceBatch(**fields, decode_rows=decodes)


def same(call, channels: int = 0, memory: tuple[int, int, int] = (0, 0, 0), rows: int = len(LENGTHS)) -> None:
    """``call(batch, layer)`` gives and leaves the same with the kernels and without."""
    begin = ops.StateLayer(torch.randn(UNITS, channels, 3), torch.randn(UNITS, *memory))
    begin.conv[0] = begin.memory[0] = torch.nan
    layer = deepcopy(begin)
    expected = call(batch(0, rows), layer)
    for decodes in (0, 3):
        other = deepcopy(begin)
        with using(GpuOps(None)):  # type: ignore[arg-type]
            found = call(batch(decodes, rows), other)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.conv[1:], layer.conv[1:])
        torch.testing.assert_close(other.memory[1:], layer.memory[1:], rtol=1e-4, atol=1e-5)


RUNS = [4, 1, 2]  # rows of one token that go on from each other


def same_in_runs(call, channels: int = 0, memory: tuple[int, int, int] = (0, 0, 0)) -> None:
    """Rows of one token that go on from each other give and leave what longer rows do."""
    begin = ops.StateLayer(torch.randn(UNITS, channels, 3), torch.randn(UNITS, *memory))
    begin.conv[0] = begin.memory[0] = torch.nan
    layer = deepcopy(begin)
    reads, writes, marks = [3, 0, 5], [3, 1, 7], [(0, 1, 8), (0, 2, 9), (0, 3, 10), (1, 1, 12), (2, 1, 11)]
    expected = call(batch_of(RUNS, reads, writes, marks), layer)
    rows = [3, 0, 0, 0, 0, 5, 0], [8, 9, 10, 3, 1, 11, 7], [4, 0, 0, 0, 1, 2, 0]
    made = batch_of([1] * 7, rows[0], rows[1])
    columns = [np.array(column, np.int32) for column in rows]
    units = np.array([(4, 1, 12)], np.int32)
    linked = device_states(
        *columns[:2], units, np.arange(8), 7, lambda x: list(map(torch.from_numpy, x)), columns[2]
    )
    fields = {name: getattr(made, name) for name in made.__slots__} | {"states": linked}
    with using(GpuOps(None)):  # type: ignore[arg-type]
        found = call(DeviceBatch(**fields, decode_rows=7), begin)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(begin.conv[1:], layer.conv[1:])
    torch.testing.assert_close(begin.memory[1:], layer.memory[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bias", "tile"), [(False, conv.RUN), (True, conv.RUN), (True, 3)])
def test_convolution_in_runs(monkeypatch: pytest.MonkeyPatch, bias: bool, tile: int) -> None:
    monkeypatch.setattr(conv, "RUN", tile)
    x = torch.randn(sum(RUNS), 20)[:, 3:13]
    weight, b = torch.randn(10, 4), torch.randn(10) if bias else None
    same_in_runs(lambda rows, layer: ops.causal_conv(x, weight, b, layer, rows), channels=10)


@pytest.mark.parametrize("channels", [False, True])
def test_gated_delta_in_runs(channels: bool) -> None:
    q, k, v, beta = (x[: sum(RUNS)] for x in inputs(2, 8, 16))
    decay = -torch.rand(len(beta), 2, 8) if channels else -torch.rand(len(beta), 2)
    same_in_runs(lambda rows, s: ops.gated_delta(q, k, v, decay, beta, s, rows), memory=(2, 8, 16))


@pytest.mark.parametrize("first", [False, True])
def test_selective_scan_in_runs(first: bool) -> None:
    """Of Mamba 2, and of the first one."""
    tokens, d, steps = sum(RUNS), torch.randn(6), ops.TimeSteps(torch.randn(6))
    x, dt, a = torch.randn(tokens, 6, 1 if first else 20), torch.randn(tokens, 6), -torch.rand(6)
    a = -torch.rand(6, 8) if first else a
    b, c = torch.randn(2, tokens, 1 if first else 2, 8).unbind()
    memory = (6, x.shape[2], 8)
    same_in_runs(lambda rows, s: ops.selective_scan(x, dt, a, b, c, d, s, rows, steps), memory=memory)


@pytest.mark.parametrize("bias", [False, True])
def test_convolution(bias: bool) -> None:
    x = torch.randn(sum(LENGTHS), 20)[:, 3:13]
    weight, b = torch.randn(10, 4), torch.randn(10) if bias else None
    same(lambda rows, layer: ops.causal_conv(x, weight, b, layer, rows), channels=10)


def inputs(heads: int, dk: int, dv: int) -> tuple[Tensor, ...]:
    """Of the delta rule: some keys are equal, which makes the triangular system of a chunk a hard one."""
    tokens = sum(LENGTHS)
    parts = torch.randn(tokens, 2 * heads // 2 * dk + heads * dv).split(
        [heads // 2 * dk] * 2 + [heads * dv], 1
    )
    q, k, v = (x.unflatten(1, (n, -1)) for x, n in zip(parts, (heads // 2, heads // 2, heads)))
    k[20:60] = k[20]
    return q, k, v, torch.rand(tokens, heads)


@pytest.mark.parametrize(("heads", "dk", "dv"), [(4, 16, 32), (2, 12, 9)])
def test_gated_delta(heads: int, dk: int, dv: int) -> None:
    q, k, v, beta = inputs(heads, dk, dv)
    decay = -torch.rand(len(beta), heads) * torch.tensor([3.0, 0.01]).repeat(heads // 2)
    decay[20:60] = 0
    same(lambda rows, s: ops.gated_delta(q, k, v, decay, beta, s, rows), memory=(heads, dk, dv))


def test_a_decay_for_each_channel() -> None:
    q, k, v, beta = inputs(2, 8, 16)
    decay = -torch.rand(len(beta), 2, 8)
    same(lambda rows, s: ops.gated_delta(q, k, v, decay, beta, s, rows), memory=(2, 8, 16))


def test_wide_heads_go_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "chunks_refuse", lambda *args: "no")
    q, k, v, beta = (x[: sum(LENGTHS[:FEW])] for x in inputs(2, 8, 16))
    same(lambda rows, s: ops.gated_delta(q, k, v, -beta, beta, s, rows), memory=(2, 8, 16), rows=FEW)


def test_what_stands_around_the_delta_rule() -> None:
    tokens, heads, d = sum(LENGTHS), 3, 12
    a, b = torch.randn(tokens, 2 * heads).mul(12).chunk(2, 1)
    a_log, bias, weight = torch.randn(heads), torch.randn(heads), torch.randn(d)
    x, gate = torch.randn(tokens, 2 * heads * d).chunk(2, 1)
    with using(GpuOps(None)):  # type: ignore[arg-type]
        rates = ops.decay_rates(a, b, a_log, bias)
    for found, expected in zip(rates, ops.decay_rates(a, b, a_log, bias)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    with using(GpuOps(None)):  # type: ignore[arg-type]
        torch.testing.assert_close(ops.sigmoid_mul(x, gate), x * gate.sigmoid(), rtol=1e-4, atol=1e-6)
    for activation in ("silu", "sigmoid"):
        given = (x.unflatten(1, (heads, d)), gate.unflatten(1, (heads, d)), weight, 1e-6, activation)
        with using(GpuOps(None)):  # type: ignore[arg-type]
            found = ops.gated_rms_norm(*given)
        torch.testing.assert_close(found, ops.gated_rms_norm(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "groups", "p", "n", "stepped"),
    [
        (4, 2, 16, 32, True),
        (6, 2, 12, 9, False),
        pytest.param(3, 3, 40, 16, True, marks=pytest.mark.slow),
    ],
)
def test_selective_scan(heads: int, groups: int, p: int, n: int, stepped: bool) -> None:
    tokens = sum(LENGTHS)
    parts = torch.randn(tokens, heads * p + 2 * groups * n + heads).split(
        [heads * p, groups * n, groups * n, heads], 1
    )
    x, b, c = (y.unflatten(1, (k, -1)) / p**0.5 for y, k in zip(parts, (heads, groups, groups)))
    a, d = -torch.rand(heads) * torch.tensor([2.0, 0.01, 0.3]).repeat(heads)[:heads], torch.randn(heads)
    steps = ops.TimeSteps(torch.randn(heads) - 2, 0.001, 3.0) if stepped else None
    dt = parts[3] * 5 if stepped else parts[3].abs()
    skip = d if stepped else None
    same(lambda rows, s: ops.selective_scan(x, dt, a, b, c, skip, s, rows, steps), memory=(heads, p, n))


def test_a_wide_scan_goes_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd, "chunks_refuse", lambda *args: "no")
    tokens = sum(LENGTHS[:FEW])
    x, dt, a, d = torch.randn(tokens, 2, 20), torch.randn(tokens, 2), -torch.rand(2), torch.randn(2)
    (b, c), steps = torch.randn(2, tokens, 1, 8).unbind(), ops.TimeSteps(torch.randn(2))
    same(lambda rows, s: ops.selective_scan(x, dt, a, b, c, d, s, rows, steps), memory=(2, 20, 8), rows=FEW)


@pytest.mark.parametrize("stepped", [True, False])
def test_a_scan_of_channels(stepped: bool) -> None:
    tokens = sum(LENGTHS[:FEW])
    b, c = torch.randn(2, tokens, 1, 5).unbind()
    x, dt = torch.randn(tokens, 140).split(70, 1)
    a, d = -torch.rand(70, 5), torch.randn(70)
    steps, dt = (ops.TimeSteps(torch.randn(70)), dt) if stepped else (None, dt.abs())
    skip = d if stepped else None
    scan = lambda rows, s: ops.selective_scan(x[..., None], dt, a, b, c, skip, s, rows, steps)  # noqa: E731
    same(scan, memory=(70, 1, 5), rows=FEW)


def test_time_steps_of_all_sizes() -> None:
    """From the smallest that a float32 tells from 0, in steps of one token: what a state has of x is dt."""
    values = torch.linspace(-60, 60, 121)
    x, one, steps = torch.ones(3, 121, 1), torch.ones(3, 1, 1), ops.TimeSteps(torch.zeros(121))
    states = ops.StateLayer(torch.zeros(UNITS, 0, 0), torch.zeros(UNITS, 121, 1, 1))
    with using(GpuOps(None)):  # type: ignore[arg-type]
        y = ops.selective_scan(
            x, values.expand(3, -1), torch.zeros(121), one, one, None, states, batch(3, 3), steps
        )
    expected = torch.nn.functional.softplus(values.double()).float()
    torch.testing.assert_close(y[1, :, 0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("groups", "d"), [(1, 48), (3, 20)])
def test_gated_group_norm(groups: int, d: int) -> None:
    x, gate = torch.randn(7, 2 * groups * d + 5)[:, 5:].chunk(2, 1)
    for weight in (torch.rand(groups * d), None):
        with using(GpuOps(None)):  # type: ignore[arg-type]
            found = ops.gated_group_norm(x, gate, weight, 1e-5, groups)
        expected = ops.gated_group_norm(x, gate, weight, 1e-5, groups)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Layer:
    """The delta rule with what stands around it."""

    unrecorded = ""

    spec, embed = SimpleNamespace(hidden=48), SimpleNamespace(weight=SimpleNamespace(kind="f32"))
    shard = Shard()

    def __init__(self, tokens: int, gates: bool, activation: str) -> None:
        self.q, self.k, self.v, self.b = (x[:tokens] for x in inputs(4, 16, 12))
        self.a, self.gate, self.gates, self.activation = self.b * 3 - 1, self.v.flip(0), gates, activation
        self.a_log, self.bias, self.norm = torch.randn(4), torch.randn(4), torch.rand(12)

    def forward(self, batch: Any, kv: Any, rows: Any = None) -> Tensor:
        rates = -self.b, self.b
        if self.gates:
            rates = ops.decay_rates(self.a, self.b, self.a_log, self.bias)
        seen = ops.gated_delta(self.q, self.k, self.v, *rates, kv[0], batch)
        return ops.gated_rms_norm(seen, self.gate, self.norm, 1e-6, self.activation).flatten(1)


@pytest.mark.parametrize(
    ("rows", "gates", "activation"),
    [(3, True, "silu"), (3, False, "sigmoid"), (len(LENGTHS), True, "silu")],
)
def test_gates_join_the_delta_rule(rows: int, gates: bool, activation: str) -> None:
    layer, given = Layer(sum(LENGTHS[:rows]), gates, activation), batch(3, rows)
    begin = ops.StateLayer(torch.zeros(UNITS, 0, 0), torch.randn(UNITS, 4, 16, 12))
    expected = layer.forward(given, [left := deepcopy(begin)])
    forward = gpu.RecordedForward(layer, [begin], GpuOps(None))  # type: ignore[arg-type, list-item]
    torch.testing.assert_close(forward.hidden(given), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(begin.memory[1:], left.memory[1:], rtol=1e-4, atol=1e-5)
    work = forward.rewritten("hidden", False, Asked({"tokens": 3, "sampled": 0, "rows": 3}))
    assert work is not None
    assert work.taken == ({"gates and delta": 1} if gates else {})
    assert not work.named(ops.decay_rates)


def test_what_lies_beside_an_argument_is_not_touched() -> None:
    """The interpreter refuses what a GPU may fault at, or not."""
    x, gate, weight = torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.ones(7)
    with pytest.raises(Exception, match="are not within one of"):
        delta.gated_rms_norm(x, gate, weight, 1e-6)

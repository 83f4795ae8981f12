"""Ops of layers that keep a state: their bodies against the written recurrence (``recurrence.py``) and
against the functions of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recurrence import Step, batch_of, conv_step, delta_step, scan_step, walk
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import Step as NativeStep
from sgla.kernels.cpu.native import Team, library
from sgla.kernels.cpu.states import StateCalls
from sgla.kernels.dispatch import using

UNITS = 12
LENGTHS, READS, WRITES = [1, 70, 1, 9, 1, 150], [3, 0, 0, 4, 5, 6], [3, 1, 2, 4, 7, 6]
MARKS = [(1, 16, 8), (1, 48, 9), (3, 9, 10), (4, 1, 11), (0, 1, 0)]
Case = tuple[Callable[[ForwardBatch, ops.StateLayer], Tensor], Step]


def batch() -> ForwardBatch:
    return batch_of(LENGTHS, READS, WRITES, MARKS)


def layer(channels: int = 0, heads: int = 0, first: int = 0, second: int = 0) -> ops.StateLayer:
    """Units with something in each; what stands in the dummy is nobody's."""
    state = ops.StateLayer(torch.randn(UNITS, channels, 3), torch.randn(UNITS, heads, first, second))
    for units in (state.conv, state.memory):
        units[0] = torch.nan
    return state


def conv(tokens: int, bias: bool) -> Case:
    x, weight, b = torch.randn(tokens, 10), torch.randn(10, 4), torch.randn(10) if bias else None
    step = conv_step(x, weight, b)
    return lambda rows, state: ops.causal_conv(x, weight, b, state, rows, "none"), step


def delta(tokens: int, fine: bool) -> Case:
    q, k = torch.randn(2, tokens, 2, 8).unbind()
    v, beta = torch.randn(tokens, 4, 6), torch.rand(tokens, 4)
    decay = -torch.rand(tokens, 4, 8 if fine else 1).squeeze(-1) * 3
    return lambda rows, s: ops.gated_delta(q, k, v, decay, beta, s, rows), delta_step(q, k, v, decay, beta)


def scan(tokens: int, first: bool) -> Case:
    heads, width, groups = (12, 1, 1) if first else (4, 6, 2)
    x, dt = torch.randn(tokens, heads, width), torch.rand(tokens, heads)
    a = -torch.rand(heads, 5 if first else 1).squeeze(-1) * 4
    b, c = torch.randn(2, tokens, groups, 5).unbind()
    d = torch.randn(heads)
    step = scan_step(x, dt, a, b, c, d)
    return lambda rows, state: ops.selective_scan(x, dt, a, b, c, d, state, rows), step


CASES: dict[str, tuple[Callable[[int, bool], Case], bool, tuple[int, ...]]] = {
    "conv": (conv, False, (10,)),
    "conv, bias": (conv, True, (10,)),
    "delta": (delta, False, (0, 4, 8, 6)),
    "delta, a decay for each channel": (delta, True, (0, 4, 8, 6)),
    "mamba 2": (scan, False, (0, 4, 6, 5)),
    "mamba 1": (scan, True, (0, 12, 1, 5)),
}


class Native:
    """A dispatcher to the native kernels, with two threads."""

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        batch = next(x for x in args if isinstance(x, ForwardBatch))
        step = NativeStep(tokens=batch.tokens, rows=batch.rows, q_start=batch.q_start.data_ptr())
        lib = library()
        return StateCalls(lib, Team(lib, 2), step).bodies[op](*args, **kwargs)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.native)], ids=["torch", "native"])
def dispatched(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(Native() if request.param else None):
        yield


@pytest.mark.usefixtures("dispatched")
@pytest.mark.parametrize("name", CASES)
def test_bodies_are_the_recurrence(name: str) -> None:
    """Rows of one token and of many, which begin with states, without, and leave some on the way."""
    torch.manual_seed(1)
    make, variant, sizes = CASES[name]
    state = layer(*sizes)
    compute, step = make(sum(LENGTHS), variant)
    units = state.conv if sizes[0] else state.memory
    expected, after = walk(batch(), units, step)
    made = compute(batch(), state)
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(units[1:], after[1:], atol=2e-5, rtol=1e-4)


@pytest.mark.native
def test_convolutions_keep_bfloat16_as_torch_does() -> None:
    torch.manual_seed(4)
    compute, _ = conv(sum(LENGTHS), True)
    first, second = (
        ops.StateLayer(torch.randn(UNITS, 10, 3).bfloat16(), torch.empty(UNITS, 0)) for _ in "ab"
    )
    second.conv.copy_(first.conv)
    with using(Native()):
        made = compute(batch(), first)
    torch.testing.assert_close(made, compute(batch(), second))
    assert torch.equal(first.conv[1:], second.conv[1:])


@pytest.mark.usefixtures("dispatched")
@pytest.mark.parametrize("name", CASES)
def test_a_row_in_pieces_is_the_whole_row(name: str) -> None:
    torch.manual_seed(2)
    make, variant, sizes = CASES[name]
    state, tokens = layer(*sizes), 90
    compute, step = make(tokens, variant)
    units = state.conv if sizes[0] else state.memory
    whole = compute(batch_of([tokens], [0], [1]), state)
    left = units[1].clone()
    for pieces in ([1, 88, 1], [64, 26], [17, 50, 23]):
        unit, at = 0, 0
        for length in pieces:
            rows = batch_of([at, length, tokens - at - length], [2, unit, 3], [4, 5, 6])
            made = compute(rows, state)[at : at + length]
            torch.testing.assert_close(made, whole[at : at + length], atol=2e-5, rtol=1e-4)
            unit, at = 5, at + length
        torch.testing.assert_close(units[5], left, atol=2e-5, rtol=1e-4)


def test_bodies_are_those_of_transformers() -> None:
    torch.manual_seed(3)
    tokens, rows = 100, batch_of([100], [0], [1])
    x, weight, bias = torch.randn(tokens, 10), torch.randn(10, 4), torch.randn(10)
    theirs = qwen.causal_conv1d_fn(x.t()[None], weight, bias, activation="silu")[0].t()
    torch.testing.assert_close(ops.causal_conv(x, weight, bias, layer(10), rows), theirs)

    q, k = torch.randn(2, tokens, 2, 8).unbind()
    v, beta, decay = torch.randn(tokens, 4, 6), torch.rand(tokens, 4), -torch.rand(tokens, 4, 8)
    for ours, functions in (
        (decay[..., 0], (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule)),
        (decay, (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention)),
    ):
        state = layer(0, 4, 8, 6)
        made = ops.gated_delta(q, k, v, ours, beta, state, rows)
        heads = (q.repeat_interleave(2, 1), k.repeat_interleave(2, 1), v, ours, beta)
        for function in functions:
            out, last = function(
                *(y[None] for y in heads[:3]), g=ours[None], beta=beta[None], initial_state=None,
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            torch.testing.assert_close(made, out[0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(state.memory[1], last[0], atol=2e-5, rtol=1e-4)

    x, dt, a, d = torch.randn(tokens, 4, 6), torch.rand(tokens, 4), -torch.rand(4), torch.randn(4)
    b, c = torch.randn(2, tokens, 2, 5).unbind()
    state = layer(0, 4, 6, 5)
    out, last = mamba2.mamba2_chunk_scan(
        x[None], dt[None], a, b[None], c[None], 32, D=d, return_final_states=True
    )
    torch.testing.assert_close(
        ops.selective_scan(x, dt, a, b, c, d, state, rows), out[0], atol=2e-5, rtol=1e-4
    )
    torch.testing.assert_close(state.memory[1], last[0], atol=2e-5, rtol=1e-4)

    x, a, dt, d = (
        torch.randn(tokens, 12),
        -torch.rand(12, 5),
        F.softplus(torch.randn(tokens, 12)),
        torch.randn(12),
    )
    out = mamba.mamba_selective_scan(x.t()[None], dt.t()[None], a, b[:, 0].t()[None], c[:, 0].t()[None], D=d)
    made = ops.selective_scan(x[..., None], dt, a, b[:, :1], c[:, :1], d, layer(0, 12, 1, 5), rows)
    torch.testing.assert_close(made[..., 0], out[0].t(), atol=2e-5, rtol=1e-4)

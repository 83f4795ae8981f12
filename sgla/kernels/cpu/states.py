"""Ops of layers that keep a state, by the native kernels. Their tensors have heads and come of torch
operations, so each op is a call between the instructions of a program: of one instruction, which all threads
run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.native import Instr, Library, Opcode, StateCall, Step, Team
from sgla.kernels.dispatch import Op
from sgla.kernels.ops import StateLayer, TimeSteps

MOST_TAPS = 1024  # of a convolution, and values of a state: what the scratch of a thread holds
MOST_VALUES = 1 << 19


class StateCalls:
    """``team`` and ``step``: the threads that run them, and what they do it for."""

    def __init__(self, lib: Library, team: Team, step: Step) -> None:
        self._lib, self._team, self._step = lib, team, step
        self.bodies: dict[Op[..., Any], Callable[..., Any]] = {
            ops.causal_conv: self.causal_conv,
            ops.gated_delta: self.gated_delta,
            ops.selective_scan: self.selective_scan,
        }

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: StateLayer,
        batch: ForwardBatch,
        activation: str = "silu",
    ) -> Tensor:
        units, (channels, taps) = state.conv, weight.shape
        known = units.dtype in (torch.float32, torch.bfloat16) and units.is_contiguous()
        if not known or taps > MOST_TAPS or x.dtype != torch.float32:
            return ops.causal_conv.body(x, weight, bias, state, batch, activation)
        given = x, None if bias is None else bias.float(), None
        sizes = {"n": channels, "k": taps, "wide": units.dtype == torch.bfloat16}
        y = self._run(Opcode.CAUSAL_CONV, given, weight.float().contiguous(), None, units, batch, sizes)
        return F.silu(y) if activation == "silu" else y

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: StateLayer,
        batch: ForwardBatch,
    ) -> Tensor:
        if not _known(state.memory, q, k, v):
            return ops.gated_delta.body(q, k, v, decay, beta, state, batch)
        sizes = _sizes(v, k, decay.dim() > beta.dim())
        decay, beta = decay.float().contiguous(), beta.float().contiguous()
        return self._run(Opcode.GATED_DELTA, (v, k, q), decay, beta, state.memory, batch, sizes)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: StateLayer,
        batch: ForwardBatch,
        steps: TimeSteps | None = None,
    ) -> Tensor:
        if not _known(state.memory, x, b, c):
            return ops.selective_scan.body(x, dt, a, b, c, d, state, batch, steps)
        dt = (dt.float() if steps is None else steps.of(dt)).contiguous()
        rates, sizes = a.float().contiguous(), _sizes(x, b, a.dim() > 1)
        y = self._run(Opcode.SELECTIVE_SCAN, (x, b, c), rates, dt, state.memory, batch, sizes)
        return y if d is None else torch.addcmul(y, d.float()[:, None], x)

    def _run(
        self,
        op: Opcode,
        given: tuple[Tensor, Tensor | None, Tensor | None],
        decay: Tensor,
        rate: Tensor | None,
        units: Tensor,
        batch: ForwardBatch,
        sizes: dict[str, int],
    ) -> Tensor:
        states, out = batch.states, torch.empty(given[0].shape)
        assert states is not None, "layers that keep a state, and a batch without any"
        marks = states.marks.contiguous()
        inputs = {name: None if y is None else _by_token(y) for name, y in zip("abc", given)}
        tensors = {
            **inputs,
            **{"decay": decay, "rate": rate, "out": out, "units": units},
            **{"reads": states.reads, "writes": states.writes, "marks": marks},
        }
        addresses = {name: None if y is None else y.data_ptr() for name, y in tensors.items()}
        strides = {f"{name}_stride": 0 if y is None else y.stride(0) for name, y in inputs.items()}
        call = StateCall(**addresses, **strides, marks_count=len(marks), **sizes)
        code = (Instr * 1)(Instr(op=op))
        code[0].p[0] = ctypes.addressof(call)
        self._lib.dll.sgla_run(self._team.handle, code, 1, self._step, None)
        return out


def _known(memory: Tensor, *given: Tensor) -> bool:
    """Whether the kernels read such tensors."""
    floats = all(x.dtype == torch.float32 for x in (memory, *given))
    return floats and memory.is_contiguous() and memory[0, 0].numel() <= MOST_VALUES


def _sizes(x: Tensor, y: Tensor, wide: bool) -> dict[str, int]:
    """Of x [T, H, n] and y [T, G, k], which has its heads for H / G of x."""
    return {
        "heads": x.shape[1],
        "group": x.shape[1] // y.shape[1],
        "n": x.shape[2],
        "k": y.shape[2],
        "wide": wide,
    }


def _by_token(x: Tensor) -> Tensor:
    """With the values of a token beside each other."""
    return x if not len(x) or x[0].is_contiguous() else x.contiguous()

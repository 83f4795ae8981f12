"""Short convolutions behind the linear layer that makes their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.gpu import few, states
from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.rewrite import Work
from sgla.kernels.ops import StateLayer

ROWS = 8  # at most


def refuses(work: Work, linear: Node, split: Node, conv: Node) -> str | None:
    taps, state = conv.given["weight"], conv.given["state"]
    if work.rows(linear) > ROWS:
        return f"it takes at most {ROWS} rows"
    if linear.fn is not few._run or linear.given["bias"] is not None or conv.given["bias"] is not None:
        return "the layer has a gate before it, or one of both has a bias"
    if conv.given["activation"] != "silu" or taps.shape[1] != skinny_gemm.TAPS:
        return f"it takes convolutions over {skinny_gemm.TAPS} tokens with silu"
    if taps.dtype != torch.float32 or state.conv.dtype != torch.bfloat16 or not taps.is_contiguous():
        return "it takes weights in float32 and states in bfloat16"
    return None


def make(work: Work, linear: Node, split: Node, conv: Node) -> list[Node]:
    first = next(name for name, x in split.given.items() if isinstance(x, Ref))
    parts = {name: x for name, x in split.given.items() if name != first}
    given = {name: conv.given[name] for name in ("state", "batch")} | {"taps": conv.given["weight"]}

    def run(state: StateLayer, batch: Any, taps: Tensor, **layer: Any) -> list[Tensor]:
        """A step of decode rows that do not guess is one kernel."""
        units = batch.states
        if isinstance(units, states.DeviceStates) and units.stretches is None and units.runs is None:
            assert split.fn is not None
            behind = skinny_gemm.Convolution(taps, state.conv, units.reads, units.writes, units.marks)
            layer["epilogue"] = skinny_gemm.CONVOLVED
            made: list[Tensor] = split.fn(**{first: few._run(**layer, convolution=behind)}, **parts)
            return made
        assert split.fn is not None
        x, *others = split.fn(**{first: few._run(**layer)}, **parts)
        return [states.convolve(x, taps, None, state, batch, True), *others]

    results = [conv.results[0], *split.results[1:]]
    return [Node("few rows, convolved", run, linear.given | given, results, conv.rows, None, linear.rule)]


CHAIN = (few.NAME, torch.Tensor.split, ops.causal_conv)

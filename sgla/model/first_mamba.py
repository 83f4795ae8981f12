"""Mamba 1 (arXiv 2312.00752), as Mamba itself, Falcon Mamba and Jamba have it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.lora import added
from sgla.kernels.ops import StateLayer, TimeSteps
from sgla.layers.build import Build, gather, run
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.model.mamba import take
from sgla.model.mamba_spec import FirstMambaSpec
from sgla.quant.weight import SourceTensor


class FirstMamba:
    """``[T, d] -> [T, C]`` of this rank's channels, which ``out`` brings back to the width. B, C and what
    time steps are made of come of the channels of all ranks, and may have norms."""

    def __init__(self, build: Build, name: str, hidden: int, layer: FirstMambaSpec) -> None:
        self.layer, self.own = layer, build.shard.range(layer.inner)
        width = len(self.own)
        pieces = [run(self.own, 1, 0, 0), run(self.own, 1, layer.inner, width)]
        self.project = build.empty(2 * width, hidden, f"{name}.in_proj")
        rows = gather(build, self.project, f"{name}.in_proj", (2 * layer.inner, hidden), pieces)
        self.added = build.stack_of(hidden, [rows])
        self.bias = torch.zeros(2 * width) if layer.bias else None
        if self.bias is not None:
            build.declare(f"{name}.in_proj.bias", (2 * layer.inner,), partial(take, self.bias, pieces))
        self.conv, shape = torch.zeros(width, layer.taps), (layer.inner, 1, layer.taps)
        build.declare(f"{name}.conv1d.weight", shape, partial(take, self.conv[:, None], pieces[:1]))
        self.conv_bias = None
        if layer.conv_bias:
            self.conv_bias = build.vector(f"{name}.conv1d.bias", layer.inner, self.own)
        self.parts = [layer.rank, layer.size, layer.size]
        self.select = RowLinear(build, f"{name}.x_proj", sum(self.parts), layer.inner, self.own)
        self.norms = [torch.ones(size) for size in self.parts]
        if layer.norms == "weighted":
            names = (f"{name}.{part}_layernorm.weight" for part in ("dt", "b", "c"))
            self.norms = [build.vector(norm, size) for norm, size in zip(names, self.parts)]
        self.time = MergedColumnLinear(build, layer.rank, [(f"{name}.dt_proj", layer.inner, self.own)])
        self.steps = TimeSteps(build.vector(f"{name}.dt_proj.bias", layer.inner, self.own))
        self.a = torch.zeros(width, layer.size)
        build.declare(f"{name}.A_log", (layer.inner, layer.size), self._take_a)
        self.d = build.vector(f"{name}.D", layer.inner, self.own)
        self.out = RowLinear(build, f"{name}.out_proj", hidden, layer.inner, self.own, layer.bias)

    def _take_a(self, source: SourceTensor) -> None:
        self.a.copy_(-source.dense(self.own).float().exp())

    def __call__(self, x: Tensor, batch: ForwardBatch, state: StateLayer) -> Tensor:
        x, gate = ops.linear(x, self.project, self.bias, added(x, *self.added)).chunk(2, dim=1)
        x = ops.causal_conv(x, self.conv, self.conv_bias, state, batch)
        parts = self.select(x).split(self.parts, dim=1)
        if self.layer.norms:
            parts = [
                ops.rms_norm(part.contiguous(), norm, self.layer.eps) for part, norm in zip(parts, self.norms)
            ]
        dt, b, c = parts
        x, b, c = x[..., None], b[:, None], c[:, None]
        seen = ops.selective_scan(x, self.time(dt), self.a, b, c, self.d, state, batch, self.steps)
        return ops.gated_group_norm(seen.flatten(1), gate, None, 0.0, 1)

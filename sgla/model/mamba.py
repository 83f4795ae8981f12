"""Mamba 2 (arXiv 2405.21060): a state space model behind a short convolution, in the place of attention; and
the hybrids in which most layers of a Llama have it (Granite 4, Bamba)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.lora import added
from sgla.kernels.ops import StateLayer, TimeSteps
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build, Piece, gather, run
from sgla.layers.linear import RowLinear
from sgla.layers.mlp import GatedMLP, PlainMLP
from sgla.layers.moe import MoE
from sgla.model.llama import Llama
from sgla.model.mamba_spec import MambaSpec
from sgla.quant.weight import SourceTensor


class Mamba:
    """``[T, d] -> [T, H * P]`` of this rank's heads, which ``out`` brings back to the width. Ranks have heads
    with the groups that they read; one group is every rank's."""

    def __init__(self, build: Build, name: str, hidden: int, layer: MambaSpec, eps: float) -> None:
        self.layer, self.eps, self.shard = layer, eps, build.shard
        self.heads, self.groups = _split(build, layer)
        n, width = len(self.groups) * layer.size, layer.width
        self.inner = len(self.heads) * width
        self.widths = [self.inner, n, n]
        rows = layer.inner + layer.channels + layer.count
        pieces = self._pieces(layer.inner, self.inner)
        pieces.append(run(self.heads, width, 0, 0))
        pieces.append(run(self.heads, 1, rows - layer.count, 2 * self.inner + 2 * n))
        self.project = build.empty(2 * self.inner + 2 * n + len(self.heads), hidden, f"{name}.in_proj")
        taken = gather(build, self.project, f"{name}.in_proj", (rows, hidden), pieces)
        self.added = build.stack_of(hidden, [taken])
        self.bias = torch.zeros(self.project.n) if layer.bias else None
        if self.bias is not None:
            build.declare(f"{name}.in_proj.bias", (rows,), partial(take, self.bias, pieces))
        self._declare_conv(build, name)
        self.a = torch.zeros(len(self.heads))
        build.declare(f"{name}.A_log", (layer.count,), self._take_a)
        self.d = build.vector(f"{name}.D", layer.count, self.heads)
        dt_bias = build.vector(f"{name}.dt_bias", layer.count, self.heads)
        self.steps = TimeSteps(dt_bias, layer.least, layer.most)
        columns = range(self.heads.start * width, self.heads.stop * width)
        self.norm = build.vector(f"{name}.norm.weight", layer.inner, columns) if layer.norm else None
        self.out = RowLinear(build, f"{name}.out_proj", hidden, layer.inner, columns, layer.out_bias)
        parts = zip((self.inner, *self.widths, len(self.heads)), layer.factors)
        self.factors = torch.cat([torch.full((width,), factor) for width, factor in parts])

    def _pieces(self, first: int, at: int) -> list[Piece]:
        """This rank's x, B and C of all, which are stored from row ``first`` on: from ``at`` on."""
        layer, n = self.layer, len(self.groups) * self.layer.size
        behind = first + layer.inner
        return [
            run(self.heads, layer.width, first, at),
            run(self.groups, layer.size, behind, at + self.inner),
            run(self.groups, layer.size, behind + layer.groups * layer.size, at + self.inner + n),
        ]

    def _declare_conv(self, build: Build, name: str) -> None:
        layer, pieces = self.layer, self._pieces(0, 0)
        self.conv = torch.zeros(sum(self.widths), layer.taps)
        self.conv_bias = torch.zeros(sum(self.widths)) if layer.conv_bias else None
        shape = layer.channels, 1, layer.taps
        build.declare(f"{name}.conv1d.weight", shape, partial(take, self.conv[:, None], pieces))
        if self.conv_bias is not None:
            build.declare(f"{name}.conv1d.bias", shape[:1], partial(take, self.conv_bias, pieces))

    def _take_a(self, source: SourceTensor) -> None:
        self.a.copy_(-source.dense(self.heads).float().exp())

    def __call__(self, x: Tensor, batch: ForwardBatch, state: StateLayer) -> Tensor:
        layer = self.layer
        made = ops.linear(x, self.project, self.bias, added(x, *self.added))
        if layer.factors != (1.0,) * 5:
            made = (made * self.factors).to(x.dtype)
        z, xbc, dt = made.split([self.inner, sum(self.widths), len(self.heads)], dim=1)
        xbc = ops.causal_conv(xbc, self.conv, self.conv_bias, state, batch)
        x, b, c = xbc.split(self.widths, dim=1)
        x = x.unflatten(1, (-1, layer.width))
        b, c = (y.unflatten(1, (-1, layer.size)) for y in (b, c))
        seen = ops.selective_scan(x, dt, self.a, b, c, self.d, state, batch, self.steps)
        return self._gated(seen.flatten(1), z)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """With the gate z, and the norm of each group."""
        groups = len(self.groups)
        if self.norm is None:
            return ops.gated_group_norm(y, z, None, self.eps, groups)
        if groups < self.layer.groups or self.shard.size == 1:
            if self.layer.norm == "behind":
                return ops.gated_group_norm(y, z, self.norm, self.eps, groups)
            y, z = (x.unflatten(1, (groups, -1)) for x in (y, z))
            return ops.gated_rms_norm(y, z, self.norm.unflatten(0, (groups, -1)), self.eps).flatten(1)
        gate = F.silu(z.float())
        f = y * gate if self.layer.norm == "behind" else y.float()
        squares = ops.all_reduce(f.square().sum(1, keepdim=True), self.shard)
        f = f * torch.rsqrt(squares / self.layer.inner + self.eps) * self.norm
        return (f if self.layer.norm == "behind" else f * gate).to(y.dtype)


def _split(build: Build, layer: MambaSpec) -> tuple[range, range]:
    """This rank's heads and groups. Raises ConfigError."""
    ranks = build.shard.size
    if layer.count % ranks or (layer.groups % ranks and layer.groups > 1):
        raise ConfigError(
            f"{layer.count} heads of a Mamba in {layer.groups} groups cannot be split over {ranks} ranks",
            param="tp",
        )
    groups = build.shard.range(layer.groups) if layer.groups > 1 else range(1)
    return build.shard.range(layer.count), groups


def take(target: Tensor, pieces: list[Piece], source: SourceTensor) -> None:
    for rows, at in pieces:
        target[at : at + len(rows)] = source.dense(rows)


class Hybrid(Llama):
    """Bamba, and what hybrids have in common."""

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, MambaSpec):
            name = name.replace(".self_attn", ".mamba")
            return Mamba(build, name, self.spec.hidden, layer, self.spec.eps)
        return super().attention(build, name, index)


class GraniteHybrid(Hybrid):
    """Granite 4, in which the MLP that all tokens share may stand without experts."""

    def mlp(self, build: Build, name: str, index: int) -> GatedMLP | PlainMLP | MoE:
        if self.spec.moe is None:
            name = f"{name}.shared_experts"
        return super().mlp(build, name, index)

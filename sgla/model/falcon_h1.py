"""Falcon-H1 (arXiv 2507.22448): attention and a Mamba 2 beside each other in every layer, and factors."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import BothLayer
from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.model.base import Decoder
from sgla.model.mamba import Mamba
from sgla.model.mamba_spec import BesideSpec


class Block:
    def __init__(self, model: FalconH1, build: Build, name: str, index: int) -> None:
        spec, layer = model.spec, model.spec.attention[index]
        assert isinstance(layer, BesideSpec)
        self.factors = layer.factors
        self.norm = model.norm_of(build, f"{name}.input_layernorm")
        self.mamba = Mamba(build, f"{name}.mamba", spec.hidden, layer.mamba, spec.eps)
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.mlp_norm = model.norm_of(build, f"{name}.post_attention_layernorm")
        mlp = f"{name}.mlp"
        self.mlp = ScaledMLP(build, mlp, spec.hidden, spec.intermediate, "silu", spec.mlp_bias)
        self.mlp.scale(*layer.factors.mlp)

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: BothLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.norm.add(x, h)
        (mamba_in, mamba_out), (attention_in, attention_out), _ = self.factors
        scanned = self.mamba(_times(x, mamba_in), batch, kv.state)
        seen = self.attention(_times(x, attention_in), batch, kv.tokens)
        if rows is not None:
            scanned, seen, h = (ops.gather(y, rows) for y in (scanned, seen, h))
        out = self.attention.out
        mixed = _times(self.mamba.out.part(scanned), mamba_out) + _times(out.part(seen), attention_out)
        x, h = self.mlp_norm.add(out.total(mixed), h)
        return self.mlp(x), h


class ScaledMLP(GatedMLP):
    """Whose gate is multiplied before the activation, as is what it makes."""

    def scale(self, gate: float, out: float) -> None:
        self.gate, self.factor = gate, out
        width = self.gate_up.weight.n // 2
        self.factors = torch.cat([torch.full((width,), gate), torch.ones(width)])

    def part(self, x: Tensor) -> Tensor:
        made = self.gate_up(x)
        if self.gate != 1.0:
            made = (made * self.factors).to(x.dtype)
        return _times(self.down.part(ops.act_mul(made, self.activation)), self.factor)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


class FalconH1(Decoder):
    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)

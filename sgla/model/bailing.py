"""Ling 3 (HF ``BailingHybrid``): Kimi's delta attention with gates of full rank and a decay that has a bound,
and in some layers latent attention whose heads have gates."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.model.kimi import KimiDelta
from sgla.model.kimi_spec import KimiDeltaSpec
from sgla.model.latent import Latent, LatentAttention
from sgla.model.latent_spec import LatentSpec


class BailingDelta(KimiDelta):
    def _rates_shape(self) -> tuple[int, ...]:
        return (self.layer.count,)

    def _make_gates(self, build: Build, name: str, hidden: int, own: range, rows: range) -> None:
        width = self.layer.count * self.layer.dim
        parts = [(f"{name}.{part}_proj", width, rows) for part in "fg"]
        self.gates = MergedColumnLinear(build, hidden, [*parts, (f"{name}.b_proj", self.layer.count, own)])
        self.widths = [len(rows), len(rows), len(own)]

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fading, gating, writing = self.gates(x).split(self.widths, dim=1)
        return fading, gating, writing

    def _decay(self, fading: Tensor) -> Tensor:
        if not self.layer.least:
            return super()._decay(fading)
        f = (fading.float() + self.dt_bias).unflatten(1, (-1, self.layer.dim))
        return self.layer.least * torch.sigmoid(-(self.rates * f))


class GatedLatent(LatentAttention):
    """What comes of each head is multiplied by the sigmoid of one value made of the input."""

    def __init__(
        self, build: Build, name: str, hidden: int, layer: LatentSpec, cos_sin: Tensor, interleaved: bool
    ) -> None:
        super().__init__(build, name, hidden, layer, cos_sin, interleaved)
        own = build.shard.range(layer.heads)
        self.gate = MergedColumnLinear(build, hidden, [(f"{name}.g_proj", layer.heads, own)])

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        seen = super().__call__(x, batch, kv).unflatten(1, (-1, self.layer.value))
        return (seen * self.gate(x).float().sigmoid()[..., None]).to(x.dtype).flatten(1)


class Bailing(Latent):
    """The layers that guess further tokens are left out."""

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        spec, layer = self.spec, self.spec.attention[index]
        if isinstance(layer, KimiDeltaSpec):
            return BailingDelta(build, name, spec.hidden, layer, spec.eps)
        assert isinstance(layer, LatentSpec)
        cos_sin = self.angles(layer.rope, layer.rotated)
        return GatedLatent(build, name, spec.hidden, layer, cos_sin, spec.interleaved)

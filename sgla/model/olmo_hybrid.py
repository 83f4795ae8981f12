"""OLMo's hybrid: layers with a gated delta net, whose sub-blocks read norms, and in every fourth layer
attention as in OLMo 2, whose sub-blocks' outputs are normed."""

from __future__ import annotations

from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.model import llama, olmo
from sgla.model.base import Block
from sgla.model.delta import DeltaNet
from sgla.model.delta_spec import DeltaSpec

EPS = 1e-5  # of the norm behind a delta net


class OlmoHybrid(llama.Llama):
    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        if isinstance(self.spec.attention[index], DeltaSpec):
            return llama.Block(self, build, name, index)
        return olmo.Block(self, build, name, index)

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if not isinstance(layer, DeltaSpec):
            return super().attention(build, name, index)
        name = name.replace(".self_attn", ".linear_attn")
        return DeltaNet(build, name, self.spec.hidden, layer, EPS, "each")

"""LFM3 (HF ``Lfm3``): LFM2's short convolutions, attention with a gate for each head and in some layers a
window, and norms around each sub-block."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import LayerAttention, SelfAttention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, split_heads
from sgla.layers.spec import AttentionSpec
from sgla.model.conv_spec import ConvSpec
from sgla.model.gemma import Gemma3
from sgla.model.lfm2 import ShortConv


class GatedAttention(SelfAttention):
    """What each head sees is multiplied by the sigmoid of a number that x gives."""

    def __init__(
        self, build: Build, name: str, hidden: int, layer: AttentionSpec, cos_sin: Tensor, **more: Any
    ) -> None:
        super().__init__(build, name, hidden, layer, cos_sin, **more)
        own, _ = split_heads(layer.heads, layer.kv_heads, build.shard)
        self.gate = MergedColumnLinear(build, hidden, [(f"{name}.gate_proj", layer.heads, own)])

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        seen = super().__call__(x, batch, kv).unflatten(1, (-1, self.layer.v_dim))
        return (seen * self.gate(x).float().sigmoid()[..., None]).to(x.dtype).flatten(1)


class Lfm3(Gemma3):
    norms = ("input_layernorm", "post_operator_norm", "post_attention_layernorm", "post_ffn_norm")

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, ConvSpec):
            return ShortConv(build, name.replace(".self_attn", ".conv"), self.spec.hidden, layer)
        return self.self_attention(build, name, index, GatedAttention)

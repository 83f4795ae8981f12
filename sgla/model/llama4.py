"""Llama 4, text: most layers see the tokens of their own chunk alone and rotate; the others see all, do not
rotate, and have queries that grow with their positions. What an expert reads is multiplied by its score."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sgla.kernels import ops
from sgla.layers.attention import LayerAttention, SelfAttention
from sgla.layers.build import Build
from sgla.layers.moe import MoE
from sgla.model.llama import Llama


class Mixture(MoE):
    """Each token has one expert."""

    def chosen(self, x: Tensor, routed: Tensor | None, fixed: Tensor | None = None) -> Tensor:
        score = ops.linear(x, self.router).float().amax(-1, keepdim=True).sigmoid()
        return super().chosen((x * score).to(x.dtype), x)


class Llama4(Llama):
    mixture = Mixture
    ignored = ("vision_model.", "multi_modal_projector.")

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        made = self.self_attention(build, name, index, SelfAttention)
        if layer.window >= self.positions:
            made.layer = replace(layer, window=0, chunked=False)
        if layer.rope is None:
            made.q_norm = made.k_norm = None
        return made

"""Jamba (arXiv 2403.19887): Mamba 1 in the place of attention in most layers, and mixtures in every other
one."""

from __future__ import annotations

from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.model.first_mamba import FirstMamba
from sgla.model.llama import Llama
from sgla.model.mamba_spec import FirstMambaSpec


class Jamba(Llama):
    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, FirstMambaSpec):
            name = name.replace(".self_attn", ".mamba")
            return FirstMamba(build, name, self.spec.hidden, layer)
        return super().attention(build, name, index)

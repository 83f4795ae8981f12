"""LFM2 (arXiv 2511.23404): short convolutions between two gates, and in some layers attention."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import StateLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build, given
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.model.conv_spec import ConvSpec
from sgla.model.llama import Llama
from sgla.quant.weight import SourceTensor


class ShortConv:
    """``[T, d] -> [T, channels]`` of this rank, which ``out`` brings back to the width."""

    def __init__(self, build: Build, name: str, hidden: int, layer: ConvSpec) -> None:
        own, channels = build.shard.range(layer.channels), layer.channels
        parts = [(f"{name}.{part}", channels, own) for part in ("before", "behind", "x")]
        self.inputs = MergedColumnLinear(build, hidden, parts, layer.bias, f"{name}.in_proj")
        self.weight = torch.zeros(len(own), layer.taps)
        self.bias = build.vector(f"{name}.conv.bias", channels, own) if layer.bias else None

        def take(source: SourceTensor) -> None:
            self.weight.copy_(source.dense(own)[:, 0])

        def give(wanted: range) -> Tensor:
            return given(self.weight[:, None], wanted, own)

        build.declare(f"{name}.conv.weight", (channels, 1, layer.taps), take, give=give)
        self.out = RowLinear(build, f"{name}.out_proj", hidden, channels, own, layer.bias)

    def __call__(self, x: Tensor, batch: ForwardBatch, state: StateLayer) -> Tensor:
        before, behind, x = self.inputs(x).chunk(3, dim=1)
        return behind * ops.causal_conv(before * x, self.weight, self.bias, state, batch, "none")


class Lfm2(Llama):
    """Also that of LFM2-VL, whose tower is left out."""

    ignored = ("model.vision_tower.", "model.multi_modal_projector.")

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, ConvSpec):
            return ShortConv(build, name.replace(".self_attn", ".conv"), self.spec.hidden, layer)
        return super().attention(build, name, index)

"""DiffusionGemma: a Gemma 4 with experts that reads text token by token, and writes it in blocks. A block
(the canvas) begins as noise; all of its tokens see each other and the text before, and are predicted together
again and again, each time with what was predicted the time before (self-conditioning, arXiv 2208.04202)."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.model.gemma4 import Block, Gemma4
from sgla.model.spec import ModelSpec

READS = "model.encoder.language_model"  # where files have what is not the same in both ways


class TwoWayBlock(Block):
    """Its output has another scale in a canvas than in text that is read."""

    def __init__(self, model: Gemma4, build: Build, name: str, index: int) -> None:
        super().__init__(model, build, name, index)
        self.reading = build.vector(f"{READS}.layers.{index}.layer_scalar", 1)

    def scale_of(self, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        if batch.canvas is None:
            return self.reading
        scale = self.reading.repeat(batch.tokens).index_copy(
            0, batch.canvas.tokens, self.scale.expand(len(batch.canvas.tokens))
        )
        return (scale if rows is None else scale[rows.long()])[:, None]


class SelfConditioning:
    """Embeddings of a canvas ``[M, d]`` and what was predicted for it before ``[M, d]`` -> ``[M, d]``."""

    def __init__(self, model: Gemma4, build: Build, name: str) -> None:
        spec = model.spec
        assert spec.activation == "gelu_tanh" or spec.activation == "silu"
        self.norm = model.norm_of(build, f"{name}.pre_norm")
        self.mlp = GatedMLP(build, name, spec.hidden, spec.intermediate, spec.activation)
        self.ones, self.eps = torch.ones(spec.hidden), spec.eps

    def __call__(self, x: Tensor, predicted: Tensor) -> Tensor:
        return ops.rms_norm(x + self.mlp(self.norm(predicted)), self.ones, self.eps)


class DiffusionGemma(Gemma4):
    ignored = (*Gemma4.ignored, "model.encoder.")

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        self.conditioning = SelfConditioning(self, build, "model.self_conditioning")

    def block(self, build: Build, name: str, index: int) -> Block:
        return TwoWayBlock(self, build, name, index)

    def embedded(self, batch: ForwardBatch) -> Tensor:
        x = super().embedded(batch)
        if (canvas := batch.canvas) is None:
            return x
        made = self.conditioning(x[canvas.tokens], canvas.predicted.to(x.dtype))
        return x.index_copy(0, canvas.tokens, made.to(x.dtype))

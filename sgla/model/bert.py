"""BERT (arXiv 1810.04805), RoBERTa (1907.11692), XLM-RoBERTa (1911.02116) and DistilBERT (1910.01108).

One post-norm encoder: attention in both directions, absolute positions, token types. The families differ by names, by the
first position and by the classification head (``heads.py``). Computes in float32 with torch operations; rows of equal length
lie together, so that attention needs neither padding nor a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import ops
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.vocab import VocabEmbedding
from sgla.model.encoder import EncoderSpec
from sgla.model.heads import activate, matrix


class Span(NamedTuple):
    """``rows`` sequences of ``length`` tokens each, one behind the other from token ``start`` on."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.length

    def of(self, x: Tensor) -> Tensor:
        """The span's part of x ``[T, n]`` as ``[rows, length, n]``."""
        return x[self.start : self.end].view(self.rows, self.length, -1)


class EncoderBatch(NamedTuple):
    """int64 ``[T]`` each; ``positions`` count from 0 in each sequence, ``types`` are 0 or 1."""

    ids: Tensor
    positions: Tensor
    types: Tensor
    spans: list[Span]


class LayerNorm:
    def __init__(self, build: Build, name: str, size: int, eps: float) -> None:
        self.weight = build.vector(f"{name}.weight", size)
        self.bias = build.vector(f"{name}.bias", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Layer:
    def __init__(self, build: Build, name: str, spec: EncoderSpec) -> None:
        d, f = spec.hidden, spec.intermediate
        parts = [(f"{name}.attention.self.{which}", d, range(d)) for which in ("query", "key", "value")]
        self.qkv = MergedColumnLinear(build, d, parts, bias=True)
        self.out = _linear(build, f"{name}.attention.output.dense", d, d)
        self.attention_norm = LayerNorm(build, f"{name}.attention.output.LayerNorm", d, spec.eps)
        self.up = _linear(build, f"{name}.intermediate.dense", d, f)
        self.down = _linear(build, f"{name}.output.dense", f, d)
        self.norm = LayerNorm(build, f"{name}.output.LayerNorm", d, spec.eps)
        self.heads, self.activation = spec.heads, spec.activation

    def __call__(self, x: Tensor, spans: list[Span]) -> Tensor:
        x = self.attention_norm(self.out(self._attend(self.qkv(x), spans)).add_(x))
        return self.norm(self.down(activate(self.up(x), self.activation)).add_(x))

    def _attend(self, qkv: Tensor, spans: list[Span]) -> Tensor:
        """``[T, 3 d] -> [T, d]``."""
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
        for span in spans:
            q, k, v = span.of(qkv).view(span.rows, span.length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            span.of(out).copy_(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Encoder:
    """``forward``: final hidden states ``[T, d]``."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        self.spec = spec
        self.words = VocabEmbedding(build, "embeddings.word_embeddings", spec.vocab, spec.hidden)
        self.positions = matrix(build, "embeddings.position_embeddings.weight", spec.positions, spec.hidden)
        self.types = (
            matrix(build, "embeddings.token_type_embeddings.weight", spec.types, spec.hidden)
            if spec.types
            else None
        )
        self.norm = LayerNorm(build, "embeddings.LayerNorm", spec.hidden, spec.eps)
        self.layers = [Layer(build, f"encoder.layer.{i}", spec) for i in range(spec.layers)]

    def forward(self, batch: EncoderBatch) -> Tensor:
        x = (
            ops.embedding(batch.ids, self.words.weight).float()
            + self.positions[batch.positions + self.spec.offset]
        )
        if self.types is not None:
            x += self.types[batch.types.clamp_max(len(self.types) - 1)]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, batch.spans)
        return x


def _linear(build: Build, name: str, inputs: int, outputs: int) -> MergedColumnLinear:
    return MergedColumnLinear(build, inputs, [(name, outputs, range(outputs))], bias=True)

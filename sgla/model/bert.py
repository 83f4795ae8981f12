"""BERT (arXiv 1810.04805), RoBERTa (1907.11692), XLM-RoBERTa (1911.02116) and DistilBERT (1910.01108).

One post-norm encoder: attention in both directions, absolute positions, token types. The families differ by
names, by the first position and by the classification head (``heads.py``).
"""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.norm import LayerNorm
from sgla.layers.vocab import VocabEmbedding
from sgla.model.encoder import EncoderSpec
from sgla.model.heads import matrix


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
        self.heads, self.scale = spec.heads, (d // spec.heads) ** -0.5
        self.activation = spec.activation

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        a = ops.self_attention(self.qkv(x), batch, self.heads, self.scale)
        x, _ = self.attention_norm.add(self.out(a), x)
        return self.norm.add(self.down(ops.activate(self.up(x), self.activation)), x)[0]


class Encoder:
    """A step: ``place``, then ``forward`` or a program recorded of it.
    A batch's KV places and pages are not looked at."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        self.spec = spec
        self.words = VocabEmbedding(build, "embeddings.word_embeddings", spec.vocab, spec.hidden)
        self.positions = matrix(build, "embeddings.position_embeddings.weight", spec.positions, spec.hidden)
        self.types: Tensor | None = None
        if spec.types:
            self.types = matrix(build, "embeddings.token_type_embeddings.weight", spec.types, spec.hidden)
        self.norm = LayerNorm(build, "embeddings.LayerNorm", spec.hidden, spec.eps)
        self.layers = [Layer(build, f"encoder.layer.{i}", spec) for i in range(spec.layers)]
        self._places: Tensor | None = None

    def place(self, positions: Tensor, types: Tensor) -> None:
        """Tell the next step where its tokens stand and of which type (0 or 1) they are; int64 ``[T]``."""
        self._places = self.positions[positions + self.spec.offset]
        if self.types is not None:
            self._places += self.types[types.clamp_max(len(self.types) - 1)]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states ``[T, d]``."""
        x: Tensor = self.norm(ops.inplace(self._add_places, self.words(batch.ids)))
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def _add_places(self, x: Tensor) -> None:
        assert self._places is not None
        x += self._places


def _linear(build: Build, name: str, inputs: int, outputs: int) -> MergedColumnLinear:
    return MergedColumnLinear(build, inputs, [(name, outputs, range(outputs))], bias=True)

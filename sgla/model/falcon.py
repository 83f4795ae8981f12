"""Falcon (arXiv 2311.16867), BLOOM (arXiv 2211.05100) and MPT: decoders with layer norms whose scores may
rise with places. A block of Falcon has attention and MLP side by side, behind one norm or one for each, or
one behind the other."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.layers.attention import LayerAttention, SelfAttention
from sgla.layers.build import Build
from sgla.model import cohere, llama, neox
from sgla.model.base import Block
from sgla.model.spec import ModelSpec


class Falcon(neox.Neox):
    plain_names = ("up_proj", "down_proj")

    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        if self.spec.one_norm:
            return cohere.Block(self, build, name, index)
        return super().block(build, name, index)


class Bloom(llama.Llama):
    """Embeddings are normed."""

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        self.embedding_norm = self.norm_of(build, "model.embed_norm") if spec.first else None

    def embedded(self, batch: ForwardBatch) -> Tensor:
        x = super().embedded(batch)
        return x if self.embedding_norm is None else self.embedding_norm(x)


class Clipped(SelfAttention):
    """What queries, keys and values are made of is no larger than ``clip``."""

    clip = 0.0

    def projected(self, x: Tensor) -> Tensor:
        return super().projected(x).clamp(-self.clip, self.clip)


class Mpt(llama.Llama):
    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        if not self.spec.qkv_clip:
            return super().attention(build, name, index)
        made = self.self_attention(build, name, index, Clipped)
        assert isinstance(made, Clipped)
        made.clip = self.spec.qkv_clip
        return made

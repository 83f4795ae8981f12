"""Mistral 4: DeepSeek's latent attention (arXiv 2405.04434) with queries that grow with their positions."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.model.latent import Latent, LatentAttention
from sgla.model.latent_spec import LatentSpec
from sgla.model.llama import Mistral


class GrowingAttention(LatentAttention):
    """``growth`` float32 ``[positions]`` multiplies q."""

    growth: Tensor

    def see(self, q: Tensor, x: Tensor, latent: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        q = (q * self.growth[batch.positions.long()][:, None]).to(q.dtype)
        return super().see(q, x, latent, batch, kv)


class Mistral4(Latent):
    ignored = Mistral.ignored

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        spec, layer = self.spec, self.spec.attention[index]
        assert isinstance(layer, LatentSpec)
        assert layer.growth is not None
        cos_sin = self.angles(layer.rope, layer.rotated)
        made = GrowingAttention(build, name, spec.hidden, layer, cos_sin, spec.interleaved)
        made.growth = self._growths(*layer.growth)
        return made

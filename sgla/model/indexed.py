"""DeepSeek V3.2 (DSA, arXiv 2512.02556) and GLM-5: latent attention to the tokens that an indexer picks. As
long as a context is no longer than they are many, that is latent attention to all."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.kernels.picking import pick, picked_attention
from sgla.layers.attention import neox_order
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.norm import LayerNorm
from sgla.model.indexed_spec import IndexedSpec
from sgla.model.latent import LatentAttention
from sgla.model.llama import Llama
from sgla.model.spec import ModelSpec


class Indexer:
    """Picks tokens: x ``[T, d]`` and the queries' latent -> int32 ``[T, most]``. Each rank has all of it."""

    def __init__(self, model: Indexed, build: Build, name: str, layer: IndexedSpec) -> None:
        hidden, width = model.spec.hidden, layer.scorers * layer.score_dim
        self.q = MergedColumnLinear(build, layer.q_rank, [(f"{name}.wq_b", width, range(width))])
        self.k = MergedColumnLinear(build, hidden, [(f"{name}.wk", layer.score_dim, range(layer.score_dim))])
        weights = (f"{name}.weights_proj", layer.scorers, range(layer.scorers))
        self.weights = MergedColumnLinear(build, hidden, [weights])
        self.norm = LayerNorm(build, f"{name}.k_norm", layer.score_dim, layer.eps)
        self.order = neox_order(layer.rotated, layer.score_dim) if layer.pairs else None
        if layer.behind:
            self.order = torch.arange(layer.score_dim, device="cpu").roll(layer.rotated)
        self.cos_sin, self.layer = model.angles(layer.rope, layer.rotated), layer
        self.scale = (layer.score_dim * layer.scorers) ** -0.5

    def __call__(self, x: Tensor, latent: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        q = self.q(latent).unflatten(1, (-1, self.layer.score_dim))
        heads = torch.cat([q, self.norm(self.k(x))[:, None]], 1)
        if self.order is not None:
            heads = heads[..., self.order.to(heads.device)]
        heads = ops.rotate(heads, batch.positions, self.cos_sin)
        weights = self.weights(x).float() * self.scale
        return pick(heads[:, :-1], heads[:, -1], weights, kv, batch, self.layer.most)


class IndexedAttention(LatentAttention):
    """``before``: the attention of the layer before, whose tokens this one reads if it picks none."""

    def __init__(
        self, model: Indexed, build: Build, name: str, layer: IndexedSpec, before: IndexedAttention | None
    ) -> None:
        spec = model.spec
        angles = model.angles(layer.rope, layer.rotated)
        super().__init__(build, name, spec.hidden, layer, angles, spec.interleaved)
        self.before = before
        self.indexer = Indexer(model, build, f"{name}.indexer", layer) if layer.picks else None
        self.sinks: Tensor | None = None
        if layer.sinks:
            self.sinks = build.vector(f"{name}.sinks", layer.heads, build.shard.range(layer.heads))
        self.picked: Tensor | None = None  # of the step under way

    def see(self, q: Tensor, x: Tensor, latent: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        if self.indexer is not None:
            self.picked = self.indexer(x, latent, batch, kv)
        else:
            assert self.before is not None
            self.picked = self.before.picked
        assert self.picked is not None
        own = kv.latent(self.layer.v_dim)
        return picked_attention(q, own, batch, self.layer.scale, self.picked, self.sinks)


class Indexed(Llama):
    kind: ClassVar[type[IndexedAttention]] = IndexedAttention

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        self.last: IndexedAttention | None = None
        super().__init__(spec, build, positions)
        if self.last is None:
            unread = (f"model.layers.{i}.self_attn.indexer." for i in range(spec.layers))
            self.ignored = (*self.ignored, *unread)

    def attention(self, build: Build, name: str, index: int) -> LatentAttention:
        layer = self.spec.attention[index]
        assert isinstance(layer, IndexedSpec)
        if self.positions <= layer.most and not layer.sinks:
            angles = self.angles(layer.rope, layer.rotated)
            return LatentAttention(build, name, self.spec.hidden, layer, angles, self.spec.interleaved)
        self.last = self.kind(self, build, name, layer, self.last)
        return self.last

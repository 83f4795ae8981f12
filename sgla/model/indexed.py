"""DeepSeek V3.2 (DSA, arXiv 2512.02556) and GLM-5: latent attention to the tokens that an indexer picks. As
long as a context is no longer than they are many, that is latent attention to all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.dispatch import op
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import neox_order
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.norm import LayerNorm
from sgla.model.indexed_spec import IndexedSpec
from sgla.model.latent import LatentAttention
from sgla.model.llama import Llama
from sgla.model.spec import ModelSpec

EPS = 1e-6  # of the index key's norm


class RowSpan(NamedTuple):
    """A row's share of a step: its tokens ``start`` to ``end``, its ``pages``, and how many tokens it has."""

    start: int
    end: int
    pages: Tensor
    length: int


def parts(batch: ForwardBatch, kv: KVLayer) -> list[RowSpan]:
    starts, lengths = batch.q_start.tolist(), batch.kv_len.tolist()
    table, size = batch.pages(kv.group), kv.k.shape[1]
    return [
        RowSpan(starts[r], starts[r + 1], table[slot, : -(-lengths[r] // size)].long(), lengths[r])
        for r, slot in enumerate(batch.slots[: batch.rows].tolist())
    ]


def _picks(q: Tensor, key: Tensor, weights: Tensor, kv: KVLayer, batch: ForwardBatch, most: int) -> Tensor:
    return torch.empty(q.shape[0], most, dtype=torch.int32, device=q.device)


@op(like=_picks)
def pick(q: Tensor, key: Tensor, weights: Tensor, kv: KVLayer, batch: ForwardBatch, most: int) -> Tensor:
    """The tokens of its row that each token is to read: int32 ``[T, most]``, -1 where there are fewer. q
    ``[T, H, i]``, key ``[T, i]``, which goes to the pages of v, weights float32 ``[T, H]``: a token's score
    is the sum of each head's positive products, weighted; of equals the earliest counts, however a prompt is
    cut."""
    kv.put_values(key[:, None], ops.places(kv, batch.out_loc))
    found = torch.full((q.shape[0], most), -1, dtype=torch.int32, device=q.device)
    for start, end, pages, length in parts(batch, kv):
        keys = kv.values(pages).flatten(0, 2)[:length]
        products = torch.einsum("thi,ni->thn", q[start:end].float(), keys).relu()
        scores = torch.einsum("thn,th->tn", products, weights[start:end])
        later = torch.arange(length, device=q.device) > batch.positions[start:end, None]
        ranked = scores.masked_fill(later, float("-inf")).sort(stable=True, dim=-1, descending=True)
        chosen = torch.where(ranked.values == float("-inf"), -1, ranked.indices)[:, :most]
        found[start:end, : chosen.shape[1]] = chosen.to(torch.int32)
    return found


def _seen(q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float, picked: Tensor) -> Tensor:
    return ops.outcome(q, kv)


@op(like=_seen)
def picked_attention(q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float, picked: Tensor) -> Tensor:
    """Attention of all heads to one key of each of the tokens ``picked`` int32 ``[T, most]``: q ``[T, Hq *
    hd]`` -> ``[T, Hq * vd]``."""
    out, dim = ops.outcome(q, kv), kv.k.shape[3]
    for start, end, pages, length in parts(batch, kv):
        keys, values = (x.flatten(0, 2)[:length] for x in (kv.keys(pages), kv.values(pages)))
        chosen = picked[start:end].long()
        seen = torch.zeros(end - start, length + 1, dtype=torch.bool, device=q.device)
        seen = seen.scatter(1, torch.where(chosen < 0, length, chosen), True)[:, None, :length]
        scores = torch.einsum("thd,nd->thn", q[start:end].unflatten(1, (-1, dim)).float(), keys) * scale
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        odd = ~values.isfinite().all(-1)  # as a wrong guess may be, and 0 times that is no number either
        result = torch.einsum("thn,nv->thv", shares, values.masked_fill(odd[:, None], 0.0))
        result = result.masked_fill((seen & odd).any(-1, keepdim=True), torch.nan)
        out[start:end] = result.flatten(1).to(q.dtype)
    return out


class Indexer:
    """Picks tokens: x ``[T, d]`` and the queries' latent -> int32 ``[T, most]``. Each rank has all of it."""

    def __init__(self, model: Indexed, build: Build, name: str, layer: IndexedSpec) -> None:
        hidden, width = model.spec.hidden, layer.scorers * layer.score_dim
        self.q = MergedColumnLinear(build, layer.q_rank, [(f"{name}.wq_b", width, range(width))])
        self.k = MergedColumnLinear(build, hidden, [(f"{name}.wk", layer.score_dim, range(layer.score_dim))])
        weights = (f"{name}.weights_proj", layer.scorers, range(layer.scorers))
        self.weights = MergedColumnLinear(build, hidden, [weights])
        self.norm = LayerNorm(build, f"{name}.k_norm", layer.score_dim, EPS)
        self.order = neox_order(layer.rotated, layer.score_dim) if layer.pairs else None
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
        super().__init__(build, name, spec.hidden, layer, model.angles(layer.rope, layer.rotated), True)
        self.before = before
        self.indexer = Indexer(model, build, f"{name}.indexer", layer) if layer.picks else None
        self.picked: Tensor | None = None  # of the step under way

    def see(self, q: Tensor, x: Tensor, latent: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        if self.indexer is not None:
            self.picked = self.indexer(x, latent, batch, kv)
        else:
            assert self.before is not None
            self.picked = self.before.picked
        assert self.picked is not None
        return picked_attention(q, kv.latent(self.layer.v_dim), batch, self.layer.scale, self.picked)


class Indexed(Llama):
    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        self.last: IndexedAttention | None = None
        super().__init__(spec, build, positions)
        if self.last is None:
            unread = (f"model.layers.{i}.self_attn.indexer." for i in range(spec.layers))
            self.ignored = (*self.ignored, *unread)

    def attention(self, build: Build, name: str, index: int) -> LatentAttention:
        layer = self.spec.attention[index]
        assert isinstance(layer, IndexedSpec)
        if self.positions <= layer.most:
            angles = self.angles(layer.rope, layer.rotated)
            return LatentAttention(build, name, self.spec.hidden, layer, angles, self.spec.interleaved)
        self.last = IndexedAttention(self, build, name, layer, self.last)
        return self.last

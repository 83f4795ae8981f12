"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in the absorbed form: what makes keys and
values of the latent is multiplied into the queries and into what the heads have seen. All heads then read one
key of the pages, of which the first values are the value, too."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import LayerAttention, neox_order
from sgla.layers.build import Build, given
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.layers.norm import RMSNorm
from sgla.model.latent_spec import LatentSpec
from sgla.model.llama import Llama
from sgla.quant.weight import SourceTensor

EPS = 1e-6  # of the latents' norms, whatever the model's is


class LatentAttention:
    """``[T, d] -> [T, Hq * value]``, which ``out`` brings back to the width. Ranks split the heads; each has
    the whole latent. ``interleaved``: as in ``SelfAttention``. In the paper's letters ``down`` is W^DQ, or
    W^Q if queries have no latent, and W^DKV with W^KR, ``q_up`` is W^UQ with W^QR, ``k_up`` W^UK, ``v_up``
    W^UV, ``out`` W^O."""

    def __init__(
        self, build: Build, name: str, hidden: int, layer: LatentSpec, cos_sin: Tensor, interleaved: bool
    ) -> None:
        if layer.heads < build.shard.size:
            raise ConfigError(
                f"{layer.heads} heads cannot be split over {build.shard.size} ranks", param="tp"
            )
        own, width = build.shard.range(layer.heads), layer.nope + layer.rotated + layer.gates

        def behind(still: int, more: int = 0) -> tuple[Tensor | None, ...]:
            """The order of rows of which the first ``still`` are not rotated, nor ``more`` behind."""
            order = neox_order(layer.rotated, layer.rotated + more)
            return (torch.cat([torch.arange(still, device="cpu"), still + order]),) if interleaved else ()

        rows = range(own.start * width, own.stop * width)
        latent = (f"{name}.kv_a_proj_with_mqa", layer.head_dim, range(layer.head_dim))
        queries = (f"{name}.{'q_b_proj' if layer.q_rank else 'q_proj'}", layer.heads * width, rows)
        self.q_norm: RMSNorm | None = None
        self.q_up: MergedColumnLinear | None = None
        first, orders = queries, behind(layer.nope, layer.gates) + behind(layer.v_dim)
        if layer.q_rank:
            self.q_norm = RMSNorm(build, f"{name}.q_a_layernorm", layer.q_rank, EPS)
            inputs = layer.q_rank * (2 if layer.gates else 1)
            self.q_up = MergedColumnLinear(build, inputs, [queries], orders=orders[:1])
            first, orders = (f"{name}.q_a_proj", layer.q_rank, range(layer.q_rank)), (None, *orders[1:])
        self.first = len(first[2])
        self.down = MergedColumnLinear(build, hidden, [first, latent], orders=orders)
        norm = f"{name}.kv_a_layernorm.weight"
        self.kv_norm = build.vector(norm, layer.v_dim, scale=layer.latent_scale)
        dtype = torch.float32 if build.plain == "f32" else torch.bfloat16
        self.k_up = torch.zeros(len(own), layer.nope, layer.v_dim, dtype=dtype)
        self.v_up = torch.zeros(len(own), layer.value, layer.v_dim, dtype=dtype)
        shape = layer.heads * (layer.nope + layer.value), layer.v_dim
        take, give = partial(self._take, own), partial(self._give, own)
        build.declare(f"{name}.kv_b_proj.weight", shape, take, give=give)
        columns = range(own.start * layer.value, own.stop * layer.value)
        self.out = RowLinear(build, f"{name}.o_proj", hidden, layer.heads * layer.value, columns)
        self.layer, self.cos_sin = layer, cos_sin

    def _take(self, own: range, source: SourceTensor) -> None:
        """Rows: of each head those that make its key, then those that make its value."""
        each = self.layer.nope + self.layer.value
        heads = source.dense(range(own.start * each, own.stop * each)).unflatten(0, (-1, each))
        self.k_up.copy_(heads[:, : self.layer.nope])
        self.v_up.copy_(heads[:, self.layer.nope :])

    def _give(self, own: range, wanted: range) -> Tensor:
        each = self.layer.nope + self.layer.value
        rows = torch.cat([self.k_up, self.v_up], 1).flatten(0, 1)
        return given(rows, wanted, range(own.start * each, own.stop * each))

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        down, narrow = self.down(x), x
        q, latent = down[:, : self.first], down[:, self.first :]
        if self.q_up is not None and self.q_norm is not None:
            narrow = self.q_norm(q if down.shape[1] % 8 == 0 else q.contiguous())
            q = self.q_up(torch.cat([narrow, q], 1) if self.layer.gates else narrow)
        gates = None
        if self.layer.gates:
            heads = q.unflatten(1, (self.k_up.shape[0], -1))
            q, gates = (part.flatten(1) for part in heads.split(self.layer.split, 2))
        q = ops.latent_queries(
            q,
            latent,
            self.k_up,
            self.kv_norm,
            EPS,
            batch.positions,
            self.cos_sin,
            kv,
            batch.out_loc,
        )
        seen = ops.latent_values(self.see(q, x, narrow, batch, kv), self.v_up)
        return seen if gates is None else ops.sigmoid_mul(seen, gates)

    def see(self, q: Tensor, x: Tensor, latent: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        """What the absorbed queries see. ``latent``: that of the queries, or x."""
        return ops.attention(q, kv.latent(self.layer.v_dim), batch, self.layer.scale)


class Latent(Llama):
    """MiniCPM 3 (arXiv 2404.06395), and the dense layers of DeepSeek-V2 and V3."""

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        assert isinstance(layer, LatentSpec)
        cos_sin = self.angles(layer.rope, layer.rotated)
        return LatentAttention(build, name, self.spec.hidden, layer, cos_sin, self.spec.interleaved)

"""MiniMax-01 and M1 (arXiv 2501.08313): lightning attention, whose states fade by a constant of each head,
and in some layers softmax attention; what a norm gives goes on as the residual stream, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, StateLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.layers.norm import SplitRMSNorms
from sgla.model.base import Decoder
from sgla.model.minimax_spec import LightningSpec, SoftmaxSpec
from sgla.model.spec import ModelSpec

EPS = 1e-6  # of the norm behind lightning attention


class Lightning:
    """``[T, d] -> [T, H * dim]`` of this rank's heads, which ``out`` brings back to the width: ``S = e^-f S +
    v k^T; o = S q``."""

    def __init__(self, build: Build, name: str, hidden: int, layer: LightningSpec) -> None:
        count, dim = layer.count, layer.dim
        if count % build.shard.size:
            raise ConfigError(
                f"{count} heads (num_attention_heads) cannot be split over {build.shard.size} ranks",
                param="tp",
            )
        own, width = build.shard.range(count), count * dim
        rows, joined = (range(own.start * n, own.stop * n) for n in (dim, 3 * dim))
        self.qkv = MergedColumnLinear(build, hidden, [(f"{name}.qkv_proj", 3 * width, joined)])
        self.gate = MergedColumnLinear(build, hidden, [(f"{name}.output_gate", width, rows)])
        self.norm = SplitRMSNorms(build, [(f"{name}.norm", width, rows, 1)], EPS)
        self.out = RowLinear(build, f"{name}.out_proj", hidden, width, rows)
        slopes = torch.arange(own.start + 1, own.stop + 1) * (-8 / count)
        self.fade, self.dim = -torch.exp2(slopes) * layer.fade, dim

    def __call__(self, x: Tensor, batch: ForwardBatch, state: StateLayer) -> Tensor:
        heads = F.silu(self.qkv(x)).unflatten(1, (-1, 3 * self.dim))
        q, k, v = (y.contiguous() for y in heads.split(self.dim, dim=2))
        seen = ops.selective_scan(
            v, torch.ones_like(v[:, :, 0], dtype=torch.float32), self.fade, k, q, None, state, batch
        )
        (seen,) = self.norm(seen.flatten(1))
        return ops.sigmoid_mul(seen, self.gate(x))


class Block:
    def __init__(self, model: MiniMax, build: Build, name: str, index: int) -> None:
        layer = model.spec.attention[index]
        assert isinstance(layer, SoftmaxSpec | LightningSpec)
        self.input_norm = model.norm_of(build, f"{name}.input_layernorm")
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.mlp_norm = model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp = model.mlp(build, f"{name}.mlp", index)
        self.attended, self.fed = layer.attended, layer.fed

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, _ = self.input_norm.add(x, h)
        seen = self.attention(x, batch, kv)
        if rows is not None:
            seen, x = ops.gather(seen, rows), ops.gather(x, rows)
        kept, added = self.attended
        x, _ = self.mlp_norm.add(self.attention.out(seen) * added, x * kept)
        kept, added = self.fed
        return self.mlp(x) * added, x * kept


class MiniMax(Decoder):
    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        parts = "slope_rate", "query_decay", "key_decay", "diagonal_decay"  # which follow from the shape
        names = (f"model.layers.{i}.self_attn.{part}" for i in range(spec.layers) for part in parts)
        self.ignored = (*self.ignored, *names)

    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, LightningSpec):
            return Lightning(build, name, self.spec.hidden, layer)
        return super().attention(build, name, index)

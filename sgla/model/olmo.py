"""OLMo 2 (arXiv 2501.00656) and EXAONE 4 (arXiv 2507.11407): each sub-block reads the residual stream as it
is, and its output is normalized."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.model.base import Decoder


class Block:
    def __init__(self, model: Decoder, build: Build, name: str, index: int) -> None:
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.attention_norm = model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp = model.mlp(build, f"{name}.mlp", index)
        self.mlp_norm = model.norm_of(build, f"{name}.post_feedforward_layernorm")

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        h = x if h is None else h + x
        x = self.attention(h, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        h = h + self.attention_norm(self.attention.out(x))
        return self.mlp_norm(self.mlp(h)), h


class Olmo2(Decoder):
    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)

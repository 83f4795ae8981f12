"""HyperCLOVA X (arXiv 2506.22403): Granite's multipliers, and norms around each sub-block (Peri-LN, arXiv
2502.02732)."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.model.base import Decoder


class Block:
    def __init__(self, model: Decoder, build: Build, name: str, index: int) -> None:
        self.before_attention = model.norm_of(build, f"{name}.input_layernorm")
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.after_attention = model.norm_of(build, f"{name}.post_norm1")
        self.before_mlp = model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp = model.mlp(build, f"{name}.mlp", index)
        self.after_mlp = model.norm_of(build, f"{name}.post_norm2")
        self.scale = model.spec.residual_scale

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.before_attention.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x = self.after_attention(self.attention.out(x))
        x, h = self.before_mlp.add(self._scaled(x), h)
        return self._scaled(self.after_mlp(self.mlp(x))), h

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class HyperClova(Decoder):
    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)

"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783):
pre-norm decoder, rotary positions, grouped queries, gated MLP.

Many others are this model with other values, which the table ``families`` has.
"""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.model.base import Decoder, scaled

_TOWER = ("vision_tower", "multi_modal_projector")


class Block:
    def __init__(self, model: Llama, build: Build, name: str, index: int) -> None:
        self.input_norm = model.norm_of(build, f"{name}.input_layernorm")
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.mlp_norm = model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp = model.mlp(build, f"{name}.mlp", index)
        self.scale = model.spec.residual_scale

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x, h = self.mlp_norm.add(scaled(self.attention.out(x), self.scale), h)
        return scaled(self.mlp(x), self.scale), h


class Llama(Decoder):
    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)


class Mistral(Llama):
    """Mistral (arXiv 2310.06825) and Ministral 3, whose vision towers are left out."""

    ignored = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in _TOWER)


class Starcoder2(Llama):
    """StarCoder 2 (arXiv 2402.19173): other names in MLPs without a gate."""

    plain_names = ("c_fc", "c_proj")


class Gpt2(Starcoder2):
    """GPT-2, whose positions have vectors (``Family.learned``)."""


class Opt(Llama):
    """OPT (arXiv 2205.01068), whose first two vectors of positions stand for padding."""

    plain_names = ("fc1", "fc2")
    unused_positions = 2


class Predicting(Llama):
    """ERNIE 4.5's mixtures, K-EXAONE and MiMo, whose layers for guessing further tokens stand apart and are
    left out."""

    ignored = ("model.mtp_", "model.mtp.", "mtp.")

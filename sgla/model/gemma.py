"""Gemma 2 (arXiv 2408.00118) and Gemma 3, text (arXiv 2503.19786), GLM 4 of 2025, and HyperCLOVA X:
norms around each sub-block (Peri-LN, arXiv 2502.02732)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.model.base import Decoder, scaled


class Block:
    """Each sub-block's output is normalized before it joins the residual stream."""

    def __init__(self, model: Gemma3, build: Build, name: str, index: int) -> None:
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            model.norm_of(build, f"{name}.{norm}") for norm in model.norms
        )
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.mlp = model.mlp(build, f"{name}.mlp", index)
        self.scale = model.spec.residual_scale

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.before_attention.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x = self.after_attention(self.attention.out(x))
        x, h = self.before_mlp.add(scaled(x, self.scale), h)
        return scaled(self.after_mlp(self.mlp(x)), self.scale), h


class Gemma3(Decoder):
    """Norm weights are stored as w and used as 1 + w; embeddings are scaled by sqrt(d). Gemma 3's local
    layers have their own rotary base. Of a multimodal checkpoint the language model alone is used."""

    norms: ClassVar[tuple[str, str, str, str]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    ignored: tuple[str, ...] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)


class Glm4(Gemma3):
    """Other names for the norms (HF ``Glm4ForCausalLM``)."""

    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    ignored = ()


class HyperClova(Gemma3):
    """Granite's multipliers with norms around each sub-block (arXiv 2506.22403)."""

    norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    ignored = ()

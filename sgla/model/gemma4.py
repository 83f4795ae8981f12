"""Gemma 4, text: layers with windows have narrower heads than those that see all, the last layers read what
others keep, each may be given values of a token that are its own, and a mixture may stand beside the MLP."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, Layer
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, RowLinear, split_heads
from sgla.layers.mlp import GatedMLP
from sgla.layers.moe import MoE
from sgla.layers.norm import RMSNorm
from sgla.layers.vocab import VocabEmbedding
from sgla.model.base import Decoder
from sgla.model.gemma import Gemma3
from sgla.model.gemma4_spec import Gemma4Attention
from sgla.model.spec import ModelSpec


class Attention:
    """``[T, d] -> [T, Hq * hd]``, with norms of q, k and v, of which v's has no weights."""

    def __init__(self, model: Gemma4, build: Build, name: str, layer: Gemma4Attention) -> None:
        spec, dim = model.spec, layer.head_dim
        own, own_kv = split_heads(layer.heads, layer.kv_heads, build.shard)
        rows = range(own.start * dim, own.stop * dim)
        parts = [(f"{name}.q_proj", layer.heads * dim, rows)]
        if layer.reads is None:
            kv = range(own_kv.start * dim, own_kv.stop * dim)
            made = ("k",) if layer.joined else ("k", "v")
            parts += [(f"{name}.{part}_proj", layer.kv_heads * dim, kv) for part in made]
            self.k_norm = build.vector(f"{name}.k_norm.weight", dim)
        self.qkv = MergedColumnLinear(build, spec.hidden, parts, spec.qkv_bias)
        self.out = RowLinear(build, f"{name}.o_proj", spec.hidden, layer.heads * dim, rows, spec.out_bias)
        self.q_norm, self.eps = build.vector(f"{name}.q_norm.weight", dim), spec.eps
        self.cos_sin, self.layer = model.angles(layer.rope, dim), layer

    def __call__(self, x: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        q = self.queries(self.qkv(x), batch, kv)
        return ops.attention(q, kv, batch, self.layer.scale, self.layer.window)

    def queries(self, qkv: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        """Those that ``qkv`` begins with, normed and rotated; k and v go to the pages."""
        if self.layer.reads is not None:
            q = ops.rms_norm.body(qkv.unflatten(1, (-1, self.layer.head_dim)), self.q_norm, self.eps)
            return ops.rotate(q, batch.positions, self.cos_sin).flatten(1)
        return ops.qkv_norm_rope_store(
            qkv,
            batch.positions,
            self.cos_sin,
            self.q_norm,
            self.k_norm,
            self.eps,
            kv,
            batch.out_loc,
            self.layer.joined,
        )


class Experts:
    """The mixture beside an MLP, whose router and experts read the residual stream through norms of their
    own: ``[T, d] -> [T, d]``."""

    def __init__(self, model: Gemma4, build: Build, name: str) -> None:
        spec, moe = model.spec, model.spec.moe
        assert moe is not None
        assert spec.activation == "gelu_tanh" or spec.activation == "silu"
        self.norm = model.norm_of(build, f"{name}.pre_feedforward_layernorm_2")
        self.after = model.norm_of(build, f"{name}.post_feedforward_layernorm_2")
        self.seen = build.vector(f"{name}.router.scale", spec.hidden, scale=spec.hidden**-0.5)
        self.moe = MoE(
            build,
            f"{name}.moe",
            hidden=spec.hidden,
            intermediate=moe.intermediate,
            experts=moe.experts,
            routing=moe.routing,
            activation=spec.activation,
        )
        self.moe.weigh(build.vector(f"{name}.router.per_expert_scale", moe.experts))
        self.eps = spec.eps

    def __call__(self, h: Tensor) -> Tensor:
        routed = ops.rms_norm(h, self.seen, self.eps)
        return self.after(self.moe(self.norm(h), routed))


class PerLayerInput:
    """What a layer makes of the values that each token has for it alone (HF's ``per_layer_input``): ``[T, d],
    [T, width] -> [T, d]``."""

    def __init__(self, model: Gemma4, build: Build, name: str, width: int) -> None:
        hidden = model.spec.hidden
        gate, out = (f"{name}.per_layer_{part}" for part in ("input_gate", "projection"))
        self.gate = MergedColumnLinear(build, hidden, [(gate, width, range(width))])
        self.out = MergedColumnLinear(build, width, [(out, hidden, range(hidden))])
        self.norm = model.norm_of(build, f"{name}.post_per_layer_input_norm")
        self.silu = model.spec.activation == "silu"

    def __call__(self, h: Tensor, values: Tensor) -> Tensor:
        gate = self.gate(h)
        made = F.silu(gate) if self.silu else F.gelu(gate, approximate="tanh")
        return self.norm(self.out(made * values))


class Block:
    def __init__(self, model: Gemma4, build: Build, name: str, index: int) -> None:
        spec, layer = model.spec, model.spec.attention[index]
        assert isinstance(layer, Gemma4Attention)
        assert spec.activation == "gelu_tanh" or spec.activation == "silu"
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            model.norm_of(build, f"{name}.{norm}") for norm in Gemma3.norms
        )
        self.attention = Attention(model, build, f"{name}.self_attn", layer)
        width = spec.inner[index] if spec.inner else spec.intermediate
        self.mlp = GatedMLP(build, f"{name}.mlp", spec.hidden, width, spec.activation)
        self.experts: Experts | None = None
        if spec.moe is not None:
            self.experts = Experts(model, build, name)
            self.after_dense = model.norm_of(build, f"{name}.post_feedforward_layernorm_1")
        self.per_layer = PerLayerInput(model, build, name, spec.per_layer.width) if spec.per_layer else None
        self.scale = build.vector(f"{name}.layer_scalar", 1)

    def __call__(
        self,
        x: Tensor,
        h: Tensor | None,
        batch: ForwardBatch,
        kv: KVLayer,
        rows: Tensor | None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        x, h = self.before_attention.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
            values = None if values is None else values[rows.long()]
        x = self.after_attention(self.attention.out(x))
        x, h = self.before_mlp.add(x, h)
        x = self.mlp(x)
        if self.experts is not None:
            x = ops.add(self.after_dense(x), self.experts(h))
        x = self.after_mlp(x)
        if self.per_layer is not None and values is not None:
            h = h + x
            x = self.per_layer(h, values)
        return ops.scaled_add(x, h, self.scale_of(batch, rows)), None

    def scale_of(self, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        """By what the outputs of tokens, or of ``rows`` of them, are multiplied: ``[1]`` or ``[*, 1]``."""
        return self.scale


class PerLayerEmbedding:
    """The values that each token has for each layer: ids int32 ``[T]`` and embeddings ``[T, d]`` -> ``[T,
    layers, width]``."""

    def __init__(self, spec: ModelSpec, build: Build, width: int, vocab: int) -> None:
        whole = spec.layers * width
        name, norm = "model.embed_tokens_per_layer", "model.per_layer_projection_norm"
        self.embed = VocabEmbedding(build, name, vocab, whole, width**0.5)
        self.made = MergedColumnLinear(
            build, spec.hidden, [("model.per_layer_model_projection", whole, range(whole))]
        )
        self.norm, self.scale, self.width = RMSNorm(build, norm, width, spec.eps), spec.hidden**-0.5, width
        self.vocab, self.most = vocab, spec.vocab

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        made = (self.made(x) * self.scale).unflatten(1, (-1, self.width))
        made = ops.rms_norm.body(made, self.norm.weight, self.norm.eps)
        if self.vocab < self.most:
            ids = torch.where(ids < self.vocab, ids, 0)
        return (made + self.embed(ids).unflatten(1, (-1, self.width)).to(made.dtype)) * 2**-0.5


class Gemma4(Decoder):
    """Of a multimodal checkpoint the language model alone is used. Checkpoints may hold keys and values of
    layers that read others'."""

    ignored = tuple(
        prefix + part
        for part in ("vision_tower.", "vision_embedder.", "audio_tower.", "embed_vision.", "embed_audio.")
        for prefix in ("", "model.")
    )

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        own = spec.per_layer
        self.per_layer = None if own is None else PerLayerEmbedding(spec, build, own.width, own.vocab)
        idle = [i for i, layer in enumerate(spec.attention) if layer.reads is not None]
        unread = (f"model.layers.{i}.self_attn.{part}" for i in idle for part in ("k_", "v_"))
        self.ignored = (*self.ignored, *unread)

    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)

    def _of_text(self, batch: ForwardBatch) -> Tensor:
        """Ids int32 ``[T]`` with the padding's in place of pictures, as in HF's class."""
        own, media = self.spec.per_layer, batch.media
        if media is None or own is None:
            return batch.ids
        return batch.ids.index_fill(0, media.tokens, own.pad)

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        x: Tensor = self.embedded(batch)
        values = None if self.per_layer is None else self.per_layer(self._of_text(batch), x)
        h: Tensor | None = None
        for i, (block, layer) in enumerate(zip(self.blocks, kv)):
            assert isinstance(layer, KVLayer)
            own = None if values is None else values[:, i]
            x, h = cast(Block, block)(x, h, batch, layer, rows if layer is kv[-1] else None, own)
        return self.norm.add(x, h)[0]

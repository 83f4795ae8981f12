"""Decoders whose tokens see all others, in some layers those near by alone: EuroBERT (arXiv 2503.05500),
which is a Llama else, and EmbeddingGemma (2509.20354), which is Gemma 3."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.linear import GateUpLinear, QKVLinear, RowLinear
from sgla.layers.norm import RMSNorm
from sgla.layers.vocab import VocabEmbedding
from sgla.model.encoder import EncoderSpec
from sgla.model.rotary_encoder import Turning

GEMMA = "input", "post_attention", "pre_feedforward", "post_feedforward"  # norms, in their order
LLAMA = "input", "", "post_attention", ""


class Layer:
    """Norms stand before attention and the MLP; Gemma's behind these, too, and its heads are normed."""

    def __init__(self, model: GroupedEncoder, build: Build, name: str, index: int) -> None:
        spec, rotary = model.spec, model.rotary
        assert spec.grouped is not None
        d, f, heads, (kv_heads, dim, self.scale, gemma) = (
            *(spec.hidden, spec.intermediate, spec.heads),
            spec.grouped,
        )
        parts, out = f"{name}.self_attn", range(heads * dim)
        self.qkv = QKVLinear(build, parts, d, heads, kv_heads, dim, "qkv" in rotary.biases)
        self.out = RowLinear(build, f"{parts}.o_proj", d, heads * dim, out, "out" in rotary.biases)
        self.gate_up = GateUpLinear(build, f"{name}.mlp", d, f, "gate_up" in rotary.biases)
        self.down = RowLinear(build, f"{name}.mlp.down_proj", d, f, range(f), "down" in rotary.biases)
        norm, behind = model.norm_of, GEMMA if gemma else LLAMA
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            norm(build, f"{name}.{part}_layernorm", d) if part else None for part in behind
        )
        self.q_norm, self.k_norm = (norm(build, f"{parts}.{x}_norm", dim) if gemma else None for x in "qk")
        self.widths, self.group = [heads * dim, kv_heads * dim, kv_heads * dim], heads // kv_heads
        self.heads, self.dim, self.activation = heads, dim, spec.activation
        self.rotate, self.window = partial(model.rotate, rotary.ropes[index]), rotary.windows[index]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = ops.add(x, normed(self.attend(normed(x, self.before_attention), batch), self.after_attention))
        return ops.add(x, normed(self.mlp(normed(x, self.before_mlp)), self.after_mlp))

    def attend(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        q, k, v = (part.unflatten(1, (-1, self.dim)) for part in self.qkv(x).split(self.widths, dim=1))
        if self.q_norm is not None and self.k_norm is not None:
            q = ops.rms_norm.body(q, self.q_norm.weight, self.q_norm.eps)
            k = ops.rms_norm.body(k, self.k_norm.weight, self.k_norm.eps)
        k, v = (y.repeat_interleave(self.group, dim=1) for y in (k, v))
        qkv = ops.inplace(self.rotate, torch.cat([q, k, v], dim=1).flatten(1))
        return self.out(ops.self_attention(qkv, batch, self.heads, self.scale, self.window))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(ops.activate(gate.contiguous(), self.activation) * up)


def normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    return x if norm is None else norm(x)


class GroupedEncoder(Turning):
    """As ``bert.py: Encoder``."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        super().__init__(spec)
        assert spec.grouped is not None
        self.offset = 1.0 if spec.grouped.gemma else 0.0  # of stored weights of norms
        scale = spec.hidden**0.5 if spec.grouped.gemma else 1.0
        self.words = VocabEmbedding(build, "embed_tokens", spec.vocab, spec.hidden, scale)
        self.layers = [Layer(self, build, f"layers.{i}", i) for i in range(spec.layers)]
        self.norm = self.norm_of(build, "norm", spec.hidden)

    def norm_of(self, build: Build, name: str, size: int) -> RMSNorm:
        return RMSNorm(build, name, size, self.spec.eps, self.offset)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states ``[T, d]``."""
        x: Tensor = self.words(batch.ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)

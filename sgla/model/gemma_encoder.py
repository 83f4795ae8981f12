"""EmbeddingGemma (arXiv 2509.20354): Gemma 3, whose tokens see all others, in most layers those near by."""

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


class Layer:
    """Norms stand before and behind attention and the MLP."""

    def __init__(self, model: GemmaEncoder, build: Build, name: str, index: int) -> None:
        spec, rotary = model.spec, model.rotary
        assert spec.grouped is not None
        d, f, heads, (kv_heads, dim, self.scale) = spec.hidden, spec.intermediate, spec.heads, spec.grouped
        parts, out = f"{name}.self_attn", range(heads * dim)
        self.qkv = QKVLinear(build, parts, d, heads, kv_heads, dim, "qkv" in rotary.biases)
        self.out = RowLinear(build, f"{parts}.o_proj", d, heads * dim, out, "out" in rotary.biases)
        self.gate_up = GateUpLinear(build, f"{name}.mlp", d, f)
        self.down = RowLinear(build, f"{name}.mlp.down_proj", d, f, range(f))
        self.q_norm, self.k_norm = (RMSNorm(build, f"{parts}.{x}_norm", dim, spec.eps, 1.0) for x in "qk")
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            RMSNorm(build, f"{name}.{norm}_layernorm", d, spec.eps, 1.0)
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.widths, self.group = [heads * dim, kv_heads * dim, kv_heads * dim], heads // kv_heads
        self.heads, self.dim, self.activation = heads, dim, spec.activation
        self.rotate, self.window = partial(model.rotate, rotary.ropes[index]), rotary.windows[index]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = ops.add(x, self.after_attention(self.attend(self.before_attention(x), batch)))
        return ops.add(x, self.after_mlp(self.mlp(self.before_mlp(x))))

    def attend(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        q, k, v = (part.unflatten(1, (-1, self.dim)) for part in self.qkv(x).split(self.widths, dim=1))
        q, k = (
            ops.rms_norm.body(y, norm.weight, norm.eps) for y, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        k, v = (y.repeat_interleave(self.group, dim=1) for y in (k, v))
        qkv = ops.inplace(self.rotate, torch.cat([q, k, v], dim=1).flatten(1))
        return self.out(ops.self_attention(qkv, batch, self.heads, self.scale, self.window))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(ops.activate(gate.contiguous(), self.activation) * up)


class GemmaEncoder(Turning):
    """As ``bert.py: Encoder``."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        super().__init__(spec)
        self.words = VocabEmbedding(build, "embed_tokens", spec.vocab, spec.hidden, spec.hidden**0.5)
        self.layers = [Layer(self, build, f"layers.{i}", i) for i in range(spec.layers)]
        self.norm = RMSNorm(build, "norm", spec.hidden, spec.eps, 1.0)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states ``[T, d]``."""
        x: Tensor = self.words(batch.ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)

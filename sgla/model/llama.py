"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783): pre-norm decoder, rotary positions, grouped queries, gated MLP.

Mistral-like and SmolLM checkpoints use it too. Qwen 2 and 3 differ by the class attributes, mixtures by ``_mlp``.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sgla.kernels.ops import KVLayer
from sgla.layers.attention import SelfAttention
from sgla.layers.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.layers.moe import MoE
from sgla.layers.norm import RMSNorm
from sgla.layers.vocab import LMHead, VocabEmbedding
from sgla.model.base import CausalLM
from sgla.model.spec import ModelSpec


class Block:
    """One layer. The residual stream ``h`` and the pending update ``x`` travel apart, so that add and norm are one op."""

    def __init__(
        self, build: Build, name: str, spec: ModelSpec, attention: SelfAttention, mlp: GatedMLP | MoE
    ) -> None:
        self.input_norm = RMSNorm(build, f"{name}.input_layernorm", spec.hidden, spec.eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", spec.hidden, spec.eps)
        self.mlp = mlp

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x = self.attention(x, batch, kv)
        x, h = self.mlp_norm.add(x, h)
        return self.mlp(x), h


class Llama(CausalLM):
    qkv_bias: ClassVar[bool | None] = None  # None: as the configuration's attention_bias says
    out_bias: ClassVar[bool | None] = None
    qk_norm: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        self.cos_sin = self.rope(spec.rope)
        self.embed = VocabEmbedding(build, "model.embed_tokens", spec.vocab, spec.hidden)
        self.blocks = [self._block(build, f"model.layers.{i}", spec, i) for i in range(spec.layers)]
        self.norm = RMSNorm(build, "model.norm", spec.hidden, spec.eps)
        self.lm_head = LMHead(build, "lm_head", spec.vocab, spec.hidden, self.embed if spec.tied else None)

    def _block(self, build: Build, name: str, spec: ModelSpec, index: int) -> Block:
        attention = SelfAttention(
            build,
            f"{name}.self_attn",
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            cos_sin=self.cos_sin,
            scale=spec.attention_scale,
            eps=spec.eps,
            window=spec.windows[index],
            qkv_bias=spec.attention_bias if self.qkv_bias is None else self.qkv_bias,
            out_bias=spec.attention_bias if self.out_bias is None else self.out_bias,
            qk_norm=self.qk_norm,
        )
        return Block(build, name, spec, attention, self._mlp(build, name, spec, index))

    def _mlp(self, build: Build, name: str, spec: ModelSpec, index: int) -> GatedMLP | MoE:
        return GatedMLP(build, f"{name}.mlp", spec.hidden, spec.intermediate, spec.activation, spec.mlp_bias)

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor:
        x: Tensor = self.embed(batch.ids)
        h: Tensor | None = None
        for block, layer in zip(self.blocks, kv):
            x, h = block(x, h, batch, layer)
        return self.norm.add(x, h)[0]

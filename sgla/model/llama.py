"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783): pre-norm decoder, rotary positions, grouped queries, gated MLP.

Mistral-like and SmolLM checkpoints use it too. Qwen 2 and 3 differ by the class attributes, mixtures by ``_mlp``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda.decode_step import HEAD_DIM, DecodeStep, LayerWeights, Shape
from sgla.kernels.cuda.mixture_step import MixtureShape, MixtureWeights
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
    """One layer. The residual stream ``h`` and the pending update ``x`` travel apart, so that add and norm are one op. The last
    layer goes on with ``rows`` alone once every token has left its KV."""

    def __init__(
        self, build: Build, name: str, spec: ModelSpec, attention: SelfAttention, mlp: GatedMLP | MoE
    ) -> None:
        self.input_norm = RMSNorm(build, f"{name}.input_layernorm", spec.hidden, spec.eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", spec.hidden, spec.eps)
        self.mlp = mlp

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x, h = self.mlp_norm.add(self.attention.out(x), h)
        return self.mlp(x), h

    def weights(self) -> LayerWeights | MixtureWeights | None:
        """The layer's tensors, if it has nothing but plain bfloat16 weights, full attention and SiLU-gated MLPs."""
        attention, mlp = self.attention, self.mlp
        qkv, out = attention.qkv, attention.out
        norms = self.input_norm.weight, self.mlp_norm.weight
        heads = attention.q_norm, attention.k_norm
        if mlp.activation != "silu" or attention.window or attention.softcap:
            return None
        if any(x.bias is not None or x.weight.kind != "bf16" for x in (qkv, out)):
            return None
        if isinstance(mlp, MoE):
            if any(weight.kind != "bf16" for weight in (mlp.router, mlp.gate_up, mlp.down)):
                return None
            experts = mlp.router.data, mlp.gate_up.data, mlp.down.data
            return MixtureWeights(qkv.weight.data, out.weight.data, *experts, *norms, *heads)
        if any(x.bias is not None or x.weight.kind != "bf16" for x in (mlp.gate_up, mlp.down)):
            return None
        mlp_weights = mlp.gate_up.weight.data, mlp.down.weight.data
        return LayerWeights(qkv.weight.data, out.weight.data, *mlp_weights, *norms, *heads)


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

    def forward(self, batch: ForwardBatch, kv: list[KVLayer], rows: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(batch.ids)
        h: Tensor | None = None
        for block, layer in zip(self.blocks, kv):
            x, h = block(x, h, batch, layer, rows if layer is kv[-1] else None)
        return self.norm.add(x, h)[0]

    def decode_step(self, kv: list[KVLayer]) -> DecodeStep | None:
        spec, pages = self.spec, kv[0].k
        layers = [weights for block in self.blocks if (weights := block.weights()) is not None]
        alike = len(layers) == spec.layers and len({type(weights) for weights in layers}) == 1
        plain = alike and self.embed.weight.kind == self.lm_head.weight.kind == "bf16"
        whole_heads = spec.head_dim == self.cos_sin.shape[1] == HEAD_DIM
        if (
            self.shard.size > 1
            or not plain
            or not whole_heads
            or self.lm_head.softcap
            or pages.dtype != torch.bfloat16
        ):
            return None
        shape = self._step_shape(isinstance(layers[0], MixtureWeights), pages.shape[1])
        if not shape.pays(spec.layers, spec.vocab):
            return None
        embedding, head = self.embed.weight.data, self.lm_head.weight.data
        return DecodeStep(
            shape, layers, kv, embedding, head, self.norm.weight, self.cos_sin, spec.eps, spec.attention_scale
        )

    def _step_shape(self, mixture: bool, page_size: int) -> Shape | MixtureShape:
        spec, moe = self.spec, self.spec.moe
        if not mixture:
            return Shape(spec.hidden, spec.heads, spec.kv_heads, spec.intermediate, self.qk_norm, page_size)
        assert moe is not None
        return MixtureShape(
            spec.hidden, spec.heads, spec.kv_heads, moe.intermediate, moe.experts, moe.top_k, moe.normalize,
            self.qk_norm, page_size,
        )  # fmt: skip

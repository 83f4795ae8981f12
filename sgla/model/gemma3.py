"""Gemma 3, text (arXiv 2503.19786): local sliding-window layers between global ones, norms around each sub-block."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import SelfAttention
from sgla.layers.batch import ForwardBatch
from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.layers.norm import RMSNorm
from sgla.layers.vocab import LMHead, VocabEmbedding
from sgla.model.base import CausalLM
from sgla.model.spec import ModelSpec


class Block:
    """One layer: each sub-block's output is normalized before it joins the residual stream ``h``. The last layer goes on with
    ``rows`` alone once every token has left its KV."""

    def __init__(self, build: Build, name: str, spec: ModelSpec, attention: SelfAttention) -> None:
        self.attention = attention
        self.mlp = GatedMLP(build, f"{name}.mlp", spec.hidden, spec.intermediate, spec.activation)
        self.input_norm, self.after_attention, self.before_mlp, self.after_mlp = (
            RMSNorm(build, f"{name}.{norm}", spec.hidden, spec.eps, offset=1.0)
            for norm in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        )

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x = self.after_attention(self.attention.out(x))
        x, h = self.before_mlp.add(x, h)
        return self.after_mlp(self.mlp(x)), h


class Gemma3(CausalLM):
    """Norm weights are stored as w and used as 1 + w; embeddings are scaled by sqrt(d).

    Local layers have their own rotary base. Of a multimodal checkpoint the language model alone is used.
    """

    ignored = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        self.cos_sin, self.local_cos_sin = self.rope(spec.rope), self.rope(spec.local_rope)
        self.embed = VocabEmbedding(
            build, "model.embed_tokens", spec.vocab, spec.hidden, scale=spec.hidden**0.5
        )
        self.blocks = [self._block(build, f"model.layers.{i}", spec, i) for i in range(spec.layers)]
        self.norm = RMSNorm(build, "model.norm", spec.hidden, spec.eps, offset=1.0)
        tied = self.embed if spec.tied else None
        self.lm_head = LMHead(build, "lm_head", spec.vocab, spec.hidden, tied, spec.final_softcap)

    def _block(self, build: Build, name: str, spec: ModelSpec, index: int) -> Block:
        window = spec.windows[index]
        attention = SelfAttention(
            build,
            f"{name}.self_attn",
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            cos_sin=self.local_cos_sin if window else self.cos_sin,
            scale=spec.attention_scale,
            eps=spec.eps,
            window=window,
            softcap=spec.attention_softcap,
            qkv_bias=spec.attention_bias,
            out_bias=spec.attention_bias,
            qk_norm=True,
            norm_offset=1.0,
        )
        return Block(build, name, spec, attention)

    def forward(self, batch: ForwardBatch, kv: list[KVLayer], rows: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(batch.ids)
        h: Tensor | None = None
        for block, layer in zip(self.blocks, kv):
            x, h = block(x, h, batch, layer, rows if layer is kv[-1] else None)
        return self.norm.add(x, h)[0]

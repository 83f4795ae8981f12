"""DFlash (arXiv 2602.06036): layers like Qwen3's that guess a block of tokens at a time. They keep k and v of
what some layers of the target make of each token of the text, and read a block: the last token, and a mask in
the place of each guess. Its tokens all see each other, and as much before it: a window is counted from its
end. The tensors are those of the authors' checkpoints."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import Layer
from sgla.layers.attention import HeadNorms, SelfAttention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.mlp import GatedMLP
from sgla.layers.norm import RMSNorm
from sgla.layers.rope import rope_table
from sgla.model.base import Decoder
from sgla.model.spec import ModelSpec


class _Block:
    def __init__(self, build: Build, name: str, spec: ModelSpec, index: int, positions: int) -> None:
        layer, d = spec.attention[index], spec.hidden
        assert layer.rope is not None
        cos_sin = rope_table(layer.rope.theta, layer.rope.dim, layer.rope.kind, layer.rope.scaling, positions)
        self.input_norm = RMSNorm(build, f"{name}.input_layernorm", d, spec.eps)
        self.attention = SelfAttention(
            build,
            f"{name}.self_attn",
            d,
            layer,
            cos_sin,
            norms=HeadNorms("head", spec.eps),
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
        )
        self.mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", d, spec.eps)
        self.mlp = GatedMLP(build, f"{name}.mlp", d, spec.intermediate, "silu", spec.mlp_bias)

    def __call__(self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Layer) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x, h = self.mlp_norm.add(self.attention.out(self.attention(x, batch, kv)), h)  # type: ignore[arg-type]
        return self.mlp(x), h


class DFlash:
    """``mask``: the token in the place of a guess. ``places``: layers of the target that it reads."""

    def __init__(
        self, target: Decoder, spec: ModelSpec, build: Build, positions: int, places: int, mask: int
    ) -> None:
        d = spec.hidden
        self.width, self.target_width, self.mask = d, places * target.spec.hidden, mask
        self.vocab, self.layers = target.spec.vocab, spec.layers
        self.join = MergedColumnLinear(build, self.target_width, [("fc", d, range(d))])
        self.hidden_norm = RMSNorm(build, "hidden_norm", d, spec.eps)
        self.blocks = [_Block(build, f"layers.{i}", spec, i, positions) for i in range(spec.layers)]
        self.norm = RMSNorm(build, "norm", d, spec.eps)
        self.embed, self.out = target.embed, target.lm_head

    def keep(self, hidden: Tensor, batch: ForwardBatch, kv: list[Layer]) -> Tensor:
        """Of each token of the text ``hidden`` ``[T, target_width]``: k and v of all layers go to the
        pages."""
        x = self.hidden_norm(self.join(hidden))
        for block, layer in zip(self.blocks, kv):
            block.attention.store(x, batch, layer)  # type: ignore[arg-type]
        return x

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor) -> Tensor:
        """What logits are made of, of the tokens ``rows`` int32[S] of blocks, each a row that sees all of its
        block."""
        x = self.embed(batch.ids)
        h: Tensor | None = None
        for block, layer in zip(self.blocks, kv):
            x, h = block(x, h, batch, layer)
        assert h is not None
        return self.norm.add(ops.gather(x, rows), ops.gather(h, rows))[0]

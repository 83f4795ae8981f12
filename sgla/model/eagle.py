"""EAGLE: a layer that guesses further tokens from what its target makes of the tokens before. The tensors are
those of the authors' checkpoints."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import HeadNorms, SelfAttention
from sgla.layers.build import Build, Share
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.mlp import GatedMLP
from sgla.layers.norm import RMSNorm
from sgla.layers.rope import rope_table
from sgla.layers.vocab import LMHead
from sgla.model.base import Decoder
from sgla.model.spec import ModelSpec


class Eagle:
    """EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858), without their trees: a Llama's layer without its
    first norm, on a token's embedding and the target's last hidden state of the token before, side by side
    through one projection. Its output is a guess at the next hidden state, which the target's output layer
    reads."""

    ids: Tensor | None = None

    def __init__(
        self, target: Decoder, spec: ModelSpec, build: Build, positions: int, bias: bool = True
    ) -> None:
        d, name = spec.hidden, "layers.0"
        self.width = self.target_width = d
        self.vocab = target.spec.vocab
        self.join = MergedColumnLinear(build, 2 * d, [("fc", d, range(d))], bias)
        self.attention = _attention(build, f"{name}.self_attn", spec, positions, d)
        self.mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", d, spec.eps)
        self.mlp = GatedMLP(build, f"{name}.mlp", d, spec.intermediate, "silu", spec.mlp_bias)
        self.embed, self.out = target.embed, target.lm_head

    def read(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, kv: list[KVLayer]
    ) -> tuple[Tensor, Tensor]:
        h = self.join(ops.beside(tokens, hidden))
        x, h = self.mlp_norm.add(self.attention.out(self.attention(h, batch, kv[0])), h)
        made = ops.add(h, self.mlp(x))
        return made, made


def _attention(build: Build, name: str, spec: ModelSpec, positions: int, inputs: int) -> SelfAttention:
    """``inputs``: the width of what it reads."""
    layer = spec.attention[0]
    assert layer.rope is not None
    rope, norms = layer.rope, HeadNorms("", spec.eps)
    cos_sin = rope_table(rope.theta, rope.dim, rope.kind, rope.scaling, positions)
    return SelfAttention(
        build, name, spec.hidden, layer, cos_sin, norms=norms, qkv_bias=spec.qkv_bias, inputs=inputs
    )


class Eagle3:
    """EAGLE-3 (arXiv 2503.01840), which reads what goes into three layers of its target. ``spec``: of the
    head, as if it were a Llama of one layer. ``vocab``: how many tokens of the target it may guess.
    ``normed``: the norm of what it reads stands before the residual, not beside it; ``read_normed``: there is
    one before the first projection."""

    def __init__(
        self,
        target: Decoder,
        spec: ModelSpec,
        build: Build,
        positions: int,
        places: int,
        vocab: int,
        normed: bool = False,
        read_normed: bool = False,
    ) -> None:
        d, name = spec.hidden, "midlayer"
        self.width, self.target_width, self.vocab = d, places * target.spec.hidden, target.spec.vocab
        self.normed = normed
        self.read_norm = RMSNorm(build, "input_norm", self.target_width, spec.eps) if read_normed else None
        self.join = MergedColumnLinear(build, self.target_width, [("fc", d, range(d))])
        self.token_norm = RMSNorm(build, f"{name}.input_layernorm", d, spec.eps)
        self.hidden_norm = RMSNorm(build, f"{name}.hidden_norm", d, spec.eps)
        self.attention = _attention(build, f"{name}.self_attn", spec, positions, 2 * d)
        self.mlp_norm = RMSNorm(build, f"{name}.post_attention_layernorm", d, spec.eps)
        self.mlp = GatedMLP(build, f"{name}.mlp", d, spec.intermediate, "silu", spec.mlp_bias)
        self.norm = RMSNorm(build, "norm", d, spec.eps)
        self.out = LMHead(build, "lm_head", vocab, d)
        self.ids = torch.arange(vocab) if vocab < self.vocab else None
        if self.ids is not None:
            build.declare("d2t", (vocab,), partial(_take_ids, self.ids))
        self.embed = target.embed

    def read(self, hidden: Tensor) -> Tensor:
        return self.join(hidden if self.read_norm is None else self.read_norm(hidden))

    def forward(
        self, tokens: Tensor, hidden: Tensor, batch: ForwardBatch, kv: list[KVLayer]
    ) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = ops.beside(self.token_norm(tokens), normed)
        hidden = normed if self.normed else hidden
        x = self.attention.out(self.attention(x, batch, kv[0]))
        x, h = self.mlp_norm.add(x, hidden)
        shown, h = self.norm.add(self.mlp(x), h)
        return h, shown


def _take_ids(ids: Tensor, source: Share) -> None:
    """The file has by how much a token's number is another one in the target."""
    ids += source.dense().long()

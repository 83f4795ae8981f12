"""LongCat-Flash (arXiv 2509.01322): a layer is two of latent attention with an MLP each, and what a mixture
makes of what the first MLP reads is added behind the second. Some experts hand on what they are given."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.layers.moe import MoE
from sgla.model.latent import Latent
from sgla.model.spec import ModelSpec


class Shortcut:
    """``[T, d] -> [T, d]``, of which the sum over the ranks is the output."""

    def __init__(self, spec: ModelSpec, build: Build, name: str) -> None:
        moe, activation = spec.moe, spec.activation
        assert moe is not None
        assert activation == "silu" or activation == "gelu_tanh"
        self.routing = moe.routing
        self.experts = MoE(
            build,
            name,
            hidden=spec.hidden,
            intermediate=moe.intermediate,
            experts=moe.experts,
            routing=moe.routing,
            activation=activation,
            correction=True,
            idle=moe.idle,
        )

    def __call__(self, x: Tensor) -> Tensor:
        logits = ops.logits(x, self.experts.router)
        weights, ids = ops.route(logits, self.routing, self.experts.biases)
        idle = (weights * (ids >= self.experts.experts)).sum(1, keepdim=True)
        y = self.experts.part(x, fixed=ids)
        return y + (x * idle).to(x.dtype) if self.experts.shard.rank == 0 else y


class Block:
    """One of the two; ``first``: the other, where this is the second."""

    def __init__(
        self, model: Longcat, build: Build, name: str, index: int, part: int, first: Block | None
    ) -> None:
        spec, activation = model.spec, model.spec.activation
        assert activation == "silu" or activation == "gelu_tanh"
        self.input_norm = model.norm_of(build, f"{name}.input_layernorm.{part}")
        self.attention = model.attention(build, f"{name}.self_attn.{part}", index)
        self.mlp_norm = model.norm_of(build, f"{name}.post_attention_layernorm.{part}")
        self.mlp = GatedMLP(build, f"{name}.mlps.{part}", spec.hidden, spec.intermediate, activation)
        self.shortcut = Shortcut(spec, build, f"{name}.mlp") if first is None else None
        self.first = first
        self.made: Tensor | None = None  # by the mixture, in the step under way

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x = self.attention(x, batch, kv)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x, h = self.mlp_norm.add(self.attention.out(x), h)
        if self.shortcut is not None:
            self.made = self.shortcut(x)
            return self.mlp(x), h
        assert self.first is not None
        assert self.first.made is not None
        beside = self.first.made if rows is None else ops.gather(self.first.made, rows)
        return self.mlp.down.total(self.mlp.part(x) + beside), h


class Longcat(Latent):
    """The layers that guess further tokens are left out, and what files have of experts that do nothing."""

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        self.latest: Block | None = None
        super().__init__(spec, build, positions)
        assert spec.moe is not None
        count = range(spec.moe.experts, spec.moe.experts + spec.moe.idle)
        idle = (f"model.layers.{i}.mlp.experts.{e}." for i in range(spec.layers // 2) for e in count)
        self.ignored = (*self.ignored, "model.mtp.", *idle)

    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        layer, part = divmod(index, 2)
        first = self.latest if part else None
        self.latest = Block(self, build, f"model.layers.{layer}", index, part, first)
        return self.latest

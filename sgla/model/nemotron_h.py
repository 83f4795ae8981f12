"""Nemotron-H (arXiv 2504.03624): a Mamba 2, attention, an MLP or a mixture alone in each layer; and Mamba 2
and Mamba 1 themselves, whose layers are all of the first kind."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.mlp import PlainMLP
from sgla.layers.moe import MoE
from sgla.layers.spec import MoESpec
from sgla.model.base import Decoder
from sgla.model.first_mamba import FirstMamba
from sgla.model.mamba import Mamba
from sgla.model.mamba_spec import FirstMambaSpec, MambaSpec, NothingSpec
from sgla.model.spec import ModelSpec


class Mixer:
    """A layer that reads what comes before a token."""

    def __init__(self, model: NemotronH, build: Build, name: str, index: int) -> None:
        self.norm = model.norm_of(build, f"{name}.norm")
        self.attention = model.attention(build, f"{name}.mixer", index)

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.norm.add(x, h)
        seen = self.attention(x, batch, kv)
        if rows is not None:
            seen, h = ops.gather(seen, rows), ops.gather(h, rows)
        return self.attention.out(seen), h


class Feeder:
    """A layer that reads the token alone."""

    def __init__(self, model: NemotronH, build: Build, name: str, index: int) -> None:
        self.norm = model.norm_of(build, f"{name}.norm")
        self.mlp = model.mlp(build, f"{name}.mixer", index)

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: Any, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.norm.add(x, h)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        return self.mlp(x), h


class Mixture:
    """Experts without a gate, and a shared one: ``[T, d] -> [T, d]``. What experts read and make may be
    ``latent`` values, for linear layers before and behind them."""

    def __init__(self, spec: ModelSpec, moe: MoESpec, build: Build, name: str) -> None:
        self.shard, hidden, latent = build.shard, spec.hidden, moe.latent
        self.experts = MoE(
            build,
            name,
            hidden=latent or hidden,
            intermediate=moe.intermediate,
            experts=moe.experts,
            routing=moe.routing,
            activation="relu2",
            correction=True,
            routed=hidden,
        )
        shared, names = f"{name}.shared_experts", ("up_proj", "down_proj")
        self.shared = PlainMLP(build, shared, hidden, moe.shared, "relu2", spec.mlp_bias, names)
        self.inside: tuple[MergedColumnLinear, MergedColumnLinear] | None = None
        if latent:
            before = MergedColumnLinear(build, hidden, [(f"{name}.fc1_latent_proj", latent, range(latent))])
            behind = MergedColumnLinear(build, latent, [(f"{name}.fc2_latent_proj", hidden, range(hidden))])
            self.inside = before, behind

    def __call__(self, x: Tensor) -> Tensor:
        if self.inside is None:
            y = self.experts.chosen(x, None)
        else:
            before, behind = self.inside
            y = behind(self.experts.chosen(before(x), x))
        y = y + self.shared.part(x)
        return y if self.shard.size == 1 else ops.all_reduce(y, self.shard)


class NemotronH(Decoder):
    ignored = ("mtp.",)

    def mlp(self, build: Build, name: str, index: int) -> Any:
        moe = self.spec.moe
        if moe is not None and index in moe.layers:
            return Mixture(self.spec, moe, build, name)
        return super().mlp(build, name, index)

    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, MambaSpec):
            return Mamba(build, name, self.spec.hidden, layer, self.spec.eps)
        if isinstance(layer, FirstMambaSpec):
            return FirstMamba(build, name, self.spec.hidden, layer)
        return super().attention(build, name, index)

    def block(self, build: Build, name: str, index: int) -> Mixer | Feeder:
        alone = isinstance(self.spec.attention[index], NothingSpec)
        return (Feeder if alone else Mixer)(self, build, name, index)

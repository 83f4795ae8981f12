"""Gemma 3n, text. The residual stream is several wide, and a layer reads one of them and changes all (AltUp,
arXiv 2301.13310); beside attention stands a narrow product (LAuReL, arXiv 2411.07501); the last layers read
what others keep, and each is given values of a token that are its own."""

from __future__ import annotations

from statistics import NormalDist
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, Layer
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.mlp import GatedMLP
from sgla.layers.spec import AltUp
from sgla.model.gemma import Gemma3
from sgla.model.gemma3n_spec import Gemma3nAttention
from sgla.model.gemma4 import Attention, Gemma4, PerLayerInput
from sgla.model.spec import ModelSpec
from sgla.quant.weight import SourceTensor

LEAST = 1e-5  # of the mean square of a stream


class SparseMLP(GatedMLP):
    """Of the gate's values those count that are far above the mean, as many as a normal distribution has:
    ``[T, d] -> [T, d]``. ``width``: of all ranks."""

    def __init__(self, build: Build, name: str, hidden: int, width: int, sparsity: float) -> None:
        super().__init__(build, name, hidden, width, "gelu_tanh")
        self.shard, self.width, self.far = build.shard, width, NormalDist().inv_cdf(sparsity)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        f = gate.float()
        sums = torch.stack([f.sum(1), f.square().sum(1)], dim=1)
        if self.shard.size > 1:
            sums = ops.all_reduce(sums, self.shard)
        mean, square = (sums / self.width).split(1, dim=1)
        deviation = (square - mean.square()).clamp(min=0.0).sqrt()
        kept = F.relu(f - mean - deviation * self.far)
        return self.down((F.gelu(kept, approximate="tanh") * up).to(x.dtype))


class Streams:
    """What a layer does to all streams ``[n, T, d]``. ``active``: the one that it reads."""

    def __init__(self, model: Gemma3n, build: Build, name: str, altup: AltUp) -> None:
        count, hidden = altup.inputs, model.spec.hidden
        self.norm = model.norm_of(build, f"{name}.router_norm")
        self.router = matrix(build, f"{name}.modality_router", count, hidden)
        self.coming = matrix(build, f"{name}.prediction_coefs", count**2, count)
        self.made = matrix(build, f"{name}.correction_coefs", count, count)
        self.scale = build.vector(f"{name}.correct_output_scale", hidden)
        self.active, self.scaled, self.count = altup.active, altup.scaled, count

    def predicted(self, h: Tensor) -> Tensor:
        """What becomes of the streams without the layer."""
        shares = F.linear(self._seen(h[self.active]), self.coming).unflatten(1, (self.count, self.count))
        return (h.float() + torch.einsum("tji,itd->jtd", shares, h.float())).to(h.dtype)

    def corrected(self, h: Tensor, x: Tensor) -> Tensor:
        """By the difference that the layer has made of the active one, x ``[T, d]``."""
        shares = F.linear(self._seen(x), self.made) + 1.0
        return (h.float() + shares.t()[..., None] * (x - h[self.active]).float()).to(h.dtype)

    def read(self, h: Tensor) -> Tensor:
        """The active one, for what follows the correction."""
        x = h[self.active]
        return (x * self.scale).to(x.dtype) if self.scaled else x

    def _seen(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(self.norm(x).float() / x.shape[1], self.router))


class Block:
    def __init__(self, model: Gemma3n, build: Build, name: str, index: int) -> None:
        spec, layer = model.spec, model.spec.attention[index]
        assert isinstance(layer, Gemma3nAttention)
        assert spec.altup is not None
        assert spec.per_layer is not None
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            model.norm_of(build, f"{name}.{norm}") for norm in Gemma3.norms
        )
        self.streams = Streams(model, build, f"{name}.altup", spec.altup)
        left, right = f"{name}.laurel.linear_left", f"{name}.laurel.linear_right"
        self.left = MergedColumnLinear(build, spec.hidden, [(left, layer.rank, range(layer.rank))])
        self.right = MergedColumnLinear(build, layer.rank, [(right, spec.hidden, range(spec.hidden))])
        self.after_laurel = model.norm_of(build, f"{name}.laurel.post_laurel_norm")
        self.attention = Attention(model, build, f"{name}.self_attn", layer)
        width, sparsity = spec.inner[index], spec.altup.sparsity[index]
        self.mlp: GatedMLP
        if sparsity:
            self.mlp = SparseMLP(build, f"{name}.mlp", spec.hidden, width, sparsity)
        else:
            self.mlp = GatedMLP(build, f"{name}.mlp", spec.hidden, width, "gelu_tanh")
        self.per_layer = PerLayerInput(model, build, name, spec.per_layer.width)

    def __call__(
        self, h: Tensor, values: Tensor, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> Tensor:
        h = self.streams.predicted(h)
        active = h[self.streams.active]
        x = self.before_attention(active)
        beside = x + self.after_laurel(self.right(self.left(x)))
        seen = self.attention(x, batch, kv)
        if rows is not None:
            seen, active, beside = (ops.gather(y, rows) for y in (seen, active, beside))
            h, values = h[:, rows.long()], values[rows.long()]
        x = active + self.after_attention(self.attention.out(seen))
        x = (x + beside) * 2**-0.5
        h = self.streams.corrected(h, x + self.after_mlp(self.mlp(self.before_mlp(x))))
        more = self.per_layer(self.streams.read(h), values)
        return torch.cat([h[:1], h[1:] + more])


class Gemma3n(Gemma4):
    """Of a multimodal checkpoint the language model alone is used."""

    def __init__(self, spec: ModelSpec, build: Build, positions: int) -> None:
        super().__init__(spec, build, positions)
        assert spec.altup is not None
        self.begins, self.ends = (
            [
                MergedColumnLinear(
                    build, spec.hidden, [(f"model.{name}.{i}", spec.hidden, range(spec.hidden))]
                )
                for i in range(spec.altup.inputs - 1)
            ]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def block(self, build: Build, name: str, index: int) -> Block:  # type: ignore[override]
        return Block(self, build, name, index)

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(batch.ids)
        assert self.per_layer is not None
        values = self.per_layer(batch.ids, x)
        h = torch.stack([x, *(as_large(begin(x), x) for begin in self.begins)])
        for i, (block, layer) in enumerate(zip(self.blocks, kv)):
            assert isinstance(layer, KVLayer)
            h = cast(Block, block)(h, values[:, i], batch, layer, rows if layer is kv[-1] else None)
        ends = (as_large(end(h[i + 1]), h[0]) for i, end in enumerate(self.ends))
        return self.norm.add(torch.stack([h[0], *ends]).mean(0), None)[0]


def as_large(x: Tensor, like: Tensor) -> Tensor:
    """x ``[T, d]`` with the mean square of ``like``."""
    own, wanted = (y.float().square().mean(1, keepdim=True) for y in (x, like))
    return (x * (wanted.sqrt() / own.clamp(min=LEAST).sqrt())).to(x.dtype)


def matrix(build: Build, name: str, rows: int, columns: int) -> Tensor:
    """float32 ``[rows, columns]``, too small for a storage of its own."""
    made = torch.zeros(rows, columns)

    def take(source: SourceTensor) -> None:
        made.copy_(source.dense(range(rows)))

    build.declare(f"{name}.weight", (rows, columns), take)
    return made

"""Kimi Linear (arXiv 2510.26692): the delta rule with a decay for each channel, and in every fourth layer
latent attention whose positions are not rotated."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import StateLayer
from sgla.layers.attention import LayerAttention
from sgla.layers.build import Build, StackPart
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.model.kimi_spec import KimiDeltaSpec
from sgla.model.latent import Latent
from sgla.quant.weight import SourceTensor


class KimiDelta:
    """``[T, d] -> [T, H * dim]`` of this rank's heads, which ``out`` brings back to the width."""

    def __init__(self, build: Build, name: str, hidden: int, layer: KimiDeltaSpec, eps: float) -> None:
        count, dim = layer.count, layer.dim
        if count % build.shard.size:
            raise ConfigError(
                f"{count} heads (linear_num_heads) cannot be split over {build.shard.size} ranks", param="tp"
            )
        own, width = build.shard.range(count), count * dim
        self.layer, self.eps = layer, eps
        rows = range(own.start * dim, own.stop * dim)
        self.qkv = MergedColumnLinear(build, hidden, [(f"{name}.{part}_proj", width, rows) for part in "qkv"])
        self._make_gates(build, name, hidden, own, rows)
        self.conv = torch.zeros(3 * len(rows), layer.taps)
        self._declare_conv(build, name, width, rows)
        self.dt_bias = build.vector(f"{name}.dt_bias", width, rows)
        self.rates = torch.zeros(len(own), 1)  # -exp(A_log) of each head
        build.declare(f"{name}.A_log", self._rates_shape(), partial(self._take_rates, own))
        self.norm = build.vector(f"{name}.o_norm.weight", dim)
        self.out = RowLinear(build, f"{name}.o_proj", hidden, width, rows)

    def _rates_shape(self) -> tuple[int, ...]:
        return 1, 1, self.layer.count, 1

    def _make_gates(self, build: Build, name: str, hidden: int, own: range, rows: range) -> None:
        """``rows``: of the heads ``own``."""
        count, dim = self.layer.count, self.layer.dim
        narrow = [(f"{name}.{part}_a_proj", dim, range(dim)) for part in "fg"]
        self.narrow = MergedColumnLinear(build, hidden, [*narrow, (f"{name}.b_proj", count, own)])
        self.widths = [dim, dim, len(own)]
        self.decay, self.gate = (
            MergedColumnLinear(build, dim, [(f"{name}.{part}_b_proj", count * dim, rows)]) for part in "fg"
        )

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of decay and output ``[T, H * dim]``, and of what is written ``[T, H]``."""
        fading, gating, writing = (y.contiguous() for y in self.narrow(x).split(self.widths, dim=1))
        return self.decay(fading), self.gate(gating), writing

    def _decay(self, fading: Tensor) -> Tensor:
        """Logarithms, float32 ``[T, H, dim]``."""
        time = F.softplus(fading.float() + self.dt_bias).unflatten(1, (-1, self.layer.dim))
        return self.rates * time

    def _declare_conv(self, build: Build, name: str, width: int, rows: range) -> None:
        """Of q, k and v apart, or stacked as transformers has them."""
        parts = []
        for i, part in enumerate("qkv"):
            take = partial(self._take_conv, i * len(rows), rows)
            build.declare(f"{name}.{part}_conv1d.weight", (width, 1, self.layer.taps), take)
            parts.append(StackPart(f"{name}.{part}_conv1d.weight", None, range(i * width, (i + 1) * width)))
        build.stacks[f"{name}.conv1d.weight"] = (3 * width, 1, self.layer.taps), parts

    def _take_conv(self, at: int, rows: range, source: SourceTensor) -> None:
        self.conv[at : at + len(rows)] = source.dense(rows)[:, 0]

    def _take_rates(self, own: range, source: SourceTensor) -> None:
        self.rates.copy_(-source.dense().float().view(-1, 1)[own.start : own.stop].exp())

    def __call__(self, x: Tensor, batch: ForwardBatch, state: StateLayer) -> Tensor:
        mixed = ops.causal_conv(self.qkv(x), self.conv, None, state, batch)
        q, k, v = (y.unflatten(1, (-1, self.layer.dim)) for y in mixed.chunk(3, dim=1))
        fading, gating, writing = self._gates(x)
        seen = ops.gated_delta(q, k, v, self._decay(fading), writing.float().sigmoid(), state, batch)
        gate = gating.unflatten(1, (-1, self.layer.dim))
        return ops.gated_rms_norm(seen, gate, self.norm, self.eps, "sigmoid").flatten(1)


class Kimi(Latent):
    def attention(self, build: Build, name: str, index: int) -> LayerAttention:
        layer = self.spec.attention[index]
        if isinstance(layer, KimiDeltaSpec):
            return KimiDelta(build, name, self.spec.hidden, layer, self.spec.eps)
        return super().attention(build, name, index)

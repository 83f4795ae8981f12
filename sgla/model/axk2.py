"""A.X K2: DeepSeek V3.2's layers, with gates: of norms, and of what heads see (``LatentSpec.gates``)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import ops
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear
from sgla.layers.norm import RMSNorm
from sgla.model.indexed import Indexed


class GatedNorm(RMSNorm):
    """What the norm gives, times the sigmoid of what a narrow MLP makes of it."""

    def __init__(self, build: Build, name: str, size: int, eps: float, rank: int) -> None:
        super().__init__(build, f"{name}.norm", size, eps)
        self.down = MergedColumnLinear(build, size, [(f"{name}.W_down", rank, range(rank))])
        self.up = MergedColumnLinear(build, rank, [(f"{name}.W_up", size, range(size))])

    def __call__(self, x: Tensor) -> Tensor:
        return self.gated(super().__call__(x))

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        normed, h = ops.add_rms_norm(x, residual, self.weight, self.eps)
        return self.gated(normed), h

    def gated(self, x: Tensor) -> Tensor:
        return ops.sigmoid_mul(x, self.up(F.silu(self.down(x))))


class AXK2(Indexed):
    def norm_of(self, build: Build, name: str) -> RMSNorm:
        """Before attention, and before mixtures, with a gate."""
        spec, (layer, which) = self.spec, name.split(".")[-2:]
        mixed = which == "post_attention_layernorm" and spec.moe is not None and int(layer) in spec.moe.layers
        if mixed or which == "input_layernorm":
            return GatedNorm(build, name, spec.hidden, spec.eps, spec.norm_gates)
        return RMSNorm(build, name, spec.hidden, spec.eps)

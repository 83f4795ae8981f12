"""A family with an op of its own, as a package outside might bring it: Llama whose gate is relu squared."""

from __future__ import annotations

import torch
from torch import Tensor
from toy_entry import FAMILY

from sgla.kernels.dispatch import op
from sgla.layers.build import Build
from sgla.layers.mlp import GatedMLP
from sgla.model.llama import Llama

__all__ = ["FAMILY", "Toy"]


@op
def relu_squared_mul(x: Tensor) -> Tensor:
    """``relu(gate)² * up``: x [T, 2f] (gate | up) -> [T, f]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.relu(gate).square() * up


class ToyMLP(GatedMLP):
    def __call__(self, x: Tensor) -> Tensor:
        return self.down(relu_squared_mul(self.gate_up(x)))


class Toy(Llama):
    def mlp(self, build: Build, name: str, index: int) -> GatedMLP:
        return ToyMLP(build, name, self.spec.hidden, self.spec.intermediate, "silu")

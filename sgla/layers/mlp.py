"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.ops import Activation
from sgla.layers.build import Build
from sgla.layers.linear import GateUpLinear, RowLinear
from sgla.quant import GROUP


class GatedMLP:
    """``down(act(gate(x)) * up(x))``: ``[T, d] -> [T, d]``."""

    def __init__(
        self,
        build: Build,
        name: str,
        hidden: int,
        intermediate: int,
        activation: Activation,
        bias: bool = False,
    ) -> None:
        self.gate_up = GateUpLinear(build, name, hidden, intermediate, bias)
        columns = build.shard.range(intermediate, GROUP)
        self.down = RowLinear(build, f"{name}.down_proj", hidden, intermediate, columns, bias)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(ops.act_mul(self.gate_up(x), self.activation))

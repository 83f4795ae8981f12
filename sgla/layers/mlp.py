"""The feed-forward block, gated or not."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.routing import Activation
from sgla.layers.build import Build
from sgla.layers.linear import GateUpLinear, MergedColumnLinear, RowLinear


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
        shard = build.shard.of_others
        self.lockstep = None if shard is build.shard else build.shard.lockstep
        columns = build.inside(intermediate, f"{name}.down_proj")
        self.down = RowLinear(build, f"{name}.down_proj", hidden, intermediate, columns, bias, shard)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if self.lockstep is not None:
            return self.lockstep.share(self.part, x)
        return self.down.total(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """Of which the sum over the ranks is the output."""
        return self.down.part(ops.act_mul(self.gate_up(x), self.activation))


class PlainMLP:
    """``down(act(up(x)))``: ``[T, d] -> [T, d]``. ``names``: of up and down in a checkpoint.
    ``activation``: as ``ops.activate`` has it."""

    def __init__(
        self,
        build: Build,
        name: str,
        hidden: int,
        intermediate: int,
        activation: str,
        bias: bool,
        names: tuple[str, str],
    ) -> None:
        up, down = (f"{name}.{part}" for part in names)
        shard = build.shard.of_others
        self.lockstep = None if shard is build.shard else build.shard.lockstep
        columns = build.inside(intermediate, down)
        self.up = MergedColumnLinear(build, hidden, [(up, intermediate, columns)], bias)
        self.down = RowLinear(build, down, hidden, intermediate, columns, bias, shard)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if self.lockstep is not None:
            return self.lockstep.share(self.part, x)
        return self.down.total(self.part(x))

    def part(self, x: Tensor) -> Tensor:
        """Of which the sum over the ranks is the output."""
        return self.down.part(ops.activate(self.up(x), self.activation))

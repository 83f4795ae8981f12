"""The mixture of experts: a router picks a few of many gated MLPs for each token."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.ops import Activation
from sgla.kernels.panels import GROUP
from sgla.layers.build import Build, Part, fill
from sgla.quant.weight import SourceTensor, Weight, storage


class ExpertNames(NamedTuple):
    """Names in a checkpoint: ``{module}.gate.weight`` is the router, ``{module}.experts.0.{gate}.weight`` and
    so on the experts. ``stacked`` is the module's name beside stacked experts: transformers 5 keeps them so
    in memory, and writes them if told not to convert back."""

    module: str
    gate: str
    up: str
    down: str
    stacked: str


class MoE:
    """``sum of p_e * down_e(act(gate_e(x)) * up_e(x))`` over the ``top_k`` experts e of each token:
    ``[T, d] -> [T, d]``.

    The probabilities p are the softmax of the router's logits in float32, with ``normalize`` scaled to the
    sum 1. The experts lie behind each other: ``gate_up [E * 2 f, d]`` (each expert's gate rows, then its up
    rows) and ``down [E * d, f]``. Ranks split every expert's f.
    """

    def __init__(
        self,
        build: Build,
        names: ExpertNames,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        normalize: bool,
        activation: Activation,
    ) -> None:
        self.shard, self.top_k, self.normalize, self.activation = build.shard, top_k, normalize, activation
        own = build.shard.range(intermediate, GROUP)
        inputs = [
            f"{names.module}.experts.{e}.{which}" for e in range(experts) for which in (names.gate, names.up)
        ]
        outputs = [f"{names.module}.experts.{e}.{names.down}" for e in range(experts)]
        self.router = storage(build.plain).empty(experts, hidden)
        self.gate_up = build.empty(experts * 2 * len(own), hidden, *inputs)
        self.down = build.empty(experts * hidden, len(own), *outputs)
        build.declare(
            f"{names.module}.gate.weight",
            (experts, hidden),
            lambda source: fill(self.router, 0, source, range(experts)),
        )
        for i, name in enumerate(inputs):
            take = partial(_take, self.gate_up, i * len(own), own, None)
            build.declare(f"{name}.weight", (intermediate, hidden), take)
        for e, name in enumerate(outputs):
            take = partial(_take, self.down, e * hidden, range(hidden), own)
            build.declare(f"{name}.weight", (hidden, intermediate), take)
        f = intermediate
        if names.stacked != names.module:
            build.stacks[f"{names.stacked}.gate.weight"] = (
                (experts, hidden),
                [Part(f"{names.module}.gate.weight", 0, range(experts))],
            )
        build.stacks[f"{names.stacked}.experts.gate_up_proj"] = (
            (experts, 2 * f, hidden),
            [
                Part(f"{names.module}.experts.{e}.{which}.weight", e, rows)
                for e in range(experts)
                for which, rows in ((names.gate, range(f)), (names.up, range(f, 2 * f)))
            ],
        )
        build.stacks[f"{names.stacked}.experts.down_proj"] = (
            (experts, hidden, f),
            [
                Part(f"{names.module}.experts.{e}.{names.down}.weight", e, range(hidden))
                for e in range(experts)
            ],
        )

    def __call__(self, x: Tensor) -> Tensor:
        y = ops.moe(x, self.router, self.gate_up, self.down, self.top_k, self.normalize, self.activation)
        return y if self.shard.size == 1 else ops.all_reduce(y, self.shard)


def _take(weight: Weight, at: int, rows: range, columns: range | None, source: SourceTensor) -> None:
    fill(weight, at, source, rows, columns)

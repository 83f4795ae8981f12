"""The mixture of experts: a router picks a few of many gated MLPs for each token."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.panels import GROUP
from sgla.kernels.routing import Gating, Routing
from sgla.layers.build import Build, Part, fill
from sgla.quant.weight import SourceTensor, Weight, storage


class MoE:
    """``sum of p_e * down_e(act(gate_e(x)) * up_e(x))`` over each token's experts e: ``[T, d] -> [T, d]``.

    The experts lie behind each other: ``gate_up [E * 2 f, d]`` (each expert's gate rows, then its up rows)
    and ``down [E * d, f]``. Ranks split every expert's f. transformers 5 keeps experts stacked in memory, and
    writes them so if told not to convert back.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        routing: Routing,
        activation: Gating,
    ) -> None:
        self.shard, self.routing, self.activation = build.shard, routing, activation
        own, f = build.shard.range(intermediate, GROUP), intermediate
        inputs = [f"{name}.experts.{e}.{which}_proj" for e in range(experts) for which in ("gate", "up")]
        outputs = [f"{name}.experts.{e}.down_proj" for e in range(experts)]
        self.router = storage(build.plain).empty(experts, hidden)
        self.gate_up = build.empty(experts * 2 * len(own), hidden, *inputs)
        self.down = build.empty(experts * hidden, len(own), *outputs)
        build.declare(
            f"{name}.gate.weight",
            (experts, hidden),
            lambda source: fill(self.router, 0, source, range(experts)),
        )
        for i, part in enumerate(inputs):
            take = partial(_take, self.gate_up, i * len(own), own, None)
            build.declare(f"{part}.weight", (f, hidden), take)
        for e, part in enumerate(outputs):
            take = partial(_take, self.down, e * hidden, range(hidden), own)
            build.declare(f"{part}.weight", (hidden, f), take)
        build.stacks[f"{name}.experts.gate_up_proj"] = (
            (experts, 2 * f, hidden),
            [
                Part(f"{part}.weight", i // 2, range(i % 2 * f, (i % 2 + 1) * f))
                for i, part in enumerate(inputs)
            ],
        )
        build.stacks[f"{name}.experts.down_proj"] = (
            (experts, hidden, f),
            [Part(f"{part}.weight", e, range(hidden)) for e, part in enumerate(outputs)],
        )

    def __call__(self, x: Tensor) -> Tensor:
        y = ops.moe(x, self.router, self.gate_up, self.down, self.routing, self.activation)
        return y if self.shard.size == 1 else ops.all_reduce(y, self.shard)


def _take(weight: Weight, at: int, rows: range, columns: range | None, source: SourceTensor) -> None:
    fill(weight, at, source, rows, columns)

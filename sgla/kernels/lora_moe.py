"""A mixture of experts whose rows may have adapters (LoRA), of which each expert has its own part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.dispatch import op
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.lora import Rows, Stack
from sgla.kernels.ops import Biases
from sgla.kernels.routing import Gating, Routing

if TYPE_CHECKING:
    from sgla.quant.weight import Weight


class ExpertStacks(NamedTuple):
    """What adapters add to the two products of all experts here. ``gate_up`` has a part for each matrix,
    those of an expert side by side, ``down`` one for each expert."""

    gate_up: Stack
    down: Stack


Adapted = tuple[ExpertStacks, Rows, bool]  # and whether the rows are the sampled ones


def _like(_: Adapted, x: Tensor, *__: Any) -> Tensor:
    return x.new_empty(x.shape)


@op(like=_like)
def lora_moe(
    adapted: Adapted,
    x: Tensor,
    router: Weight,
    gate_up: Weight,
    down: Weight,
    routing: Routing,
    activation: Gating,
    biases: Biases,
    routed: Tensor | None,
    counts: ExpertCounts | None,
    fixed: Tensor | None = None,
) -> Tensor:
    """``ops.moe`` and what the adapters of the rows add to each expert: [T, d] -> [T, d]."""
    count = len(adapted[0].down.sizes)

    def run(expert: int, x: Tensor, token: Tensor) -> Tensor:
        inner, outer = (None if b is None else b[expert] for b in (biases.gate_up, biases.down))
        first = partial(ops.linear, w=gate_up.part(expert, count), bias=inner)
        second = partial(ops.linear, w=down.part(expert, count), bias=outer)
        return lora_expert(adapted, expert, first, second, x, token, activation)

    return ops.mix(x, router, run, routing, biases, routed, counts, fixed)


def lora_expert(
    adapted: Adapted,
    expert: int,
    first: Callable[[Tensor], Tensor],
    second: Callable[[Tensor], Tensor],
    x: Tensor,
    token: Tensor,
    activation: Gating,
) -> Tensor:
    """What an expert, whose two products these are, makes of x [n, d], the rows ``token`` [n] of the step."""
    (gate_up, down), rows, sampled = adapted
    places, each = rows.places_of(sampled)[token], len(gate_up.sizes) // len(down.sizes)
    inner = _added(first(x), x, gate_up, range(each * expert, each * (expert + 1)), places)
    x = ops.gated(inner, activation)
    return _added(second(x), x, down, range(expert, expert + 1), places)


def _added(y: Tensor, x: Tensor, stack: Stack, parts: range, places: Tensor) -> Tensor:
    """y [T, n] of these parts, and what the adapters at ``places`` [T] add."""
    first = stack.ends[parts.start] - stack.sizes[parts.start]
    for place in places.unique().tolist():
        if not place or not (rank := stack.ranks[place - 1]):
            continue
        index = places == place
        for part in parts:
            begin, end = stack.ends[part] - stack.sizes[part], stack.ends[part]
            inner = F.linear(x[index], stack.a[place - 1, part, :rank].to(x))
            made = F.linear(inner, stack.b[place - 1, begin:end, :rank].to(x))
            y[index, begin - first : end - first] += made.to(y.dtype)
    return y

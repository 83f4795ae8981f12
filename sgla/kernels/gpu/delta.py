"""The gated delta rule with its gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.gpu import states
from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.rewrite import Work
from sgla.kernels.ops import StateLayer
from sgla.kernels.triton import delta


def refuses(work: Work, rule: Node) -> str | None:
    rates = [work.maker(x) if isinstance(x, Ref) else None for x in (rule.given["decay"], rule.given["beta"])]
    if rates[0] is None or rates[0] is not rates[1] or rates[0].op is not ops.decay_rates:
        return "decay and beta are made otherwise"
    return None


def make(work: Work, rule: Node) -> list[Node]:
    rates = work.maker(rule.given["decay"])
    assert rates is not None
    given = {name: x for name, x in rule.given.items() if name not in ("decay", "beta")} | rates.given
    return [Node("delta", _run, given, rule.results, rule.rows)]


def settle(work: Work) -> None:
    """Drop what makes decay and beta for nobody."""
    for node in work.named(ops.decay_rates):
        if not any(work.uses.get(number) for number in node.results):
            work.drop(node)


def _run(q: Tensor, k: Tensor, v: Tensor, state: StateLayer, batch: Any, **gates: Tensor) -> Tensor:
    """A step of decode rows is one kernel."""
    units, given = batch.states, delta.Gates(**gates)
    if isinstance(units, states.DeviceStates) and units.stretches is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        places = units.reads, units.writes, units.marks
        delta.decode(q, k, v, given, state.memory, *places, out, runs=units.runs)
        return out
    return states.gated_delta(q, k, v, *delta.decay_rates(*given), state, batch)

"""The gated delta rule with what stands around it: its gates before, and the gated norm behind."""

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


def refuses(work: Work, rule: Node, norm: Node) -> str | None:
    return delta.norm_refuses(rule.given["state"].memory)


def make(work: Work, rule: Node, norm: Node) -> list[Node]:
    own = {f"norm_{name}": norm.given[name] for name in ("gate", "weight", "eps", "activation")}
    given = rule.given | own
    makers = [work.maker(x) if isinstance(x, Ref) else None for x in (given["decay"], given["beta"])]
    rates = makers[0]
    if rates is not None and rates.op is ops.decay_rates and makers[1] is rates:
        given |= rates.given
        del given["decay"], given["beta"]
    return [Node("delta", _run, given, norm.results, norm.rows)]


def settle(work: Work) -> None:
    """Drop what makes decay and beta for nobody."""
    for node in work.named(ops.decay_rates):
        if not any(work.uses.get(number) for number in node.results):
            work.drop(node)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: StateLayer,
    batch: Any,
    norm_gate: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    norm_activation: str,
    **rates: Tensor,
) -> Tensor:
    """``rates``: decay and beta, or what makes them. A step of decode rows is one kernel."""
    units, silu = batch.states, norm_activation == "silu"
    given = delta.Rates(**rates) if "decay" in rates else delta.Gates(**rates)
    if isinstance(units, states.DeviceStates) and units.stretches is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        norm = delta.GatedNorm(norm_gate, norm_weight, norm_eps, silu)
        delta.decode(q, k, v, given, state.memory, units.reads, units.writes, units.marks, out, norm)
        return out
    decay, beta = given if isinstance(given, delta.Rates) else delta.decay_rates(*given)
    seen = states.gated_delta(q, k, v, decay, beta, state, batch)
    return delta.gated_rms_norm(seen, norm_gate, norm_weight, norm_eps, silu)

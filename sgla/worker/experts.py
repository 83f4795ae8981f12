"""What a runner says of the experts of its mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgla.dist import Shard
from sgla.kernels.placement import Placement
from sgla.model.base import CausalLM
from sgla.worker.facts import number_of


def counted(model: CausalLM, shard: Shard) -> dict[str, Any]:
    """How often each expert was chosen, by layer, since the last call, as far as this rank knows; and the
    experts of each rank, if these are whole. ``shard``: its place among those that share experts out."""
    taken = {number_of(name): counts.taken() for name, counts in model.counts.items()}
    told: dict[str, Any] = {"experts": taken}
    if shard.whole_experts:
        told["homes"] = {layer: shard.homes(layer, len(found)) for layer, found in taken.items()}
    return told


def placed(shard: Shard, placement: Placement) -> Shard:
    """``shard`` with experts where ``placement`` says."""
    if shard.mlps is not None:
        return replace(shard, mlps=replace(shard.mlps, placement=placement))
    return replace(shard, placement=placement)

"""How a GPU runner counts which experts tokens choose, and takes other experts. Graphs count nothing, so a
step that is counted is launched kernel by kernel; and they read from a table where experts are, so they stay
when some move."""

from __future__ import annotations

from functools import partial
from typing import Any

from sgla.errors import UnsupportedField
from sgla.kernels.placement import Placement
from sgla.messages import StepPlan
from sgla.worker.experts import counted, placed
from sgla.worker.gpu_weights import GpuWeights
from sgla.worker.runner import COUNTS, Command


class GpuExperts(GpuWeights):
    """``_every``: steps of which one is counted, by their numbers, since all ranks must launch alike; 0: none
    is."""

    _every = 0
    _counting = False

    def _commands(self) -> dict[str, Command]:
        """Beside those of all runners ``COUNTS``, of mixtures, where no step is under way: ``experts_start``
        has how many steps there are to one that is counted (``every``). Where experts are whole each rank
        counts its own. ``experts_place``: as that of ``CpuWeights``."""
        counts: dict[str, Command] = {verb: partial(self._count, verb) for verb in COUNTS}
        return super()._commands() | counts | {"experts_place": self._place}

    def _count(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        model, shard = self.steps.model, self.shard.of_mlps
        if not model.counts:
            raise UnsupportedField("the model has no experts that are known, so there is nothing to count")
        if self.shard.context is not None:
            raise UnsupportedField(
                "experts are not counted with --cp on GPUs, where ranks see parts of steps"
            )
        told = counted(model, shard)
        if verb == "experts_dump":
            return told if shard.whole_experts or shard.rank == 0 else {}
        self._every = args.get("every", 1) if verb == "experts_start" else 0
        return {}

    def _counts(self, plan: StepPlan) -> bool:
        """Whether this step is counted."""
        counting = self._every > 0 and plan.step % self._every == 0
        if counting != self._counting:
            self._counting = counting
            for counts in self.steps.model.counts.values():
                counts.active = counting
        return counting

    def _place(self, args: dict[str, Any]) -> None:
        self._check_moves(self.regions is None or self.regions.weights.mapped)
        placement = Placement(self.config.ep, self.config.redundant_experts, dict(args["homes"]))
        self.shard = placed(self.shard, placement)
        fresh = list[str]()
        for mixture in self.steps.model.mixtures.values():
            fresh += mixture.move(placement)
        if fresh:
            with self._changes() as declared:
                declared.part(self.source, fresh)

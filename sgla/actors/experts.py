"""What the ingress does with the experts of a mixture that its ranks have whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sgla.actors import placing
from sgla.actors.resting import Resting
from sgla.errors import UnsupportedField
from sgla.kernels.placement import Homes
from sgla.messages import Control

if TYPE_CHECKING:
    from sgla.sched.core import Stats


class MovesExperts(Resting):
    """A part of the ingress."""

    _pause: Callable[[bool], None] | None
    _stats: Callable[[], Stats] | None

    @abstractmethod
    async def control(self, command: Control) -> Any: ...

    async def place_experts(self) -> list[dict[str, Any]]:
        """Experts go to ranks by how often they were chosen since counting began; see ``move_experts``."""
        self.require_ready()
        placing.check(self.config)
        return await self.move_experts(*placing.counts_of(await self.count_experts("experts_dump")))

    async def move_experts(
        self, counts: Mapping[int, list[int]], before: Mapping[int, Homes]
    ) -> list[dict[str, Any]]:
        """See ``placing.place``. Requests wait meanwhile, and go on."""
        place = partial(placing.place, self.config, self.control, counts, before)
        made: list[dict[str, Any]] = await self._whole(self._between_steps(place))
        return made

    async def count_experts(self, verb: str, every: int = 0) -> Any:
        """The ranks' answers to ``experts_start``, ``experts_stop`` or ``experts_dump``. All begin and end to
        count with the same step. ``every``: steps of which one is counted; 0: somebody asks who wants all,
        which cannot be beside --rebalance-interval."""
        if self.config.rebalance_interval and not every and verb != "experts_dump":
            raise UnsupportedField(
                "experts are counted for --rebalance-interval, beside which nobody else can"
            )
        told = partial(self.control, Control(verb=verb, args={"every": every or 1}))
        return await (told() if verb == "experts_dump" else self._whole(self._between_steps(told)))

    async def _between_steps(self, do: Callable[[], Awaitable[Any]]) -> Any:
        pause, stats = self._pause, self._stats
        assert pause is not None
        assert stats is not None
        pause(True)
        try:
            await placing.still(lambda: stats().in_flight)
            return await do()
        finally:
            pause(self.paused)

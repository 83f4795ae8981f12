"""Experts go to other ranks while requests wait, by how often tokens have chosen them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from statistics import mean
from typing import Any, Protocol

from sgla.config import Config
from sgla.errors import NotReady, SglaError, UnsupportedField, WorkerDied
from sgla.kernels.placement import Homes, balance, balanced
from sgla.messages import Control

log = logging.getLogger(__name__)

EVERY = 32  # steps of which one is counted, where that costs time
GAIN = 0.02  # in balance, below which a move is not worth its wait
TRIES, TRY = 3000, 0.02  # looks whether the steps in flight have ended, and seconds between two


def check(config: Config) -> None:
    """Raises UnsupportedField."""
    if config.ep == 1:
        raise UnsupportedField("no rank has whole experts; start the server with --tp and --ep")


def counts_of(told: dict[str, Any]) -> tuple[dict[int, list[int]], dict[int, Homes]]:
    """How often each expert was chosen, by layer, and the experts of each rank, if they are whole: of the
    answers of all ranks, which have each counted some."""
    counts: dict[int, list[int]] = {}
    homes: dict[int, Homes] = {}
    for rank in told.get("ranks", []):
        for layer, numbers in rank.get("experts", {}).items():
            counts[layer] = [a + b for a, b in zip(counts.get(layer, [0] * len(numbers)), numbers)]
        homes |= rank.get("homes", {})
    return dict(sorted(counts.items())), homes


async def still(in_flight: Callable[[], int]) -> None:
    """Return when no step is under way. Raises NotReady."""
    for _ in range(TRIES):
        if not in_flight():
            return
        await asyncio.sleep(TRY)
    raise NotReady("the steps in flight do not end", retry_after=1)


async def place(
    config: Config,
    control: Callable[[Control], Awaitable[Any]],
    counts: Mapping[int, list[int]],
    before: Mapping[int, Homes],
) -> list[dict[str, Any]]:
    """Have experts go elsewhere by ``counts`` of layers; they are where ``before`` says, and no step is under
    way. Where they have gone, by layer, and how well ranks were and are balanced. Raises UnsupportedField
    where nothing was counted, and what loading does: then they are where they were."""
    if not any(map(any, counts.values())):
        raise UnsupportedField(
            "nothing was counted: POST /start_expert_distribution_record, let requests run, and come again"
        )
    homes = better(config, counts, before)
    try:
        await control(Control(verb="experts_place", args={"homes": [*homes.items()]}))
    except SglaError:  # other ranks may have them
        await control(Control(verb="experts_place", args={"homes": [*before.items()]}))
        raise
    return [
        {
            "layer": layer,
            "ranks": homes[layer],
            "balance_before": round(balance(numbers, before[layer]), 4),
            "balance": round(balance(numbers, homes[layer]), 4),
        }
        for layer, numbers in counts.items()
    ]


def better(config: Config, counts: Mapping[int, list[int]], before: Mapping[int, Homes]) -> dict[int, Homes]:
    """Where experts would be by these counts; those of a layer stay where ranks would get no more even."""
    found = dict(before)
    for layer, numbers in counts.items():
        homes = balanced(numbers, config.ep, config.redundant_experts)
        if balance(numbers, homes) > balance(numbers, before[layer]):
            found[layer] = homes
    return found


def evenness(counts: Mapping[int, list[int]], homes: Mapping[int, Homes]) -> float:
    """``balance``, the mean of layers."""
    return mean(balance(numbers, homes[layer]) for layer, numbers in counts.items())


class Watches(Protocol):
    """What ``Balancer`` needs of the ingress."""

    async def count_experts(self, verb: str, every: int = 0) -> Any: ...
    async def move_experts(
        self, counts: Mapping[int, list[int]], before: Mapping[int, Homes]
    ) -> list[dict[str, Any]]: ...


class Balancer:
    """Looks every ``--rebalance-interval`` seconds at how experts were chosen, and has them moved where ranks
    have had unequal work and it would be less so. ``balance``: at the latest look; None before; ``moves``:
    so far."""

    def __init__(self, config: Config, ingress: Watches) -> None:
        self._config, self._ingress = config, ingress
        self.balance: float | None = None
        self.moves = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        begun = False
        while True:
            try:
                if begun:
                    await self.look()
                else:
                    await self._ingress.count_experts("experts_start", EVERY)
                    begun = True
            except WorkerDied:
                return
            except SglaError as error:  # the server sleeps, or is busy with weights
                log.info("experts were not looked at: %s", error.message)
            await asyncio.sleep(self._config.rebalance_interval)

    async def look(self) -> None:
        counts, homes = counts_of(await self._ingress.count_experts("experts_dump"))
        if not any(map(any, counts.values())):
            return
        self.balance = found = evenness(counts, homes)
        gain = evenness(counts, better(self._config, counts, homes)) - found
        if found < self._config.rebalance_below and gain > GAIN:
            await self._ingress.move_experts(counts, homes)
            self.moves += 1
            log.info("experts have moved: ranks were balanced by %.3f, and %.3f better now", found, gain)

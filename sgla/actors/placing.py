"""Experts go to other ranks while requests wait, by how often tokens have chosen them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sgla.config import Config
from sgla.errors import NotReady, SglaError, UnsupportedField
from sgla.kernels.placement import Homes, balance, balanced
from sgla.messages import Control

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


async def place(config: Config, control: Callable[[Control], Awaitable[Any]]) -> list[dict[str, Any]]:
    """Where experts have gone, by layer, and how well ranks were and are balanced; no step is under way.
    Raises UnsupportedField where nothing was counted, and what loading does: then they are where they were.
    """
    counts, before = counts_of(await control(Control(verb="experts_dump")))
    if not any(map(any, counts.values())):
        raise UnsupportedField(
            "nothing was counted: POST /start_expert_distribution_record, let requests run, and come again"
        )
    homes = {
        layer: balanced(numbers, config.ep, config.redundant_experts) if any(numbers) else before[layer]
        for layer, numbers in counts.items()
    }
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

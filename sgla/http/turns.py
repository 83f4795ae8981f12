"""Turns of the loop that handlers of large requests leave to others."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from typing import TypeVar

from sgla import clock

# That a small request takes from its bytes to its answer. Whoever comes between two pieces of long work would wait for a piece in each.
TURNS = 3
MANY = 256  # prompts, choices or messages, that some milliseconds of work are spent on
SLICE = 0.005  # seconds of work on many items before others have the loop

T = TypeVar("T")


async def pause() -> None:
    """Let those who have come be answered."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def stepped(work: Generator[None, None, T]) -> T:
    """What ``work`` returns, with a pause wherever it yields."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await pause()


async def paced(items: Iterable[T]) -> list[T]:
    """The items of an iterable that makes each when it is asked for it, with pauses."""
    made, since = [], clock.now()
    for item in items:
        made.append(item)
        if clock.now() > since + SLICE:
            await pause()
            since = clock.now()
    return made

"""Turns of the loop that handlers of large requests, and of many at once, leave to others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from sgla import clock
from sgla.per_client import PerClient

# That a small request takes from its bytes to its answer.
# Whoever comes between two pieces of long work would wait for a piece in each.
TURNS = 4
MANY = 256  # prompts, choices or messages, that some milliseconds of work are spent on
SLICE = 0.005  # seconds of work on many items, or of tasks that come together, before others have the loop
AT_ONCE = 16  # tasks that have waited and go on in one turn

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


class Door:
    """Lets tasks go on as long as those of one turn of the loop have not taken ``SLICE`` together, and the
    others a few in each later turn, by turns between clients: when thousands come at once, whoever comes then
    does not wait for all of them."""

    def __init__(self) -> None:
        self._since: float | None = None  # when the first task of this turn went on
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def enter(self, client: str) -> None:
        now = clock.now()
        if self._since is None:
            self._since = now
            asyncio.get_running_loop().call_soon(self._turn)
        if not self._waiting and now <= self._since + SLICE:
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(place)
        await place

    def _turn(self) -> None:
        """A new turn has begun: those who wait come first."""
        self._since = None
        room = AT_ONCE
        while self._waiting and room:
            client, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[client] = places  # behind the others
            if not place.done():  # else its task was cancelled
                place.set_result(None)
                room -= 1
        if self._waiting:
            self._since = clock.now()
            asyncio.get_running_loop().call_soon(self._turn)


class Desk:
    """Serves ``most`` tasks at a time, by turns between clients: a task waits for the earlier ones of its
    client, then for one of each other client."""

    def __init__(self, most: int = 1) -> None:
        self.everybodys = asyncio.Semaphore(most)
        self._own = PerClient(1)

    def own(self, client: str) -> asyncio.Semaphore:
        """Whoever has it is the one task of ``client`` that asks for ``everybodys``."""
        return self._own.of(client)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        async with self.own(client), self.everybodys:
            yield

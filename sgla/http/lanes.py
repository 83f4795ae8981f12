"""Work of handlers that takes longer than a step may wait: beside the loop, by size, so that small work does not wait for large."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from sgla.errors import Overloaded
from sgla.http.clients import CLIENT
from sgla.http.wire import encode

INLINE_SIZE = 4096  # characters or tokens that the loop does itself
SMALL_SIZE = 65536  # of work in the lane for small ones
SLICE = 4096  # items that are encoded in one turn of the loop

T = TypeVar("T")


class Lane:
    """``threads`` for work of one size. Of one client ``each`` things may be under way, or wait; of all clients ``most``."""

    def __init__(self, name: str, threads: int, each: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._each, self._most = each, most
        self._clients: Counter[str] = Counter()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Raises Overloaded. A caller that goes away leaves its place when the work has ended."""
        if self._clients[client] >= self._each or self._clients.total() >= self._most:
            raise Overloaded(
                f"{self._each} texts of one client, and {self._most} of all, are worked on at a time; please retry later",
                retry_after=1.0,
            )
        self._clients[client] += 1
        future = self._pool.submit(work)
        loop = asyncio.get_running_loop()
        future.add_done_callback(
            lambda done: loop.is_closed() or loop.call_soon_threadsafe(self._leave, client)
        )
        return await asyncio.wrap_future(future)

    def _leave(self, client: str) -> None:
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]


_small, _large = Lane("small", 2, 64, 1024), Lane("large", 2, 2, 16)


async def beside(request: web.Request, size: int, work: Callable[[], T], inline: int = INLINE_SIZE) -> T:
    """``work()``, here if ``size`` (characters or tokens) is at most ``inline``. Raises Overloaded, with what ``work`` raises."""
    if size <= inline:
        return work()
    return await (_small if size <= SMALL_SIZE else _large).run(request[CLIENT].name, work)


async def sliced(items: Sequence[Any], shape: Callable[[Any], Any] | None = None, size: int = SLICE) -> Any:
    """A long list as JSON, each item as ``shape`` makes it, which takes a turn of the loop for each ``size`` items; a short one as it is."""
    if len(items) <= size:
        return list(items) if shape is None else list(map(shape, items))
    parts = []
    for at in range(0, len(items), size):
        part = items[at : at + size]
        parts.append(encode(list(part) if shape is None else list(map(shape, part)))[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def total(texts: Iterable[Any]) -> int:
    """The size of a list: of its members, and a little for each."""
    return sum(64 + len(text) for text in texts)

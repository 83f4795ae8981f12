"""Threads that the clients use in turn, so that nobody waits for all that another has asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")
Then = Callable[[T], None]


class Turns(Generic[T]):
    """Runs work in ``threads``: a client's in the order in which it came, one piece of each client after the other. The pool gets no more
    than it has threads, so that what waits can be dropped. Called in the loop only."""

    def __init__(self, name: str, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._waiting: OrderedDict[str, OrderedDict[str, tuple[Callable[[], T], Then[T]]]] = OrderedDict()

    def put(self, client: str, key: str, work: Callable[[], T], then: Then[T]) -> None:
        """Call ``work`` in a thread, and ``then`` in the loop with what it returns; neither may raise. No two that wait may have the same
        ``key``."""
        self._waiting.setdefault(client, OrderedDict())[key] = work, then
        self._fill()

    def drop(self, client: str, key: str) -> None:
        """Forget what waits under ``key``, if it does."""
        queue = self._waiting.get(client)
        if queue is not None:
            queue.pop(key, None)
            if not queue:
                del self._waiting[client]

    def close(self) -> None:
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._free and self._waiting:
            client, queue = self._waiting.popitem(last=False)
            _, (work, then) = queue.popitem(last=False)
            if queue:
                self._waiting[client] = queue  # behind the others
            self._free -= 1
            self._pool.submit(work).add_done_callback(partial(self._back, then))

    def _back(self, then: Then[T], done: Future[T]) -> None:
        if not done.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended, then, done.result())

    def _ended(self, then: Then[T], result: T) -> None:
        self._free += 1
        self._fill()
        then(result)

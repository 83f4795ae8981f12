"""Work on texts that takes longer than a step may wait: beside the loop, by size, so that small work does not
wait for large, and by client, so that nobody waits for all that another has asked for."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from traceback import clear_frames
from typing import Any, TypeVar

from sgla.errors import Overloaded

# Characters, bytes or tokens that the loop does itself: it takes ~1 us for 10 of them, a thread more.
INLINE_SIZE = 4096
SMALL_SIZE = 65536  # of work in the lane for small work
HELD = 64  # texts of one client for which handlers wait

T = TypeVar("T")


class Lane:
    """``threads`` that the clients use in turn: a client's work in the order in which it came, one piece of
    each client after the other, and a client's in all threads but one, so that another finds it free. The
    pool gets no more than it has threads, so that what waits can be dropped. Called in the loop only."""

    def __init__(self, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._most = max(1, threads - 1)
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[object, tuple[Callable[[], Any], Callable[[Any], None]]]]
        self._waiting = OrderedDict()

    def put(self, client: str, key: object, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Call ``work`` in a thread, and ``then`` in the loop with what it returns; neither may raise. No two
        of a client that wait may have the same ``key``."""
        self._waiting.setdefault(client, OrderedDict())[key] = work, then
        self._fill()

    def drop(self, client: str, key: object) -> None:
        """Forget what waits under ``key``, if it does."""
        queue = self._waiting.get(client)
        if queue is not None:
            queue.pop(key, None)
            if not queue:
                del self._waiting[client]

    def close(self) -> None:
        """Begin nothing more."""
        self._most = 0
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self) -> None:
        while self._free and (client := self._next()) is not None:
            queue = self._waiting.pop(client)
            _, (work, then) = queue.popitem(last=False)
            if queue:
                self._waiting[client] = queue  # behind the others
            self._free -= 1
            self._running[client] += 1
            back = partial(self._back, asyncio.get_running_loop(), client, then)
            self._pool.submit(work).add_done_callback(back)

    def _next(self) -> str | None:
        return next((client for client in self._waiting if self._running[client] < self._most), None)

    def _back(
        self, loop: asyncio.AbstractEventLoop, client: str, then: Callable[[Any], None], done: Future[Any]
    ) -> None:
        if not done.cancelled() and not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, client, then, done.result())

    def _ended(self, client: str, then: Callable[[Any], None], result: Any) -> None:
        self._free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._fill()
        then(result)


class Lanes:
    """A lane for small work and one for large."""

    def __init__(self, small: int = 3, large: int = 2) -> None:
        """The numbers of threads."""
        self.small, self.large = Lane("small", small), Lane("large", large)
        self._held: Counter[str] = Counter()

    def put(
        self, client: str, key: object, size: int, work: Callable[[], T], then: Callable[[T], None]
    ) -> None:
        """See ``Lane.put``."""
        (self.small if size <= SMALL_SIZE else self.large).put(client, key, work, then)

    def drop(self, client: str, key: object) -> None:
        for lane in (self.small, self.large):
            lane.drop(client, key)

    async def run(self, client: str, size: int, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Raises Overloaded."""
        if self._held[client] >= HELD:
            raise Overloaded(
                f"{HELD} texts of yours are worked on or wait for that, which is the limit; retry later",
                retry_after=1.0,
            )
        ended: asyncio.Future[Future[T]] = asyncio.get_running_loop().create_future()
        self._held[client] += 1
        self.put(client, ended, size, partial(attempt, work), partial(settle, ended))
        try:
            return (await ended).result()
        finally:
            self.drop(client, ended)
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]

    def close(self) -> None:
        for lane in (self.small, self.large):
            lane.close()


def attempt(work: Callable[[], T]) -> Future[T]:
    """What ``work`` returns or raises, as a future that is done."""
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except BaseException as error:  # panics of libraries in Rust are no Exceptions
        clear_frames(error.__traceback__)  # what the work held must not wait for the collector
        done.set_exception(error)
    return done


def settle(ended: asyncio.Future[Future[T]], done: Future[T]) -> None:
    if not ended.done():
        ended.set_result(done)

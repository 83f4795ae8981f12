"""Has memory given back when the process is larger than it was."""

from __future__ import annotations

import asyncio
import gc
import time

from sgla import clock, memory

INTERVAL = 0.5  # seconds between looks
LONGEST = 16.0  # seconds between two returns at most
SLACK = 4 << 20  # bytes that are not worth the while
CREPT = 2 * SLACK  # bytes of slow growth that are
IDLE = 0.05  # of a core
FEW = 50_000  # objects that are looked through in 20 ms


class MemoryWatch:
    """What is freed goes back to the system, in a thread: soon after each growth, sudden or slow, then ever
    more rarely while the process is larger than at its smallest, since what was in use at first may be freed
    later. Failed requests leave objects that refer to each other, and perhaps to large ones, so those are
    collected first, the oldest only if they are few and the loop has nothing to do. On the running loop until
    ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0  # since the last return
        self._pause = 1  # looks until the next
        self._since = clock.now(), time.thread_time()  # the last return
        if memory.CAN:
            self._least = self._last = self._left = memory.resident()
            self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def _look(self) -> None:
        now = memory.resident()
        self._looks += 1
        if now > self._last + SLACK:  # it still grows
            self._looks, self._pause = 0, 1
        elif self._looks == 1:
            self._left = now  # of the last return
        elif now > self._left + CREPT:
            self._pause = 1
        self._least, self._last = min(self._least, now), now
        if now > self._least + SLACK and self._looks >= self._pause:
            self._looks, self._pause = 0, min(2 * self._pause, int(LONGEST / INTERVAL))
            gc.collect(2 if self._idle() and len(gc.get_objects(2)) < FEW else 1)
            self._loop.run_in_executor(None, memory.give_back).add_done_callback(lambda _: self._wait())
        else:
            self._wait()

    def _idle(self) -> bool:
        """Whether this thread has done little since the last return."""
        wall, busy = self._since
        self._since = clock.now(), time.thread_time()
        return self._since[1] - busy < IDLE * (self._since[0] - wall)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

"""Has memory given back when the process is larger than it was."""

from __future__ import annotations

import asyncio
import gc

from sgla import memory

INTERVAL = 0.5  # seconds between looks
LONGEST = 64.0  # seconds between two returns at most
SLACK = 4 << 20  # bytes that are not worth the while


class MemoryWatch:
    """What is freed goes back to the system, in a thread: soon after each growth, then ever more rarely while
    the process is larger than at its smallest, since what was in use at first may be freed later. Failed
    requests leave objects that refer to each other, and perhaps to large ones, so those are collected first,
    but for the oldest. On the running loop until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0  # since the last return
        self._pause = 1  # looks until the next
        if memory.CAN:
            self._least = self._last = memory.resident()
            self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def _look(self) -> None:
        now = memory.resident()
        self._looks += 1
        if now > self._last + SLACK:  # it still grows
            self._looks, self._pause = 0, 1
        self._least, self._last = min(self._least, now), now
        if now > self._least + SLACK and self._looks >= self._pause:
            self._looks, self._pause = 0, min(2 * self._pause, int(LONGEST / INTERVAL))
            gc.collect(1)
            self._loop.run_in_executor(None, memory.give_back).add_done_callback(lambda _: self._wait())
        else:
            self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

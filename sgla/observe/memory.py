"""Has memory given back when the process is larger than it needs to be."""

from __future__ import annotations

import asyncio

from sgla import memory

INTERVAL = 0.5  # seconds
SLACK = 4 << 20  # bytes that are not worth the while


class MemoryWatch:
    """After each growth, when it has come to its end, what was freed goes back to the system, in a thread. On the running loop until
    ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        if memory.CAN:
            self._kept = self._last = memory.resident()  # what was left the last time, and at the last look
            self._wait()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(INTERVAL, self._look)

    def _look(self) -> None:
        now = memory.resident()
        grew, self._last = now > self._last + SLACK, now
        if now > self._kept + SLACK and not grew:
            self._loop.run_in_executor(None, memory.give_back).add_done_callback(self._given)
            return
        self._kept = min(self._kept, now)
        self._wait()

    def _given(self, done: asyncio.Future[None]) -> None:
        self._kept = self._last = memory.resident()
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

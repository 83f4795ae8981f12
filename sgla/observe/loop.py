"""How late the main loop is: what else it does delays every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sgla import clock

INTERVAL = 0.1  # seconds; often enough to see a stall, and about nothing to pay


class LoopWatch:
    """Tells ``report`` ten times a second by how many seconds the running loop called it too late,
    until ``close``."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._wait()

    def _wait(self) -> None:
        self._due = clock.now() + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._tick)

    def _tick(self) -> None:
        self._report(max(0.0, clock.now() - self._due))
        self._wait()

    def close(self) -> None:
        self._timer.cancel()

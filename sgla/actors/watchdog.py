"""Whether the workers still move: the time since they last brought something of what they owe."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from sgla import clock

TICK = 0.25  # seconds
OVERDUE = 30.0  # seconds without a result after which the server is not ready
# Both limits grow with the longest wait that ended well,
# since prompts behind long histories take longer than all before them.
OVERDUE_FACTOR, TIMEOUT_FACTOR = 4, 10


class Watchdog:
    """``expect`` is called for every step and command that is sent, ``received`` for their answers. Time
    counts while an answer is owed and this process runs: not while requests merely wait, are paused, or are
    prepared.

    ``on_timeout`` is called once, when nothing has come for ``timeout`` seconds,
    or for ten times the longest wait that ended; 0: never.
    """

    def __init__(self, timeout: float, on_timeout: Callable[[], None]) -> None:
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._loop = asyncio.get_running_loop()
        self._owed = 0
        self._waited = 0.0
        self._longest = 0.0
        self._ticked = clock.now()
        self._timer = self._loop.call_later(TICK, self._tick)

    def expect(self) -> None:
        """The workers owe one answer more."""
        if not self._owed:
            self._waited = 0.0
        self._owed += 1

    def received(self, answers: int = 1) -> None:
        self._owed -= answers
        self.moves()

    def moves(self) -> None:
        """An answer takes long, and comes nearer."""
        self._longest = max(self._longest, self._waited)
        self._waited = 0.0

    @property
    def trouble(self) -> str:
        """What is wrong; "" if nothing is overdue."""
        overdue = max(OVERDUE, OVERDUE_FACTOR * self._longest)
        if not self._owed or self._waited <= min(overdue, self._limit):
            return ""
        return f"no step has finished for {self._waited:.0f} s"

    @property
    def _limit(self) -> float:
        return max(self._timeout, TIMEOUT_FACTOR * self._longest) if self._timeout else math.inf

    def _tick(self) -> None:
        now = clock.now()
        if self._owed:
            self._waited += min(now - self._ticked, 2 * TICK)
        self._ticked = now
        if self._owed and self._waited > self._limit:
            self._on_timeout()
        else:
            self._timer = self._loop.call_later(TICK, self._tick)

    def close(self) -> None:
        self._timer.cancel()

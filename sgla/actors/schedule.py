"""The asyncio shell of the pure scheduler: mailbox and results in, plans and Deltas out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sgla import clock
from sgla.actors.base import Actor
from sgla.errors import SglaError
from sgla.messages import Cancel, Delta, Deltas, Keep, Moved, Ready, StepResult, Submit

if TYPE_CHECKING:
    import asyncio

    from sgla.actors.detokenize import Detokenize
    from sgla.actors.watchdog import Watchdog
    from sgla.executor.base import Executor
    from sgla.observe.metrics import Metrics
    from sgla.sched.core import Core
    from sgla.sched.parts import PartedCore

TICK = 0.05  # seconds between looks at deadlines while requests are open, and to the last one behind them
TURN = 512  # requests that come or go in one turn of the loop: a few ms


class Schedule(Actor[Submit | Ready | Cancel | Keep]):
    """Feeds the executor.
    On a result the order is: retire, **plan and submit the next steps**, then publish."""

    def __init__(
        self,
        core: Core | PartedCore,
        executor: Executor,
        detokenize: Detokenize,
        metrics: Metrics,
        watchdog: Watchdog,
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(on_crash)
        self.core = core
        self._executor = executor
        self._detokenize = detokenize
        detokenize.caught_up = partial(self.guard, self._go_on)
        self._metrics = metrics
        self._watchdog = watchdog
        self.rest: Callable[[], None] = lambda: None  # called now and then, when nobody waits for a step
        self.after: Callable[[], None] = lambda: None  # called behind each plan, and what is published
        self._paused = False
        self._woken = 0  # number of the step that ended an idle time, whose gap is nobody's delay
        self._tick: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None  # until the core's ``next_plan``
        self._fd = executor.results_fd()
        self._loop.add_reader(self._fd, self.guard, self._on_results)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        for timer in (self._tick, self._later):
            if timer is not None:
                timer.cancel()

    def pause(self, paused: bool) -> None:
        """Plan no more steps but for copies, or go on; requests keep what they have. Steps in flight come to
        their end."""
        self._paused = paused
        self._advance(clock.now(), woken=not paused)

    def flush_cache(self, tiers: bool = True) -> bool:
        """See ``Core``. Tiers are told at once."""
        flushed = self.core.flush_cache(tiers)
        self._advance(clock.now())
        return flushed

    def handle(self, messages: deque[Submit | Ready | Cancel | Keep]) -> None:
        now = clock.now()
        deltas: list[Delta] = []
        idle = self.core.idle
        for _ in range(min(len(messages), TURN)):
            message = messages.popleft()
            if isinstance(message, Cancel):
                final = self.core.cancel(message.rid, message.reason)
                if final is not None:
                    deltas.append(final)
                continue
            if isinstance(message, Ready):
                self.core.ready(message)
                continue
            if isinstance(message, Keep):
                self.core.keep(message)
                continue
            try:
                self.core.offer(message, now)
            except SglaError as error:
                deltas.append(Delta(rid=message.rid, finish="error", error=error.rejected(message.parent)))
        if messages:
            self.put_back(messages)
        self._advance(now, woken=idle)
        self._publish(deltas)
        self._observe([])

    def _on_results(self) -> None:
        now = clock.now()
        deltas: list[Delta] = []
        results: list[StepResult] = []
        found = self._executor.drain()
        if not found:  # others have to answer, too
            return
        for told in found:
            if isinstance(told, Moved):
                self.core.moved(told)
            else:
                deltas.extend(self.core.retire(told, now))
                results.append(told)
        self._watchdog.received(len(results))
        self._advance(now)
        self._publish(deltas)
        self._observe(results)

    def _go_on(self) -> None:
        self._advance(clock.now(), woken=True)

    def _on_time(self) -> None:
        self._later = None
        self._advance(clock.now())

    def _advance(self, now: float, woken: bool = False) -> None:
        while self._may_plan() and (plan := self.core.plan(now, self._paused)) is not None:
            if woken:
                self._woken, woken = plan.step, False
            self._executor.submit(plan)
            self._watchdog.expect()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._may_plan() and now < self.core.next_plan < math.inf:
            self._later = self._loop.call_later(self.core.next_plan - now, self.guard, self._on_time)
        if self._tick is None and not self.core.idle:
            self._tick = self._loop.call_later(TICK, self.guard, self._on_tick)

    def _may_plan(self) -> bool:
        """Not while the outputs of earlier steps wait to be sent."""
        return not self._detokenize.behind

    def _publish(self, deltas: list[Delta]) -> None:
        if deltas:
            self._detokenize.post(Deltas(deltas))

    def _on_tick(self) -> None:
        self._tick = None
        now = clock.now()
        deltas = self.core.expire(now)
        self._advance(now)
        self._publish(deltas)
        self._observe([])
        self.rest()

    def _observe(self, results: list[StepResult]) -> None:
        """After publishing: nothing waits for the metrics."""
        for result in results:
            self._metrics.step(result.seconds, 0.0 if result.step == self._woken else result.gap)
        for finished in self.core.drain_finished():
            self._metrics.finished(finished)
        self.after()

"""What the main process needs of the workers, whatever runs them."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from sgla.errors import WorkerDied
from sgla.messages import Control, Facts, Moved, Progress, StepPlan, StepResult

STACKS = signal.SIGUSR1  # has a worker print the stacks of its threads


class Executor(Protocol):
    """Runs step plans in the order of ``submit`` and gives one result each, in the same order; and tells when
    each of their copies has ended.

    All methods are called from one thread, the loop's; callbacks come there too.
    Once ``on_death`` was called no result comes.
    """

    async def start(self, on_progress: Callable[[Progress], None]) -> Facts:
        """Load the model. Raises ConfigError (wrong files or flags) or WorkerDied."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hand over a step; never blocks. More steps than the depth allows is a bug, not a wait."""
        ...

    def results_fd(self) -> int:
        """A descriptor that is readable while results wait."""
        ...

    def drain(self) -> list[StepResult | Moved]:
        """The results that wait, and the copies that have ended on all ranks; clears the descriptor.
        A step that failed gives none: ``on_death`` tells it."""
        ...

    async def control(self, command: Control) -> dict[str, Any]:
        """Out of the step path. Raises UnsupportedField for a verb this executor lacks."""
        ...

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        """Whom to tell, once, when the workers are gone. Set before ``start``."""
        ...

    async def close(self) -> None:
        """Stop the workers; idempotent."""
        ...

    async def inquire(self) -> str:
        """For people: what state the workers are in, though they do not answer.
        Their stacks go to the log by themselves."""
        ...

    def kill(self) -> None:
        """End worker processes at once and remove their files, in any thread; ``on_death`` is not told."""
        ...


class Results:
    """Step results and ends of copies on their way to the loop:
    any thread puts, the loop drains when ``fd`` (an eventfd) is readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: deque[StepResult | Moved] = deque()

    def put(self, result: StepResult | Moved) -> None:
        self._waiting.append(result)
        os.eventfd_write(self.fd, 1)

    def drain(self) -> list[StepResult | Moved]:
        """Clears first: a result put meanwhile is taken now or signalled again, never forgotten."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        waiting = self._waiting
        return [waiting.popleft() for _ in range(len(waiting))]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

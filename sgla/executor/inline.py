"""The worker's runner on a thread of this process:
for debugging and for machines where a second process is unwelcome."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from sgla import clock
from sgla.config import Config
from sgla.errors import WorkerDied
from sgla.executor.base import Results
from sgla.executor.procs import runner_of
from sgla.messages import Control, Facts, Moved, Progress, StepPlan, StepResult

if TYPE_CHECKING:
    from sgla.hub.source import ModelSource
    from sgla.worker.loop import Runs

log = logging.getLogger(__name__)

Command = tuple[Control, "asyncio.Future[dict[str, Any]]"]
PATIENCE = 10.0  # seconds for a step that runs, and for what has to be given back


class InlineExecutor:
    """See ``executor.base.Executor``. One rank only."""

    def __init__(self, config: Config, source: ModelSource | None, *, runner: str | None = None) -> None:
        self._config = config
        self._source = source
        self._runner = runner or runner_of(config)
        self._results = Results()
        self._inbox: SimpleQueue[StepPlan | Command | None] = SimpleQueue()
        self._replies: set[asyncio.Future[dict[str, Any]]] = set()  # to come
        self._thread: Thread | None = None
        self._on_death: Callable[[WorkerDied], None] | None = None
        self._gone = False

    async def start(self, on_progress: Callable[[Progress], None]) -> Facts:
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[Facts] = self._loop.create_future()
        self._thread = Thread(target=self._run, args=(on_progress, ready), name="worker", daemon=True)
        self._thread.start()
        return await ready

    def _run(self, on_progress: Callable[[Progress], None], ready: asyncio.Future[Facts]) -> None:
        begun = clock.now()
        try:
            make = resolve_name(self._runner)
            imported = clock.now()
            runner = make(
                self._config,
                self._source,
                0,
                1,
                "",
                lambda p: self._call(on_progress, p),
            )
        except BaseException as error:
            self._settle(ready, error)
            return
        runner.facts.timings = {"import": imported - begun} | runner.facts.timings
        self._settle(ready, runner.facts)
        self._serve(runner)

    def _serve(self, runner: Runs) -> None:
        from sgla.worker.loop import AtOnce, answer, may_copy

        steps = AtOnce(runner)
        while (item := self._next(runner)) is not None:
            if isinstance(item, tuple):
                command, future = item
                made = answer(runner, command)
                if isinstance(made, Future):
                    made.add_done_callback(partial(self._settle_later, future))
                else:
                    self._settle(future, made)
                continue
            try:
                self._results.put(steps.launch(item).result)
                if may_copy(runner.facts):
                    self._tell_copies(runner)
            except BaseException as error:
                traceback.print_exc()
                died = WorkerDied(f"a model step failed: {type(error).__name__}: {error}")
                self._call(self._died, died)
                return
        runner.close()

    def _next(self, runner: Runs) -> StepPlan | Command | None:
        """What is to be done next. While copies are under way their ends are told."""
        from sgla.worker.loop import COPYING, may_copy

        while may_copy(runner.facts) and runner.copying:
            try:
                return self._inbox.get(timeout=COPYING)
            except Empty:
                self._tell_copies(runner)
        return self._inbox.get()

    def _tell_copies(self, runner: Runs) -> None:
        for moved in runner.moved():
            self._results.put(moved)

    def _settle_later(self, future: asyncio.Future[Any], done: Future[dict[str, Any]]) -> None:
        from sgla.worker.loop import outcome

        self._settle(future, outcome(done, "command"))

    def _settle(self, future: asyncio.Future[Any], outcome: Any) -> None:
        def settle() -> None:
            if future.done():
                return
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._call(settle)

    def _call(self, do: Callable[..., object], *args: object) -> None:
        """In the loop, unless that has ended without this thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(do, *args)

    def _died(self, error: WorkerDied) -> None:
        for future in self._replies:
            if not future.done():
                future.set_exception(error)
        if not self._gone and self._on_death is not None:
            self._on_death(error)
        self._gone = True

    def submit(self, plan: StepPlan) -> None:
        if not self._gone:
            self._inbox.put(plan)

    def results_fd(self) -> int:
        return self._results.fd

    def drain(self) -> list[StepResult | Moved]:
        results = self._results.drain()
        return [] if self._gone else results

    async def control(self, command: Control) -> dict[str, Any]:
        """``{"ranks": [reply]}``. Raises the runner's SglaError, or WorkerDied."""
        if self._gone:
            raise WorkerDied("the worker is gone")
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._replies.add(future)
        self._inbox.put((command, future))
        try:
            return {"ranks": [await future]}
        finally:
            self._replies.discard(future)

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        self._on_death = callback

    async def close(self) -> None:
        self._gone = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            end = clock.now() + PATIENCE
            while thread.is_alive():  # joined by no other thread: none begins when the interpreter ends
                if clock.now() > end:
                    log.error("the worker's thread does not end, as on a disk that hangs, and is left behind")
                    return  # it may still write results
                await asyncio.sleep(0.002)
        self._results.close()

    async def inquire(self) -> str:
        faulthandler.dump_traceback()
        return "a thread of this process, see its stack above"

    def kill(self) -> None:
        self._gone = True

"""The worker's own loop: wait for a plan, execute it, publish the result."""

from __future__ import annotations

import select
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from sgla import clock
from sgla.errors import SglaError
from sgla.messages import Control, Facts, StepPlan, StepResult


class Ring(Protocol):
    """The part of ``executor.ring.Ring`` that the loop uses."""

    @property
    def empty(self) -> bool: ...
    def fileno(self) -> int: ...
    def push(self, record: bytes) -> None: ...
    def pop(self) -> bytes | None: ...
    def clear(self) -> None: ...


class Runs(Protocol):
    """What the loop needs of a runner; its constructor takes ``(config, source, rank, size, rendezvous, report)``."""

    facts: Facts

    def execute(self, plan: StepPlan) -> StepResult: ...
    def control(self, command: Control) -> dict[str, Any]: ...


class Inbox(threading.Thread):
    """Takes plans and commands in while a step is computed, so that the next one begins at once.

    ``items`` gives StepPlan and Control in the order of their arrival, then None once the main process has closed ``pipe``.
    A failure to read is an item too.
    """

    def __init__(self, plans: Ring, pipe: Connection) -> None:
        super().__init__(daemon=True, name="inbox")
        self.items: SimpleQueue[StepPlan | Control | Exception | None] = SimpleQueue()
        self._plans, self._pipe = plans, pipe
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode

    def run(self) -> None:
        anything = select.poll()
        anything.register(self._pipe, select.POLLIN)
        anything.register(self._plans, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in anything.poll()]
                self._plans.clear()
                while (record := self._plans.pop()) is not None:
                    self.items.put(self._decode(record))
                if self._pipe.fileno() in ready:
                    self.items.put(self._pipe.recv())
        except (EOFError, ConnectionResetError):
            self.items.put(None)
        except Exception as error:
            self.items.put(error)


def serve(runner: Runs, plans: Ring, results: Ring | None, pipe: Connection, spin: float) -> bool:
    """Run until the main process closes ``pipe`` (True) or a step fails (False; the traceback is on stderr).

    ``results`` is None on ranks that do not answer. ``spin`` is for loops that wait for a device.
    """
    encode = msgspec.msgpack.Encoder().encode
    inbox = Inbox(plans, pipe)
    inbox.start()
    free = clock.now()
    while (item := inbox.items.get()) is not None:
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Control):
            _reply(runner, pipe, item)
            continue
        result = timed(runner, item, free)
        free = clock.now()
        if results is not None:
            results.push(encode(result))
        if result.error is not None:
            return False
    return True


def timed(runner: Runs, plan: StepPlan, free: float) -> StepResult:
    """Execute ``plan`` and fill in the times; ``free`` is when the worker became idle. A failure becomes a result too."""
    started = clock.now()
    try:
        result = runner.execute(plan)
    except Exception as error:
        traceback.print_exc()
        result = StepResult(step=plan.step, tokens=b"", error=f"{type(error).__name__}: {error}")
    result.gap, result.seconds = started - free, clock.now() - started
    return result


def _answer(runner: Runs, pipe: Connection) -> bool:
    """Answer one control command; False once the main process is gone."""
    try:
        command = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False
    _reply(runner, pipe, command)
    return True


def _reply(runner: Runs, pipe: Connection, command: Control) -> None:
    try:
        reply: dict[str, Any] | SglaError = runner.control(command)
    except SglaError as error:
        reply = error
    pipe.send(("reply", reply))

"""The worker's own loop: wait for a plan, execute it, publish the result."""

from __future__ import annotations

import select
import traceback
from multiprocessing.connection import Connection
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


def serve(runner: Runs, plans: Ring, results: Ring | None, pipe: Connection, spin: float) -> bool:
    """Run until the main process closes ``pipe`` (True) or a step fails (False; the traceback is on stderr).

    ``spin``: seconds to look for the next plan before sleeping. ``results`` is None on ranks that do not answer.
    """
    decode, encode = msgspec.msgpack.Decoder(StepPlan).decode, msgspec.msgpack.Encoder().encode
    commands, anything = select.poll(), select.poll()
    commands.register(pipe, select.POLLIN)
    anything.register(pipe, select.POLLIN)
    anything.register(plans, select.POLLIN)
    free = clock.now()
    while True:
        if commands.poll(0) and not _answer(runner, pipe):
            return True
        record = plans.pop()
        if record is None:
            _wait(plans, anything, spin)
            continue
        result = timed(runner, decode(record), free)
        free = clock.now()
        if results is not None:
            results.push(encode(result))
        if result.error is not None:
            return False


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


def _wait(plans: Ring, anything: select.poll, spin: float) -> None:
    if spin > 0:
        end = clock.now() + spin
        while clock.now() < end:
            if not plans.empty:
                return
    plans.clear()
    if plans.empty:
        anything.poll()


def _answer(runner: Runs, pipe: Connection) -> bool:
    """Answer one control command; False once the main process is gone."""
    try:
        command = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False
    try:
        reply: dict[str, Any] | SglaError = runner.control(command)
    except SglaError as error:
        reply = error
    pipe.send(("reply", reply))
    return True

"""The worker's own loop: launch a step, take the next plan, publish the result of the step before."""

from __future__ import annotations

import select
import sys
import traceback
from collections import deque
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import msgspec

from sgla import clock
from sgla.errors import SglaError
from sgla.messages import Control, Facts, Moved, StepPlan, StepResult

LOOK = 0.01  # seconds between looks at the pipe while steps are on their way
COPYING = 2e-4  # and at copies, while there is nothing else
SWITCH = 2e-4  # after which other threads get the interpreter, which a loop that spins keeps


Reply = dict[str, Any] | Future[dict[str, Any]]  # to a command: what came of it, at once or later


class Ring(Protocol):
    """The part of ``executor.ring.Ring`` that the loop uses."""

    @property
    def empty(self) -> bool: ...
    def fileno(self) -> int: ...
    def push(self, record: bytes) -> None: ...
    def pop(self) -> bytes | None: ...
    def clear(self) -> None: ...


class Runs(Protocol):
    """What the loop needs of a runner;
    its constructor takes ``(config, source, rank, size, rendezvous, report)``.

    ``execute`` returns when the step is computed; a runner with ``launch`` need not have it.
    """

    facts: Facts

    def execute(self, plan: StepPlan) -> StepResult: ...
    def control(self, command: Control) -> Reply: ...
    def close(self) -> None: ...

    @property
    def copying(self) -> bool:
        """Some copy has not been told of by ``moved``."""

    def moved(self) -> list[Moved]:
        """The copies that have ended since the last call."""


class Flight(Protocol):
    """A step on its way. ``due``: its end on ``clock.now()`` where that is known, 0.0 where one has to look.
    One that is ``held`` cannot end, and none can be launched behind it, before it is released: when it is the
    oldest."""

    step: int
    due: float
    held: bool

    @property
    def done(self) -> bool: ...


@runtime_checkable
class Launches(Protocol):
    """A runner whose steps run beside Python, on a device: the next one is launched while one runs.

    ``finish`` takes the flights in the order of their launches.
    """

    facts: Facts

    def launch(self, plan: StepPlan) -> Any: ...
    def release(self, flight: Any) -> None: ...
    def finish(self, flight: Any) -> StepResult: ...
    def control(self, command: Control) -> Reply: ...

    @property
    def copying(self) -> bool: ...
    @property
    def queueing(self) -> bool:
        """A copy goes on as somebody calls ``moved``, not by threads."""

    def moved(self) -> list[Moved]: ...


class Computed(msgspec.Struct):
    """The flight of a step that is over."""

    step: int
    result: StepResult
    due: float = 0.0
    held: bool = False
    done: bool = True


class AtOnce:
    """``Launches`` for a runner that computes a step when it is told to."""

    def __init__(self, runner: Runs) -> None:
        self.facts, self.control = runner.facts, runner.control
        self._runner = runner
        self._free = clock.now()

    def launch(self, plan: StepPlan) -> Computed:
        started = clock.now()
        result = self._runner.execute(plan)
        ended = clock.now()
        result.gap, result.seconds = started - self._free, ended - started
        self._free = ended
        return Computed(plan.step, result)

    def release(self, flight: Computed) -> None:
        raise AssertionError("no step is held")

    def finish(self, flight: Computed) -> StepResult:
        return flight.result

    @property
    def copying(self) -> bool:
        return self._runner.copying

    @property
    def queueing(self) -> bool:
        return False

    def moved(self) -> list[Moved]:
        return self._runner.moved()


def serve(runner: Runs | Launches, plans: Ring, results: Ring | None, pipe: Connection, spin: float) -> bool:
    """Run until the main process closes ``pipe`` (True) or a step fails (False; the traceback is on stderr).

    ``results`` is None on ranks that do not answer. Where the end of a step is not known the loop spins until
    it is there, because a result published late is a plan made late; ``spin``: seconds to look for a plan
    before sleeping, 0.0 where no core is to spare. Where some are it does not sleep while pieces of copies
    are to be queued either: after a sleep that takes 0.3 ms of the host, in which a piece crosses.
    """
    device: Launches = runner if isinstance(runner, Launches) else AtOnce(runner)
    copies = device if may_copy(runner.facts) else None
    if copies is not None:
        sys.setswitchinterval(SWITCH)
    replies = Replies(device, pipe)
    decode, encode = msgspec.msgpack.Decoder(StepPlan).decode, msgspec.msgpack.Encoder().encode
    commands = select.poll()
    commands.register(pipe, select.POLLIN)
    inputs = [pipe, plans]
    flights: deque[Flight] = deque()
    looked = clock.now()

    def publish(result: StepResult) -> None:
        if results is not None:
            results.push(encode(result))

    step = 0
    try:
        while True:
            record = None if flights and flights[-1].held else plans.pop()
            if record is not None:
                plan = decode(record)
                step = plan.step
                flights.append(device.launch(plan))
            if flights and flights[0].held:
                step = flights[0].step
                device.release(flights[0])
            if flights and flights[0].done:
                step = flights[0].step
                publish(device.finish(flights.popleft()))
            if copies is not None and copies.copying:
                for moved in copies.moved():
                    pipe.send(("moved", moved))
            now = clock.now()
            if now - looked > LOOK or (record is None and not flights):
                looked = now
                replies.send()
                if commands.poll(0) and not replies.take():
                    return True
            if record is None:
                if not flights:
                    if not (spin and copies is not None and copies.queueing):
                        waits = replies.due or (copies is not None and copies.copying)
                        _sleep(plans, inputs, spin, COPYING if waits else None)
                elif flights[0].due > now:
                    _sleep(plans, inputs, 0.0, flights[0].due - now)
                elif copies is not None:
                    commands.poll(0)  # gives the interpreter to threads that copy, and takes 2 us
    except BrokenPipeError:  # it has closed it meanwhile
        return True
    except Exception as error:
        traceback.print_exc()
        publish(StepResult(step=step, tokens=b"", error=f"{type(error).__name__}: {error}"))
        return False


def may_copy(facts: Facts) -> bool:
    """Whether plans may have ``copies``."""
    return bool(facts.tiers or facts.adapters)


def _sleep(plans: Ring, inputs: list[Any], spin: float, limit: float | None) -> None:
    """Wait for a plan or a command, at most ``limit`` seconds;
    look at the ring for ``spin`` seconds first."""
    end = clock.now() + spin
    while clock.now() < end:
        if not plans.empty:
            return
    plans.clear()
    if plans.empty:
        select.select(inputs, [], [], limit)


class Replies:
    """Answers to commands, each with the number of its command; some come later than others."""

    def __init__(self, runner: Launches, pipe: Connection) -> None:
        self._runner, self._pipe = runner, pipe
        self._later: list[tuple[int, Future[dict[str, Any]]]] = []

    @property
    def due(self) -> bool:
        return bool(self._later)

    def take(self) -> bool:
        """Answer one command, now or later; False once the main process is gone."""
        try:
            number, command = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return False
        made = answer(self._runner, command)
        if isinstance(made, Future):
            self._later.append((number, made))
        else:
            self._pipe.send(("reply", (number, made)))
        return True

    def send(self) -> None:
        """Those that have come meanwhile."""
        for number, future in [entry for entry in self._later if entry[1].done()]:
            self._later.remove((number, future))
            self._pipe.send(("reply", (number, outcome(future, "command"))))


def answer(runner: Runs | Launches, command: Control) -> Reply | SglaError:
    """What came of a command. Steps go on whatever that is."""
    try:
        return runner.control(command)
    except SglaError as error:
        return error
    except Exception as error:
        return _broken(command.verb, error)


def outcome(done: Future[dict[str, Any]], verb: str) -> dict[str, Any] | SglaError:
    """The answer of a command that has come later."""
    error = done.exception()
    if error is None:
        return done.result()
    return error if isinstance(error, SglaError) else _broken(verb, error)


def _broken(verb: str, error: BaseException) -> SglaError:
    traceback.print_exception(error)
    return SglaError(f"the worker's {verb!r} failed: {type(error).__name__}: {error}")

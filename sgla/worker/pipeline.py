"""The loop of a worker whose steps run on a device: launch the next step, then publish the one before it."""

from __future__ import annotations

import select
import traceback
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from sgla import clock
from sgla.messages import StepPlan, StepResult
from sgla.worker.loop import Ring, _answer


def serve(runner: Any, plans: Ring, results: Ring | None, pipe: Connection, spin: float) -> bool:
    """As ``loop.serve``, for a runner with ``launch`` and ``finish``. Spins while a step is on the device, because a
    result published late is a plan made late."""
    decode, encode = msgspec.msgpack.Decoder(StepPlan).decode, msgspec.msgpack.Encoder().encode
    commands, anything = select.poll(), select.poll()
    commands.register(pipe, select.POLLIN)
    anything.register(pipe, select.POLLIN)
    anything.register(plans, select.POLLIN)
    flights: deque[Any] = deque()
    looked = clock.now()

    def publish(result: StepResult) -> None:
        if results is not None:
            results.push(encode(result))

    step = 0
    try:
        while True:
            record = plans.pop()
            if record is not None:
                plan = decode(record)
                step = plan.step
                flights.append(runner.launch(plan))
            if flights and flights[0].done:
                step = flights[0].step
                publish(runner.finish(flights.popleft()))
                continue
            now = clock.now()
            if record is None and (not flights or now - looked > 0.01):
                looked = now
                if commands.poll(0) and not _answer(runner, pipe):
                    return True
                if not flights:
                    _sleep(plans, anything, spin)
    except Exception as error:
        traceback.print_exc()
        publish(StepResult(step=step, tokens=b"", error=f"{type(error).__name__}: {error}"))
        return False


def _sleep(plans: Ring, anything: select.poll, spin: float) -> None:
    """Wait for a plan or a command; look at the ring for ``spin`` seconds first."""
    end = clock.now() + spin
    while clock.now() < end:
        if not plans.empty:
            return
    plans.clear()
    if plans.empty:
        anything.poll()

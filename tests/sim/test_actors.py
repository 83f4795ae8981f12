"""What an actor takes in one turn of the loop: a part, in order, and others come in between."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from simulation import make_submit

from sgla import clock
from sgla.actors.base import Actor
from sgla.actors.schedule import TURN, Schedule
from sgla.errors import ContextTooLong
from sgla.messages import Cancel, Delta, Deltas, Submit

NOBODY: Any = None


def crash(name: str, error: BaseException) -> None:
    raise AssertionError(f"{name} crashed") from error


class Few(Actor[int]):
    """Takes two messages in a turn."""

    def __init__(self) -> None:
        super().__init__(crash)
        self.turns: list[list[int]] = []

    def handle(self, messages: deque[int]) -> None:
        self.turns.append([messages.popleft() for _ in range(min(2, len(messages)))])
        if messages:
            self.put_back(messages)


async def test_what_is_put_back_comes_before_what_is_new() -> None:
    few = Few()
    for message in range(5):
        few.post(message)
    others = 0
    while few.turns != [[0, 1], [2, 3], [4, 5]]:
        await asyncio.sleep(0)
        others += 1
        assert len(few.turns) == others  # somebody else has the loop between two turns
        if others == 1:
            few.post(5)
    await asyncio.sleep(0)
    assert len(few.turns) == others  # nothing wakes an actor without messages


class RecordingCore:
    """Takes requests and plans nothing. ``seen``: what it was told, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.plans = 0
        self.next_plan = 0.0

    @property
    def idle(self) -> bool:
        return True

    def offer(self, submit: Submit, now: float) -> None:
        self.seen.append(submit.rid)
        if submit.rid.startswith("long"):
            raise ContextTooLong.of(1, 2, 0)

    def cancel(self, rid: str, reason: str) -> Delta:
        self.seen.append(f"-{rid}")
        return Delta(rid=rid, finish="abort")

    def plan(self, now: float, paused: bool) -> None:
        self.plans += 1

    def drain_finished(self) -> list[Any]:
        return []


class Posted:
    """In place of the detokenizer."""

    behind = False

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def post(self, message: Deltas) -> None:
        self.deltas += message.items


class NoResults:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def results_fd(self) -> int:
        return self._fd


@pytest.fixture
def silent() -> Iterator[int]:
    """A file that is never readable."""
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


async def test_the_scheduler_takes_a_part_of_many_requests_in_a_turn(silent: int) -> None:
    core: Any = RecordingCore()
    posted: Any = Posted()
    executor: Any = NoResults(silent)
    schedule = Schedule(core, executor, posted, NOBODY, NOBODY, crash)
    expected = []
    for i in range(TURN):
        for rid in (f"a{i}", f"long{i}"):
            schedule.post(make_submit(rid, [1]))
            expected.append(rid)
        schedule.post(Cancel(f"a{i}", "client"))
        expected.append(f"-a{i}")
    turns = []
    while len(core.seen) < len(expected):
        before = len(core.seen)
        await asyncio.sleep(0)  # and here others have the loop
        if len(turns) == 1:
            schedule.post(Cancel("last", "client"))
            expected.append("-last")
        turns.append(len(core.seen) - before)
    assert core.seen == expected
    assert turns == [TURN, TURN, TURN, 1]
    assert core.plans == len(turns)  # who has been taken waits for no later turn
    assert [delta.rid for delta in posted.deltas] == [
        rid.removeprefix("-") for rid in expected if not rid.startswith("a")
    ]
    schedule.close()


async def test_a_step_is_planned_when_its_time_has_come(silent: int) -> None:
    """Though nothing comes and no step ends."""
    core: Any = RecordingCore()
    posted: Any = Posted()
    executor: Any = NoResults(silent)
    schedule = Schedule(core, executor, posted, NOBODY, NOBODY, crash)
    core.next_plan = clock.now() + 0.02
    schedule.post(make_submit("a", [1]))
    await asyncio.sleep(0.01)
    assert core.plans == 1
    while core.plans < 2:
        assert clock.now() < core.next_plan + 30
        await asyncio.sleep(0.001)
    assert clock.now() >= core.next_plan - 0.002, "what keeps the time counts in milliseconds"
    schedule.close()


async def test_no_step_is_planned_while_outputs_wait_to_be_sent(silent: int) -> None:
    core: Any = RecordingCore()
    posted: Any = Posted()
    executor: Any = NoResults(silent)
    schedule = Schedule(core, executor, posted, NOBODY, NOBODY, crash)
    posted.behind = True
    schedule.post(make_submit("a", [1]))
    await asyncio.sleep(0)
    assert core.seen == ["a"]
    assert core.plans == 0
    posted.behind = False
    posted.caught_up()
    assert core.plans == 1
    schedule.close()

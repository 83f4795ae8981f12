"""Copies between the device and tiers in worker processes, as a server has them: planned, carried out, told
by every rank."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import ForkedExecutor
from msgspec.structs import replace
from tiny import submit, tiny_config, tiny_source

from sgla.actors.schedule import Schedule
from sgla.actors.setup import make_limits
from sgla.config import Config
from sgla.executor.base import Executor
from sgla.executor.fake import FakeExecutor, fake_facts
from sgla.executor.inline import InlineExecutor
from sgla.executor.ring import Ring
from sgla.messages import Delta, Deltas, Moved, Submit, Tier
from sgla.sched.core import Core
from sgla.worker.loop import COPYING, serve

CONFIG = tiny_config(step_tokens=256)
LONG = [(7 * i) % 300 for i in range(165)]
OTHER = [(3 * i + 1) % 300 for i in range(165)]
NOBODY: Any = SimpleNamespace(  # in place of the metrics and the watchdog
    step=lambda seconds, gap: None,
    finished=lambda finished: None,
    expect=lambda: None,
    received=lambda answers: None,
)


def crash(name: str, error: BaseException) -> None:
    raise AssertionError(f"{name} crashed") from error


class Answers:
    """In place of the detokenizer."""

    behind = False

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ended = asyncio.Event()

    def post(self, message: Deltas) -> None:
        self.deltas += message.items
        if any(delta.finish for delta in message.items):
            self.ended.set()

    async def to(self, schedule: Schedule, request: Submit) -> tuple[list[int], int]:
        """The request's tokens, and how many of its prompt's were served from the tree."""
        self.deltas.clear()
        self.ended.clear()
        schedule.post(request)
        await asyncio.wait_for(self.ended.wait(), 20)
        while not schedule.core.idle:  # its pages are on their way to a tier
            await asyncio.sleep(0.001)
        return [t for delta in self.deltas for t in delta.tokens], self.deltas[0].cached_tokens


async def returned(executor: Executor, config: Config = CONFIG) -> int:
    """How many tokens of a prompt are served when it comes again after another has pushed it from the device.
    Its answer is the same."""
    facts = await executor.start(lambda progress: None)
    limits = make_limits(config, facts)
    core = Core(replace(limits, groups=[replace(facts.groups[0], pages=15)]), facts.found)
    answers: Any = Answers()
    schedule = Schedule(core, executor, answers, NOBODY, NOBODY, crash)
    try:
        first, cached = await answers.to(schedule, submit("first", LONG, 4))
        assert cached == 0
        await answers.to(schedule, submit("other", OTHER, 4))
        again, cached = await answers.to(schedule, submit("again", LONG, 4))
    finally:
        schedule.close()
        await executor.close()
    assert again == first
    core.check()
    return cached


@pytest.mark.parametrize(
    ("runner", "ranks", "all_of_it"),
    [("CopyingFake", 1, True), ("CopyingFake", 2, True), ("FailingFake", 2, False)],
)
async def test_an_evicted_prefix_comes_back_in_processes(runner: str, ranks: int, all_of_it: bool) -> None:
    config = replace(CONFIG, tp=ranks)
    executor = ForkedExecutor(config, tiny_source(), runner=f"copying:{runner}")
    assert (await returned(executor) == 160) is all_of_it


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}])
async def test_two_ranks_have_a_disk_each(ranks: dict[str, int], tmp_path: Path) -> None:
    config = replace(CONFIG, kv_disk=f"{tmp_path}:1M", **ranks)
    assert await returned(ForkedExecutor(config, tiny_source()), config) == 160
    assert {path.name for path in tmp_path.glob("kv-*")} == {"kv-0of2", "kv-1of2"}


async def test_an_evicted_prefix_comes_back_in_this_process(tmp_path: Path) -> None:
    config = replace(CONFIG, kv_disk=f"{tmp_path}:1M")
    assert await returned(InlineExecutor(config, tiny_source())) == 160
    facts = fake_facts(CONFIG, tiny_source())
    facts.tiers = [Tier("host", [64])]
    assert await returned(FakeExecutor(facts)) == 160


def test_a_copy_that_ends_behind_the_server_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """The worker ends, too, and says nothing."""
    facts = fake_facts(CONFIG, tiny_source())
    facts.tiers = [Tier("host", [64])]
    runner: Any = SimpleNamespace(
        facts=facts, copying=True, moved=lambda: [Moved(1, ok=True)], execute=print, control=print
    )
    ours, theirs = Pipe()
    ours.close()
    assert serve(runner, Ring.create(1 << 12), None, theirs, 0.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("spin", "queueing", "sleeps"), [(0.0, True, 4), (1e-6, True, 0), (1e-6, False, 4)])
def test_a_worker_with_a_core_to_spare_queues_pieces_without_a_sleep(
    monkeypatch: pytest.MonkeyPatch, spin: float, queueing: bool, sleeps: int
) -> None:
    """But sleeps where threads copy."""
    facts = fake_facts(CONFIG, tiny_source())
    facts.tiers = [Tier("host", [64])]
    ours, theirs = Pipe()
    looks, slept = 0, list[float | None]()

    def moved() -> list[Moved]:
        nonlocal looks
        looks += 1
        runner.copying = looks < 5
        runner.queueing = queueing and looks < 5
        return []

    def sleep(plans: Any, inputs: Any, spin: float, limit: float | None) -> None:
        slept.append(limit)
        if limit is None:
            ours.close()

    runner: Any = SimpleNamespace(facts=facts, copying=True, queueing=queueing, moved=moved)
    runner.launch = runner.release = runner.finish = runner.control = print
    monkeypatch.setattr("sgla.worker.loop._sleep", sleep)
    assert serve(runner, Ring.create(1 << 12), None, theirs, spin)
    assert slept == [COPYING] * sleeps + [None]
    assert looks == 5


async def test_no_copies_are_planned_for_a_runner_without_tiers() -> None:
    assert await returned(InlineExecutor(CONFIG, tiny_source())) < 160

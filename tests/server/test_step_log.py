"""The step log of a whole engine: on demand, and after the death of its worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from sgla.actors.schedule import TICK
from sgla.actors.system import System
from sgla.cli import main
from sgla.config import Config
from sgla.executor.fake import FakeExecutor
from sgla.http.answer.collect import Collector
from sgla.messages import Job, SamplingParams, StepPlan, StepResult
from sgla.observe.steplog import read, replay


async def started(tiny_model: Path, folder: Path) -> System:
    settings = {"executor": "fake", "crash_dump_folder": str(folder), "step_log": 50}
    system = System(Config(model=str(tiny_model), **settings))
    await system.start()
    return system


async def generate(system: System, count: int) -> None:
    sinks = []
    for i in range(count):
        sink = Collector(1)
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        system.ingress.open(Job(rid=f"r{i}", sampling=sampling, text=f"hello {i % 5}"), sink)
        sinks.append(sink)
    await asyncio.gather(*(sink.done for sink in sinks))


async def test_asked_for_and_after_a_crash(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dumps"
    system = await started(tiny_model, folder)
    try:
        for _ in range(5):
            await generate(system, 12)
            await asyncio.sleep(2 * TICK)
        assert system.ingress.step_log is not None
        log = read(system.ingress.step_log("asked for"))
        assert len(log.chapters) == 2
        assert [replay(chapter).difference for chapter in log.chapters] == [None, None]
        assert not folder.exists()
        assert isinstance(system._executor, FakeExecutor)
        system._executor.die("the worker is dead")
        assert system.died.done()
    finally:
        await system.close()
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    assert main(["replay", str(path)]) == 0
    head, *chapters = map(json.loads, capsys.readouterr().out.splitlines())
    assert head["why"] == "the worker is dead"
    assert all(chapter["equal"] and chapter["steps"] for chapter in chapters)
    broken = tmp_path / "broken"
    broken.write_bytes(path.read_bytes()[:-9])
    assert main(["replay", str(broken)]) == 2


async def test_a_bug_in_the_scheduler_is_in_the_dump(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever an actor lets out ends the server; its last call is recorded, and raises again when it is
    played."""
    system = await started(tiny_model, tmp_path)
    try:
        await generate(system, 3)
        assert isinstance(system._executor, FakeExecutor)
        execute = system._executor.model.execute

        def wrong(plan: StepPlan) -> StepResult:
            return replace(execute(plan), step=0)

        system._executor.model.execute = wrong  # type: ignore[method-assign]
        sink = Collector(1)
        system.ingress.open(Job(rid="last", sampling=SamplingParams(max_tokens=50), text="x"), sink)
        rejected = await asyncio.wait_for(sink.done, 5)
        assert rejected is not None
        assert (rejected.status, rejected.code) == (500, "internal_error")
    finally:
        await system.close()
    (path,) = tmp_path.iterdir()
    told = replay(read(path.read_bytes()).chapters[-1])
    assert told.difference is None
    assert told.ended_by.startswith("AssertionError: result of step")

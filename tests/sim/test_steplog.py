"""The step log: whatever happened, a copy of the scheduler repeats it plan by plan."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from simulation import Simulation, make_limits, make_submit, random_limits, random_submits

from sgla.errors import ConfigError, SglaError
from sgla.messages import StepResult
from sgla.observe import steplog
from sgla.observe.steplog import Plan, RecordedCore, read, replay
from sgla.sched.core import Core
from sgla.sched.snapshot import freeze, thaw


class Recorded(Simulation):
    def __init__(self, *args: Any, steps: int = 10, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core: RecordedCore = RecordedCore(self.limits, steps)

    def log(self) -> steplog.StepLog:
        return read(self.core.written("test"))


def play(random: Random, steps: int) -> Recorded:
    """Arrivals, refusals, cancels, deadlines and flushes at random times; left running or idle."""
    forced = random.choice((0, 5))
    simulation = Recorded(random_limits(random), steps=steps, check=False, forced=forced)
    pending = random_submits(random, random.randint(2, 12))[::-1]
    for _ in range(random.choice((30, 100, 400))):
        while pending and pending[-1].arrival <= simulation.now:
            try:
                simulation.offer(pending.pop())
            except SglaError:
                pass
        if simulation.submits and random.random() < 0.05:
            simulation.cancel(random.choice(list(simulation.submits)), random.choice(("client", "stop")))
        if random.random() < 0.02:
            simulation.core.flush_cache()
        if random.random() < 0.2:
            simulation.end_a_hold(random)
        if random.random() < 0.2:
            simulation.end_a_copy(random, failures=0.3)
        simulation.step()
        if random.random() < 0.5:
            simulation.core.drain_finished()
            simulation.core.rest()
        if simulation.core.idle and not pending:
            break
    return simulation


@pytest.mark.parametrize("steps", [5, 40, 100_000])
def test_random_scenarios_repeat_themselves(steps: int) -> None:
    later = plans = 0
    for seed in range(120):
        simulation = play(Random(seed), steps)
        log = simulation.log()
        for chapter in log.chapters:
            told = replay(chapter)
            assert told.difference is None, f"scenario {seed}: {told.difference}"
            assert told.calls == len(chapter.calls)
            plans += told.steps
        kept = [call.plan for chapter in log.chapters for call in chapter.calls if isinstance(call, Plan)]
        made = [plan for plan in kept if plan is not None]
        assert made == simulation.plans[len(simulation.plans) - len(made) :]
        assert len(made) >= min(len(simulation.plans), steps)
        later += len(log.chapters) > 1
    assert plans > 1200
    assert (later > 3) == (steps < 1000)


def test_the_log_is_not_in_its_own_snapshots() -> None:
    limits = make_limits()
    assert vars(RecordedCore(limits, 5)).keys() == vars(Core(limits)).keys()


def test_another_input_gives_another_plan() -> None:
    """The comparison can fail: a record with one changed token, one changed time, one plan less."""
    simulation = Recorded(make_limits(), steps=1000)
    for i in range(6):
        simulation.offer(make_submit(f"r{i}", [*range(12), i], stop_ids=frozenset([7])))
    simulation.run()

    def changed(kind: str, **fields: Any) -> steplog.Chapter:
        (chapter,) = simulation.log().chapters
        call = next(call for call in chapter.calls if type(call).__name__ == kind)
        for name, value in fields.items():
            setattr(call, name, value)
        return chapter

    assert replay(changed("Plan")).difference is None
    assert "planned" in str(replay(changed("Plan", plan=None)).difference)
    other = make_submit("r0", list(range(9)))
    assert "planned" in str(replay(changed("Offer", submit=other)).difference)
    assert "raised nothing, then x" in str(replay(changed("Offer", raised="x")).difference)


def test_a_crash_comes_back() -> None:
    simulation = Recorded(make_limits())
    simulation.offer(make_submit("r", [1, 2, 3]))
    simulation.submit_plans()
    with pytest.raises(AssertionError):
        simulation.core.retire(StepResult(step=9, tokens=b""), simulation.now)
    (chapter,) = simulation.log().chapters
    told = replay(chapter)
    assert told.difference is None
    assert told.ended_by.startswith("AssertionError: result of step 9")


def test_a_long_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "BYTES_KEPT", 9000)
    monkeypatch.setattr(steplog, "OFFER_BYTES", 0)
    monkeypatch.setattr(steplog, "PARAMETER_BYTES", 0)
    simulation = Recorded(make_limits(context_len=96), steps=10**6)
    for i in range(40):
        simulation.offer(make_submit(f"r{i}", [i % 50] * 20, max_new=2))
        simulation.run()
        simulation.core.rest()
    chapters = simulation.log().chapters
    assert len(chapters) == 2
    assert sum(type(call).__name__ == "Offer" for chapter in chapters for call in chapter.calls) <= 10


def test_parameters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chapter keeps of a request, and what a snapshot of it costs."""
    simulation = Recorded(make_limits(context_len=96), steps=10**6)
    large = replace(
        make_submit("large", [1, 2, 3], max_new=2),
        sampling_bytes=steplog.BYTES_KEPT // steplog.PARAMETER_BYTES,
    )
    simulation.offer(large)
    monkeypatch.setattr(steplog, "BUSY", steplog.PARAMETER * large.sampling_bytes / 2)
    simulation.core.rest()
    assert len(simulation.log().chapters) == 1
    simulation.run()
    simulation.core.rest()
    assert len(simulation.log().chapters) == 2


def test_a_chapter_that_got_too_large_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "MOST_LEFT", 5 * steplog.OFFER_BYTES)
    monkeypatch.setattr(steplog, "BYTES_KEPT", steplog.OFFER_BYTES)
    simulation = Recorded(make_limits(context_len=96), steps=10**6)
    kept = []
    for count in (2, 8, 2):  # requests of a chapter
        for i in range(count):
            simulation.offer(make_submit(f"{count} {len(kept)} {i}", [i] * 20, max_new=2))
        simulation.run()
        simulation.core.rest()
        kept.append(len(simulation.log().chapters))
    assert kept == [2, 1, 2]


def test_no_snapshot_is_made_of_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "BYTES_KEPT", 2000)
    monkeypatch.setattr(steplog, "MOST_KEPT", 8000)
    monkeypatch.setattr(steplog, "OFFER_BYTES", 0)
    for cost in ("NODE", "PARAMETER", "PARAMETER_BYTES"):
        monkeypatch.setattr(steplog, cost, 0)
    monkeypatch.setattr(steplog, "BUSY", 4.5 * steplog.REQUEST)
    simulation = Recorded(make_limits(context_len=96), steps=10**6)
    kept = []
    for i in range(13):  # 800 bytes each
        simulation.offer(make_submit(f"r{i}", [i] * 20, max_new=2))
        simulation.core.rest()
        kept.append(len(simulation.log().chapters))
    assert kept == [1] * 2 + [2] * 10 + [0]
    simulation.run()
    simulation.core.rest()
    simulation.offer(make_submit("last", [7] * 20, max_new=2))
    simulation.run()
    (chapter,) = simulation.log().chapters
    assert replay(chapter).difference is None


def test_deep_trees_are_copied() -> None:
    """Each turn of a conversation is a node below the last one's."""
    simulation = Recorded(make_limits(pages=900, context_len=9000, step_tokens=8192, slots=1), check=False)
    tokens = [1, 2, 3, 4]
    for i in range(400):
        tokens = [*tokens, i % 50, i // 50, 3, 4]
        simulation.offer(make_submit(f"r{i}", tokens, max_new=1))
        simulation.run()
    copy = thaw(freeze(simulation.core))
    copy.check()
    for core in (simulation.core, copy):
        core.offer(make_submit("last", tokens, max_new=1), simulation.now)
    assert copy.plan(simulation.now) == simulation.core.plan(simulation.now)
    assert copy.stats() == simulation.core.stats()


def test_every_input_is_recorded() -> None:
    """Whoever gives Core another method decides here whether the log must have it."""
    readers = {"check", "drain_finished", "idle", "next_deadline", "rids", "stats"}
    recorded = {name for name in vars(RecordedCore) if not name.startswith("_")} - {"rest", "written"}
    assert {name for name in vars(Core) if not name.startswith("_")} == readers | recorded


@pytest.mark.parametrize("data", [b"", b"x", steplog.MAGIC, steplog.MAGIC + b"\x81\xa1a\x01"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read(data)


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("ran",)


@pytest.mark.parametrize("value", [Hostile(), [print], Random()])
def test_a_snapshot_runs_no_code(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        thaw(pickle.dumps((value, [])))
    assert not capsys.readouterr().out

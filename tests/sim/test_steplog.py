"""The step log: whatever happened, a copy of the scheduler repeats it plan by plan."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest
from examples import examples
from msgspec.structs import replace
from simulation import Simulation, brief, make_limits, make_submit, random_limits, random_submits

from sgla.errors import ConfigError, SglaError
from sgla.messages import GRAMMAR, Ready, StepResult
from sgla.observe import steplog
from sgla.observe.steplog import Plan, RecordedCore, compared, read, replay
from sgla.sched.core import Core
from sgla.sched.snapshot import freeze, thaw

# The next step is planned late behind a long one.
LATE: dict[str, Any] = {"adapters": 0, "tiers": [], "itl_target": 2.0}


class Recorded(Simulation):
    def __init__(self, *args: Any, steps: int = 10, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core: RecordedCore = RecordedCore(self.limits, steps)

    def log(self) -> steplog.StepLog:
        return read(self.core.written("test"))


def play(random: Random, steps: int) -> Recorded:
    """Arrivals, refusals, cancels, deadlines and flushes at random times; left running or idle."""
    forced = random.choice((0, 5))
    limits = random_limits(random, **random.choice(({}, LATE)))
    cost = brief if limits.brief_depth else None
    simulation = Recorded(limits, cost, steps=steps, check=False, forced=forced)
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
        if random.random() < 0.02:
            simulation.core.renew("2")
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


@pytest.mark.parametrize("steps", [5, 20, 100_000])
def test_random_scenarios_repeat_themselves(steps: int) -> None:
    later = plans = 0
    for seed in range(examples(160)):
        simulation = play(Random(seed), steps)
        log = simulation.log()
        for chapter in log.chapters:
            told = replay(chapter)
            assert told.difference is None, f"scenario {seed}: {told.difference}"
            assert told.calls == len(chapter.calls)
            plans += told.steps
        kept = [call.plan for chapter in log.chapters for call in chapter.calls if isinstance(call, Plan)]
        made = [plan for plan in kept if plan is not None]
        assert made == [compared(plan) for plan in simulation.plans[len(simulation.plans) - len(made) :]]
        assert len(made) >= min(len(simulation.plans), steps)
        later += len(log.chapters) > 1
    assert plans > 10 * examples(160)
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
    monkeypatch.setattr(steplog, "BYTES_KEPT", 2000)
    simulation = Recorded(make_limits(context_len=96), steps=10**6)
    for i in range(40):
        simulation.offer(make_submit(f"r{i}", [i % 50] * 20, max_new=2))
        simulation.run()
        simulation.core.rest()
    chapters = simulation.log().chapters
    assert len(chapters) == 2
    assert sum(type(call).__name__ == "Offer" for chapter in chapters for call in chapter.calls) <= 10


def test_a_log_has_what_decides_plans_alone() -> None:
    """A prompt once for all choices; no lists of parameters, and of grammars that there is one."""
    simulation = Recorded(make_limits(context_len=2000, pages=900), steps=10**6)
    tokens = [i % 50 for i in range(1000)]
    plain = make_submit("plain", tokens, max_new=4)
    large = replace(
        plain.sampling,
        logit_bias=[(i, 1.0) for i in range(4096)],
        allowed=list(range(50)) * 99,
        grammar="x" * 9999,
    )
    for i in range(4):
        held = {"holds": frozenset((GRAMMAR,))} if i % 2 else {}
        simulation.offer(replace(plain, rid=f"r{i}", sampling=large, **held))
    for i in (1, 3):
        simulation.core.ready(Ready(rid=f"r{i}", reason=GRAMMAR, sampling=large))
    (kept,) = simulation.core._chapters
    assert len(kept.calls) < 3000
    simulation.run()
    (chapter,) = simulation.log().chapters
    assert replay(chapter).difference is None
    offers = [call.submit for call in chapter.calls if isinstance(call, steplog.Offer)]
    assert [offer.tokens for offer in offers] == [tokens] * 4
    simulation.offer(replace(plain, sampling=large))
    assert len(freeze(simulation.core)) < 40_000


def test_a_name_that_is_no_text_costs_the_log_alone() -> None:
    simulation = Recorded(make_limits(), steps=10**6)
    simulation.offer(make_submit("\ud800", [1, 2, 3]))
    assert not simulation.log().chapters
    simulation.core.rest()
    assert not simulation.log().chapters
    simulation.run()


def test_what_came_before_a_chapter_is_there_however_much_it_is() -> None:
    simulation = Recorded(make_limits(context_len=30_000, pages=9000), steps=10**6)
    for i in range(50):
        simulation.offer(make_submit(f"r{i}", [70_000 + i] * 20_000, max_new=2))
    assert len(simulation.core._chapters[-1].calls) > 2 * steplog.BYTES_KEPT
    simulation.core.rest()
    before, current = simulation.log().chapters
    assert len(before.calls) == 50
    assert not current.calls


def test_no_snapshot_is_made_of_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Recorded(make_limits(context_len=96), steps=10**6)
    simulation.offer(make_submit("r0", [0] * 20, max_new=2))
    size = simulation.core._bytes
    monkeypatch.setattr(steplog, "BYTES_KEPT", 3 * size)
    monkeypatch.setattr(steplog, "MOST_KEPT", 10 * size)
    monkeypatch.setattr(steplog, "NODE", 0)
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
    readers = {"cached", "check", "drain_finished", "idle", "next_deadline", "open", "rids", "stats"}
    readers |= {"tell_events"}
    recorded = {name for name in vars(RecordedCore) if not name.startswith("_")} - {"rest", "written"}
    assert {name for name in vars(Core) if not name.startswith("_")} == readers | recorded


@pytest.mark.parametrize("data", [b"", b"x", steplog.MAGIC, steplog.MAGIC + b"\x81\xa1a\x01"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        read(data)


def test_damaged_snapshots_are_no_snapshots() -> None:
    """Of the exceptions that bytes lead to, one comes out."""
    simulation = Recorded(make_limits(), check=False)
    simulation.offer(make_submit("r", [1, 2, 3, 4, 5], max_new=2))
    whole, chance = freeze(simulation.core), Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            thaw(bytes(data))
        except pickle.UnpicklingError:
            refused += 1
    assert refused > 30


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("ran",)


@pytest.mark.parametrize("value", [Hostile(), [print], Random()])
def test_a_snapshot_runs_no_code(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        thaw(pickle.dumps((value, [])))
    assert not capsys.readouterr().out

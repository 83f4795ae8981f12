from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop
from stub_runner import StubRunner

from sgla.config import Config
from sgla.errors import ConfigError, SglaError, UnsupportedField, WeightError, WorkerDied
from sgla.executor import inline
from sgla.executor.base import Executor
from sgla.executor.inline import InlineExecutor
from sgla.executor.parting import known_to
from sgla.executor.procs import ProcsExecutor, spare
from sgla.messages import CacheGroup, Control, Facts, NewRow, Progress, RowSampling, StepPlan, StepResult

STUB = "stub_runner:StubRunner"


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def make_plan(step: int, new: list[NewRow] | None = None) -> StepPlan:
    return StepPlan(
        step=step,
        slots=ints(1, 2),
        starts=ints(step, 10 * step),
        q_lens=ints(1, 1),
        flags=b"\1\1",
        new=new or [],
    )


async def collect(executor: Executor, count: int) -> list[StepResult]:
    """Wait for ``count`` results on the descriptor."""
    results: list[StepResult] = []
    done = asyncio.Event()

    def ready() -> None:
        results.extend(executor.drain())
        if len(results) >= count:
            done.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(executor.results_fd(), ready)
    try:
        await asyncio.wait_for(done.wait(), 20)
    finally:
        loop.remove_reader(executor.results_fd())
    return results


Make = Callable[..., Any]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes executors; in the end closes them and looks for what they left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await asyncio.to_thread(int)  # the loop's own descriptors and threads exist from here on
    process, made = psutil.Process(), []
    before, others = process.num_fds(), process.children()

    def make(kind: Make, source: dict[str, Any], **settings: Any) -> Any:
        made.append(kind(Config(threads=1, **settings), source, runner=STUB))
        return made[-1]

    yield make
    for executor in made:
        await executor.close()
    assert process.children() == others
    assert os.listdir(tmp_path) == []
    assert process.num_fds() <= before


@pytest.mark.parametrize("kind", [ProcsExecutor, InlineExecutor])
async def test_plans_go_in_and_results_come_out_in_order(make: Make, kind: Make) -> None:
    executor = make(kind, {"blob": "x" * (1 << 20)})
    if kind is ProcsExecutor:
        executor.spawn()
        executor.assign(Config(threads=1), {"blob": "y" * (1 << 20)})
    progress: list[Progress] = []
    facts = await executor.start(progress.append)
    assert [p.message for p in progress if p.phase == "load"] == ["rank 0"]
    assert facts.vocab_size == 1 << 20
    for step in (1, 2, 3):
        executor.submit(make_plan(step))
    results = await collect(executor, 3)
    assert [r.step for r in results] == [1, 2, 3]
    assert [r.tokens for r in results] == [ints(1 + s, 2 + 10 * s) for s in (1, 2, 3)]
    assert all(r.seconds >= 0 and r.gap >= 0 and r.error is None for r in results)

    long = array("i", range(100_000)).tobytes()
    row = NewRow(
        slot=1, tokens=long, prompt_len=100_000, pages=[ints(*range(1, 6000))], sampling=RowSampling()
    )
    for step in range(4, 40):
        executor.submit(make_plan(step, [row]))
        await collect(executor, 1)
    with pytest.raises(UnsupportedField, match="no verb nonsense"):
        await executor.control(Control(verb="nonsense"))
    if kind is ProcsExecutor:
        assert facts.notes[0] == ""  # nothing of this process was imported there, nor what only a model needs
        assert (await executor.control(Control(verb="signals")))["ranks"][0]["executed"] == 39
        executor.submit(make_plan(40))  # it ignores the terminal's signals
        assert (await collect(executor, 1))[0].step == 40
    await executor.close()
    await executor.close()
    with pytest.raises(WorkerDied):
        await executor.control(Control(verb="signals"))


async def test_a_runner_is_there_until_its_process_ends(make: Make, tmp_path: Path) -> None:
    """What it has launched last may still be under way."""
    executor = make(ProcsExecutor, {"gone": str(tmp_path / "gone")})
    await executor.start(lambda progress: None)
    await executor.close()
    assert not (tmp_path / "gone").exists()


async def test_a_rank_gets_the_new_requests_of_its_own_part_alone(make: Make, capfd: Any) -> None:
    """In a ring there is no room for those of all."""
    executor = make(ProcsExecutor, {}, tp=3, dp_attention=True)
    await executor.start(lambda progress: None)
    new = [NewRow(slot=1, tokens=bytes(9 << 20), prompt_len=1, pages=[], sampling=RowSampling())]
    parts = [make_plan(7, new), None, make_plan(7, new)]
    plan = StepPlan(step=7, slots=b"", starts=b"", q_lens=b"", flags=b"", parts=parts)
    for _ in range(3):
        executor.submit(plan)
        (result,) = await collect(executor, 1)
        assert [part.step for part in result.parts] == [7] * 3
    first, last = known_to(plan, range(3, 4)).parts, known_to(plan, range(8, 9)).parts
    assert first[0] == last[2] == make_plan(7, new)
    assert first[2] == last[0] == make_plan(7)
    assert known_to(plan, range(6)).parts == parts
    assert known_to(make_plan(7, new), range(6)) == make_plan(7, new)


async def test_every_rank_gets_every_plan_and_one_death_ends_all(make: Make, capfd: Any) -> None:
    executor = make(ProcsExecutor, {"rank": 1, "at": 3, "step": "kill"}, tp=2)
    deaths: list[WorkerDied] = []
    executor.on_death(deaths.append)
    facts = await executor.start(lambda p: None)
    assert facts.groups[0].pages == 100
    assert not os.path.exists(facts.notes[1])
    for step in (1, 2):
        executor.submit(make_plan(step))
    await collect(executor, 2)
    while True:  # rank 1 may lag behind the one that answers
        replies = (await executor.control(Control(verb="signals")))["ranks"]
        if [r["executed"] for r in replies] == [2, 2]:
            break
    begun = time.monotonic()
    executor.submit(make_plan(3))
    while not deaths and time.monotonic() < begun + 5:
        await asyncio.sleep(0.001)
    (death,) = deaths
    assert f"worker rank 1 (pid {replies[1]['pid']}) was killed by signal 9 (SIGKILL)" in death.message
    assert death.message.endswith("rank 1 of 2 loads\nthese are my last words")
    executor.submit(make_plan(4))
    assert executor.drain() == []
    with pytest.raises(WorkerDied):
        await executor.control(Control(verb="signals"))
    await executor.close()
    assert not any(psutil.pid_exists(reply["pid"]) for reply in replies)
    assert len(deaths) == 1
    assert "these are my last words" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        ({"load": "kill"}, WorkerDied, "SIGKILL.*my last words"),
        ({"load": "real-time signal", "rank": 1}, WorkerDied, "rank 1 .* was killed by signal 40"),
        ({"load": "raise"}, WorkerDied, "exited with code 1.*ZeroDivisionError: a bug"),
        ({"load": "typed"}, WeightError, "^lm_head is missing$"),
    ],
)
async def test_trouble_while_loading_fails_start(
    make: Make, trouble: dict[str, str], error: type[Exception], words: str
) -> None:
    executor = make(ProcsExecutor, trouble, tp=1 + ("rank" in trouble))
    executor.on_death(lambda death: pytest.fail("start raises instead"))
    with pytest.raises(error, match=f"(?s){words}") as caught:
        await executor.start(lambda p: None)
    assert error is not WeightError or caught.value.param == "model"
    await executor.close()


@pytest.mark.parametrize("when", ["at once", "importing", "loading"])
async def test_a_worker_killed_from_outside_at_any_phase_fails_start(make: Make, when: str) -> None:
    executor = make(ProcsExecutor, {"load": "hang"})
    phases: list[str] = []
    others = psutil.Process().children()

    async def kill() -> None:
        wanted = {"at once": None, "importing": "spawn", "loading": "load"}[when]
        while psutil.Process().children() == others or (wanted and wanted not in phases):
            await asyncio.sleep(0.001)
        (worker,) = set(psutil.Process().children()) - set(others)
        worker.send_signal(signal.SIGKILL)

    killer = asyncio.create_task(kill())
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await asyncio.wait_for(executor.start(lambda p: phases.append(p.phase)), 20)
    await killer


@pytest.mark.parametrize("kind", [ProcsExecutor, InlineExecutor])
async def test_a_failed_step_is_told_and_final(make: Make, kind: Make, capfd: Any) -> None:
    executor = make(kind, {"at": 2, "step": "raise"})
    died = asyncio.get_running_loop().create_future()
    executor.on_death(died.set_result)
    await executor.start(lambda p: None)
    executor.submit(make_plan(1))
    assert (await collect(executor, 1))[0].error is None
    executor.submit(make_plan(2))
    error = await asyncio.wait_for(died, 20)
    assert "ZeroDivisionError: a bug" in error.message
    await executor.close()


async def test_a_killed_rank_is_the_cause_though_the_step_of_another_fails_first(
    make: Make, capfd: Any
) -> None:
    executor = make(ProcsExecutor, {"at": 1, "step": "raise"}, tp=2)
    died = asyncio.get_running_loop().create_future()
    executor.on_death(died.set_result)
    others = psutil.Process().children()
    await executor.start(lambda p: None)
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)
    executor.submit(make_plan(1))
    deadline = time.monotonic() + 10
    while any(worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the loop stands still, so it hears of neither
    assert executor.drain() == []
    error = await asyncio.wait_for(died, 5)
    assert "worker rank 1" in error.message
    assert "SIGKILL" in error.message
    await executor.close()


@pytest.mark.parametrize("kind", [ProcsExecutor, InlineExecutor])
async def test_a_failed_command_is_told_and_steps_go_on(make: Make, kind: Make, capfd: Any) -> None:
    executor = make(kind, {})
    await executor.start(lambda p: None)
    with pytest.raises(SglaError, match="'fail' failed: ZeroDivisionError: a bug"):
        await asyncio.wait_for(executor.control(Control(verb="fail")), 20)
    executor.submit(make_plan(1))
    assert (await collect(executor, 1))[0].error is None
    await executor.close()


async def test_a_command_behind_a_failed_step_fails_too(make: Make, capfd: Any) -> None:
    executor = make(InlineExecutor, {"at": 1, "step": "raise"})
    await executor.start(lambda p: None)
    executor.submit(make_plan(1))
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(executor.control(Control(verb="signals")), 5)
    await executor.close()


async def test_a_death_is_told_where_nobody_reads_stderr(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    executor = make(ProcsExecutor, {"at": 1, "step": "kill"})
    died = asyncio.get_running_loop().create_future()
    executor.on_death(died.set_result)
    await executor.start(lambda p: None)
    executor.submit(make_plan(1))
    assert "these are my last words" in (await asyncio.wait_for(died, 5)).message
    await executor.close()


def test_a_death_is_seen_on_the_servers_loop() -> None:
    """uvloop makes descriptors non-blocking that it watches."""

    async def scene() -> None:
        executor = ProcsExecutor(Config(threads=1), {"at": 2, "step": "exit"}, runner=STUB)
        died = asyncio.get_running_loop().create_future()
        executor.on_death(died.set_result)
        await executor.start(lambda p: None)
        executor.submit(make_plan(1))
        assert len(await collect(executor, 1)) == 1
        executor.submit(make_plan(2))
        assert "exited with code 3" in (await asyncio.wait_for(died, 20)).message
        await executor.close()

    uvloop.run(scene())


async def test_a_thread_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """It waits for a disk, for example. What it does later harms nobody."""
    hangs, goes_on = Event(), Event()

    def execute(runner: StubRunner, plan: StepPlan) -> StepResult:
        hangs.set()
        goes_on.wait(60)
        return StepResult(step=plan.step, tokens=b"")

    monkeypatch.setattr(StubRunner, "execute", execute)
    monkeypatch.setattr(inline, "PATIENCE", 0.05)
    executor = InlineExecutor(Config(threads=1), {}, runner=STUB)  # type: ignore[arg-type]
    await executor.start(lambda p: None)
    thread = executor._thread
    assert thread is not None
    executor.submit(make_plan(1))
    await asyncio.to_thread(hangs.wait, 20)
    await executor.close()
    assert "is left behind" in caplog.text
    goes_on.set()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()
    [late] = executor._results.drain()
    assert isinstance(late, StepResult)
    assert late.step == 1
    await executor.close()


def test_a_killed_worker_is_told_what_takes_less_memory() -> None:
    """An encoder keeps no KV, and who reads pictures has no steps."""

    def facts(pages: int, encodes: bool = False) -> Facts:
        return Facts(
            groups=[CacheGroup(pages)],
            page_size=16,
            slots=1,
            context_len=64,
            vocab_size=9,
            step_tokens=64,
            dtype="none",
            device="stub",
            encodes=encodes,
        )

    small = "serve a smaller model, or one in fewer bits"
    assert spare(Config(kv_cache_bytes=1), None) == spare(Config(), facts(2)) == "lower --kv-cache-bytes"
    assert spare(Config(), None) == spare(Config(), facts(2, encodes=True)) == small
    assert spare(Config(), facts(1)) == "lower --step-tokens"


async def test_start_can_be_cancelled_and_closing_does_not_wait_for_a_hung_step(make: Make) -> None:
    executor = make(ProcsExecutor, {"load": "hang"})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(executor.start(lambda p: None), 0.3)
    await executor.close()
    executor = make(ProcsExecutor, {"at": 1, "step": "hang"})
    await executor.start(lambda p: None)
    executor.submit(make_plan(1))
    await asyncio.wait_for(executor.close(), 10)


async def test_too_little_shared_memory_is_a_typed_error(make: Make) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigError, match="20 MiB of shared memory cannot be had"):
            await make(ProcsExecutor, {}).start(lambda p: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_killed_main_process_leaves_nothing_behind() -> None:
    code = f"""
import asyncio, sys
sys.path[:] = {sys.path!r}
from sgla.config import Config
from sgla.executor.procs import ProcsExecutor
async def main():
    executor = ProcsExecutor(Config(threads=1, tp=2), {{}}, runner={STUB!r})
    await executor.start(lambda p: None)
    print(*(r["pid"] for r in (await executor.control(__import__("sgla.messages").messages.Control(verb="signals")))["ranks"]), flush=True)
    assert "torch" not in sys.modules
    await asyncio.sleep(60)
asyncio.run(main())
"""  # noqa: E501
    main = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert main.stdout is not None
    pids = [int(pid) for pid in main.stdout.readline().split()]
    assert len(pids) == 2
    main.kill()
    main.wait()
    main.stdout.close()
    psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=5)
    assert not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids)

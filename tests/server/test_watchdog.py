"""Workers that stand still, and workers that are only slow."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from local_server import local_server
from server_process import SLACK, ServerProcess, serving

from sgla import clock
from sgla.actors import watchdog
from sgla.actors.system import ASKED
from sgla.actors.watchdog import TICK, Watchdog
from sgla.errors import Loading, Overloaded
from sgla.messages import Control, Progress

ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
FAKE = ("--executor", "fake", "--context-length", "8192")


class Time:
    """A clock that the test winds on, and with it the ticks of a watchdog."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
        self.now = 100.0
        self.timeouts = 0
        monkeypatch.setattr(clock, "now", lambda: self.now)
        self.dog = Watchdog(timeout, self._on_timeout)
        self.dog.close()

    def _on_timeout(self) -> None:
        self.timeouts += 1

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            self.dog._tick()
            self.dog.close()


async def test_only_what_is_owed_and_does_not_come_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch, timeout=300)
    time.passes(1000)  # idle, or paused
    time.dog.expect()
    time.dog.expect()
    for _ in range(50):  # steps of 29 s
        time.passes(29)
        assert not time.dog.trouble
        time.dog.received()
        time.dog.expect()
    time.passes(100)
    assert not time.dog.trouble  # each may take some times longer than all before
    time.passes(20)
    assert time.dog.trouble == "no step has finished for 120 s"
    time.passes(170)
    assert not time.timeouts
    time.passes(11)
    assert time.timeouts


async def test_a_slow_machine_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch, timeout=300)
    time.dog.expect()
    time.passes(200)
    time.dog.received()
    time.dog.expect()
    time.passes(1999)
    assert not time.timeouts
    time.passes(2)
    assert time.timeouts


async def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch, timeout=5)
    time.dog.expect()
    time.now += 1000
    time.passes(1)
    assert not time.timeouts
    assert not time.dog.trouble


async def test_zero_is_never(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch, timeout=0)
    time.dog.expect()
    time.passes(3000)
    assert time.dog.trouble
    assert not time.timeouts


async def test_readiness_says_what_is_wrong(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "OVERDUE", 0.5)
    async with local_server(model=str(tiny_model)) as local:
        dog = local.system._watchdog
        assert dog is not None
        dog.expect()
        await asyncio.sleep(1.2)
        async with local.client.get("/health/ready") as response:
            assert response.status == 503
            assert (await response.json())["message"].startswith("no step has finished for ")
        async with local.client.get("/health/live") as response:
            assert response.status == 200
        dog.received()
        async with local.client.get("/health/ready") as response:
            assert response.status == 200


async def test_who_reads_weights_again_moves_and_is_ready_afterwards(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model)) as local:
        system = local.system
        dog, executor = system._watchdog, system._executor
        assert dog is not None
        assert executor is not None
        waited = []

        async def reads(command: Control) -> dict[str, Any]:
            for done in range(3):
                dog._waited = 1e4
                system._progress(Progress(phase="load", message="weights", done=done, total=3))
                waited.append(dog._waited)
                with pytest.raises(Loading, match="the server sleeps"):
                    system.ingress.require_ready()
            return {"ranks": [{}]}

        assert (await local.post("/sleep", None))[0] == 200
        executor.control = reads  # type: ignore[method-assign]
        assert (await local.post("/wake_up", None))[0] == 200
        assert waited == [0.0] * 3
        async with local.client.get("/health/ready") as response:
            assert response.status == 200


def asked(server: ServerProcess, answers: list[Any], path: str, body: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(server.request("POST", path, body)))
    thread.start()
    return thread


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "stuck"])
def test_a_worker_that_stands_still_ends_all_and_the_process(tiny_model: Path, stopped: bool) -> None:
    step = "20" if stopped else "100000"
    flags = (*FAKE, "--fake-step-ms", step, "--watchdog-timeout", "2", "--max-running-requests", "2")
    with serving("--model", str(tiny_model), *flags) as server:
        answers: list[Any] = []
        bodies = [{**ENDLESS, "stream": i % 2 == 0} for i in range(4)]
        threads = [asked(server, answers, "/v1/completions", body) for body in bodies]
        while server.metric("sgla:num_queue_reqs") < 2:
            time.sleep(0.02)
        (worker,) = server.workers()
        if stopped:
            worker.send_signal(signal.SIGSTOP)
        for thread in threads:
            thread.join(15)
        assert sorted(status for status, _ in answers) == [200, 200, 503, 503]
        for status, body in answers:
            if status == 503:
                assert body["error"]["code"] == "worker_stuck"
                assert "no step has finished for " in body["error"]["message"]
            else:
                assert '"code":"worker_stuck"' in body
                assert body.endswith("data: [DONE]\n\n")
        assert server.get("/health/live")[0] == 503
        status, ready = server.get("/health/ready")
        assert status == 503
        assert "no step has finished" in ready["message"]
        status, refused = server.request("POST", "/v1/completions", ENDLESS)
        assert (status, refused["error"]["code"]) == (503, "worker_stuck")
        assert server.wait() == 1
        assert not worker.is_running()
    if stopped:
        assert "T (stopped), waits" in server.output
    else:
        assert "in _sleep" in server.output  # where a fake step spends its time


def test_commands_to_a_stopped_worker_are_few_and_owed_when_clients_give_up(tiny_model: Path) -> None:
    flags = (*FAKE, "--fake-step-ms", "1", "--watchdog-timeout", "4")
    with serving("--model", str(tiny_model), *flags) as server:
        (worker,) = server.workers()
        worker.send_signal(signal.SIGSTOP)
        answers: list[Any] = []
        patient = asked(server, answers, "/start_profile", {})
        for _ in range(ASKED - 1):
            with pytest.raises(TimeoutError):
                server.request("POST", "/start_profile", {}, timeout=0.2)
        status, body = server.request("POST", "/start_profile", {}, timeout=5)
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert f"{ASKED} commands" in body["error"]["message"]
        patient.join(10)
        assert [(status, body["error"]["code"]) for status, body in answers] == [(503, "worker_stuck")]
        assert server.wait() == 1


async def test_an_answer_is_owed_when_its_caller_has_gone(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model)) as local:
        system = local.system
        dog, executor = system._watchdog, system._executor
        assert dog is not None
        assert executor is not None
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        async def later(command: Control) -> dict[str, Any]:
            return await answer

        executor.control = later  # type: ignore[method-assign]
        dog.expect()
        for _ in range(ASKED):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(system._control(Control(verb="memory")), 0.01)
        dog._waited = 40.0
        for _ in range(3):
            with pytest.raises(Overloaded):
                await system._control(Control(verb="memory"))
        assert (dog._owed, dog._waited, dog._longest) == (1 + ASKED, 40.0, 0.0)
        answer.set_result({"ranks": [{}]})
        await system._control(Control(verb="memory"), ASKED + 1)
        assert dog._owed == 1
        assert dog._longest >= 40
        dog.received()


def test_a_pause_is_no_standstill(tiny_model: Path) -> None:
    flags = (*FAKE, "--fake-step-ms", "1", "--watchdog-timeout", "1")
    with serving("--model", str(tiny_model), *flags) as server:
        server.request("POST", "/pause", {"mode": "in_place"})
        answers: list[Any] = []
        thread = asked(server, answers, "/v1/completions", {**ENDLESS, "max_tokens": 3})
        time.sleep(2.5)
        assert server.get("/health/ready")[0] == 200
        server.request("POST", "/resume", {})
        thread.join(10)
        assert answers[0][0] == 200


def test_a_stopped_worker_does_not_keep_the_process_from_ending(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), *FAKE, "--fake-step-ms", "1", "--drain-timeout", "1") as server:
        answers: list[Any] = []
        thread = asked(server, answers, "/v1/completions", ENDLESS)
        while not server.metric("sgla:num_running_reqs"):
            time.sleep(0.02)
        server.workers()[0].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - began < 1 + SLACK
        thread.join(20)
        assert answers[0][1]["error"]["code"] == "draining"

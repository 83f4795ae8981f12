"""``sgla serve --dp``: settings, shares of the machine, metrics of all on one page, and real processes."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

from sgla.cli import main
from sgla.cli.explain import part_of, replicated
from sgla.config import Config
from sgla.device import H200
from sgla.errors import ConfigError
from sgla.observe.machine import detect
from sgla.resolve import ALONE, check, resolve
from sgla.route import replicas as module
from sgla.route.balancer import Balancer
from sgla.route.config import RouteConfig
from sgla.route.merged import merged
from sgla.route.nodes import Nodes, ReplicaAgent
from sgla.route.replicas import (
    EXIT_CONFIG,
    EXIT_DIED,
    EXIT_OK,
    RESTARTS,
    Replicas,
    Share,
    of_replica,
    of_router,
    shares,
)

GIVEN: dict[str, Any] = {
    "models": ["a=b"],
    "grpc_port": 1,
    "state_path": "s",
    "kv_disk": "d:1G",
    "kv_events_config": {"endpoint": "tcp://*:1"},
    "dump_requests": "f",
    "role": "prefill",
}


@pytest.mark.parametrize("name", [*ALONE, "role"])
def test_what_replicas_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--dp 2") as caught:
        check(Config(dp=2, **{name: GIVEN[name]}))
    assert caught.value.param == name


def test_an_engine_has_no_replicas() -> None:
    with pytest.raises(ConfigError, match="--dp"):
        resolve(Config(dp=2, executor="fake", device="cpu"))


def test_shares_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = msgspec.structs.replace(detect(), gpus=(H200,) * 4, torch_cuda="any", torch_hip=None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [each.gpus for each in shares(Config(dp=2, tp=2), "cuda", machine)] == [("0", "1"), ("2", "3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [str(each) for each in shares(Config(dp=2), "cuda", machine)] == ["GPU 5", "GPU 7"]
    with pytest.raises(ConfigError, match="needs 4 GPUs, this machine shows 2"):
        shares(Config(dp=2, tp=2), "cuda", machine)


def test_shares_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4, 6, 7})
    assert [each.cores for each in shares(Config(dp=2), "cpu", detect())] == [(1, 3), (4, 6)]
    assert [each.cores for each in shares(Config(dp=6), "cpu", detect())] == [(1, 3, 4, 6, 7)] * 6


def test_explain_says_who_holds_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    machine = msgspec.structs.replace(detect(), cores=4, physical_cores=4)
    config = Config(dp=2, device="cpu", executor="fake")
    resolved = resolve(of_replica(config), part_of(machine, 2))
    told = replicated(resolved, config, machine)
    assert (told.config.dp, told.config.threads, told.reasons["dp"]) == (2, 2, "given")
    assert told.notes[-2:] == ["replica 0: cores 0, 1", "replica 1: cores 2, 3"]
    told = replicated(resolved, msgspec.structs.replace(config, nnodes=2, dp=4), machine)
    assert told.notes[-2:] == ["node 1, replica 2: cores 0, 1", "node 1, replica 3: cores 2, 3"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dp", "4"], "node 1, replica 3: "),
        (["--dp", "3"], "--dp 3: each host has as many"),
        (["--dp", "4", "--grpc-port", "1"], "--grpc-port cannot be honoured with --dp 4"),
    ],
)
def test_explain_refuses_what_serve_does(
    flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLA_DEMO", "packaged")
    hosts = ["--nnodes", "2", "--dist-init-addr", "10.0.0.1", "--dist-secret", "s"]
    main(["explain", "--device", "cpu", *hosts, *flags])
    assert words in "".join(capsys.readouterr())


def test_settings_of_router_and_replica() -> None:
    config = Config(dp=2, port=5, host="::", api_key=["k"], ssl_certfile="c", max_connections=7)
    router, replica = of_router(config), of_replica(config)
    assert (router.port, router.host, router.worker_api_key, router.policy) == (5, "::", "k", "cache_aware")
    assert (router.ssl_certfile, router.max_connections) == ("c", 7)
    assert (replica.dp, replica.host, replica.port, replica.ssl_certfile) == (1, "127.0.0.1", 0, None)
    assert replica.api_key == ["k"]


def test_metrics_of_several_are_one_page() -> None:
    page = (
        '# HELP a_total what\n# TYPE a_total counter\na_total{x="}, y"} %d\n# HELP b b\n# TYPE b gauge\nb 2\n'
    )
    text = merged({"0": page % 1, "1": page % 3}, "replica")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(one.labels, one.value) for one in families["a"].samples] == [
        ({"replica": "0", "x": "}, y"}, 1),
        ({"replica": "1", "x": "}, y"}, 3),
    ]
    assert [one.value for one in families["b"].samples] == [2, 2]
    assert text.count("# TYPE") == 2


class Short:
    """A replica whose process ends at once, with the next of ``codes``; the last one goes on until it is
    stopped."""

    codes: list[int] = []
    made: list[int] = []

    def __init__(self, number: int, config: Config, share: Share) -> None:
        self.made.append(number)
        self.number = number
        self.url = f"http://127.0.0.1:{1000 + len(self.made)}"
        self.process = self
        self._end = asyncio.Event()

    async def ready(self) -> str:
        return f"ready at {self.url}"

    async def ended(self) -> int:
        if self.codes:
            return self.codes.pop(0)
        await self._end.wait()
        return 0

    def stop(self) -> None:
        self._end.set()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> type[Short]:
    monkeypatch.setattr(module, "Replica", Short)
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module.processes, "end", lambda process: None)
    Short.codes, Short.made = [], []
    return Short


def group(count: int, store: str | None = None) -> tuple[Balancer, Replicas]:
    balancer, config = Balancer(RouteConfig()), of_replica(Config(dp=count, kv_store=store))
    return balancer, Replicas(balancer, "http://all", config, [Share(cores=(i,)) for i in range(count)])


async def test_who_ends_is_started_anew(short: type[Short], capsys: pytest.CaptureFixture[str]) -> None:
    short.codes = [1, -9]
    balancer, running = group(2)
    while len(balancer.workers) < 2 or short.codes:
        await asyncio.sleep(0)
    assert sorted(worker.name for worker in balancer.workers.values()) == ["0", "1"]
    assert await running.close() == 0
    assert len(short.made) == 4
    assert not balancer.workers
    assert "ready at http://all\n" in capsys.readouterr().out


async def test_restarts_have_an_end(short: type[Short]) -> None:
    short.codes = [1] * (RESTARTS + 1)
    balancer, running = group(1)
    assert balancer.replicas == 1
    assert await running.over == EXIT_DIED
    assert await running.close() == EXIT_DIED
    assert balancer.replicas == 0
    assert short.made == [0] * (RESTARTS + 1)


@pytest.mark.parametrize("store", [None, "/store"])
async def test_replicas_end_when_a_store_has_what_requests_have_left(
    store: str | None, short: type[Short], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take what is left of the drain, but for a second signal."""
    stop, asked = Short.stop, list[str]()

    def later(replica: Short) -> None:
        asked.append(replica.url)
        asyncio.get_running_loop().call_later(0.2, stop, replica)

    monkeypatch.setattr(Short, "stop", later)
    monkeypatch.setattr(module, "END", 0.01)
    balancer, running = group(2, store)
    while len(balancer.workers) < 2:
        await asyncio.sleep(0)
    assert await running.close(30.0) == 0
    assert bool(running._running) == (store is None)
    assert len(set(asked)) == 2


async def test_replicas_are_told_twice_to_end_at_once(
    short: type[Short], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(Short, "stop", lambda replica: asked.append(replica.url))
    monkeypatch.setattr(module, "END", 0.01)
    balancer, running = group(1, "/store")
    while not balancer.workers:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(running.close(math.inf))
    await asyncio.sleep(0.05)
    closing.cancel()
    assert await running.close() == 0
    assert len(asked) == 2


class Closing:
    """Replicas that do not end before they are told so twice."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float]] = []

    async def close(self, saving: float = 0.0, serving: float = 0.0) -> int:
        self.asked.append((saving, serving))
        await asyncio.sleep(3600 if len(self.asked) == 1 else 0)
        return EXIT_OK


async def test_an_agent_lets_its_replicas_end_what_they_have_begun() -> None:
    """Until it is told to end again; when node 0 has ended they have nothing to answer."""
    config, closing = Config(dp=2, nnodes=2, node_rank=1, drain_timeout=7.0), [Closing(), Closing()]
    agents = [ReplicaAgent(config, [Share()], "", lambda text: None) for _ in closing]
    for agent, replicas in zip(agents, closing):
        agent._replicas = replicas  # type: ignore[assignment]
    agents[0].stop()
    agents[1]._leave(3.0)
    ending = [asyncio.ensure_future(agent.close()) for agent in agents]
    await asyncio.sleep(0)
    for agent in agents:
        agent.stop()
    await asyncio.gather(*ending)
    assert closing[0].asked == [(7.0, 7.0), (0.0, 0.0)]
    assert closing[1].asked == [(3.0, 0.0), (0.0, 0.0)]


async def test_a_replica_of_another_host_that_is_left_out_is_not_waited_for(
    short: type[Short], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of this host; with its agent it comes back."""

    class SecondEnds(Short):
        async def ended(self) -> int:
            return 1 if self.number else await super().ended()

    balancer, own = group(2)
    while len(short.made) < 2:
        await asyncio.sleep(0)
    monkeypatch.setattr(module, "Replica", SecondEnds)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    config = Config(dp=4, nnodes=2, dist_init_addr=place, dist_secret="s")
    nodes = Nodes(balancer, own, config, "torch")
    agent = ReplicaAgent(msgspec.structs.replace(config, node_rank=1), [Share()] * 2, "torch", print)
    await agent.join()
    while balancer.replicas == 4:
        await asyncio.sleep(0.01)
    assert balancer.replicas == 3
    await agent.close()
    while balancer.replicas == 3:
        await asyncio.sleep(0.01)
    assert balancer.replicas == 4
    assert await nodes.close() == EXIT_OK


async def test_wrong_settings_end_all(short: type[Short]) -> None:
    short.codes = [EXIT_CONFIG]
    _, running = group(2)
    assert await running.over == EXIT_CONFIG
    assert await running.close() == EXIT_CONFIG


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    fake = ("--executor", "fake", "--fake-step-ms", "5", "--no-log-requests")
    process = ServerProcess(*fake, "--dp", "2", "--drain-timeout", "0")
    try:
        yield process
    finally:
        process.stop()


def replicas(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [each for each in children if "sgla.cli.replica" in each.cmdline()]


def until_up(server: ServerProcess, count: int) -> None:
    """A test that waits for ever is ended by its runner."""
    while server.process.poll() is None:
        status, told = server.get("/health")
        if status == 200 and told["up"] == count:
            return
        time.sleep(0.05)
    raise AssertionError(server.output)


def open_stream(server: ServerProcess, prompt: str) -> http.client.HTTPResponse:
    """A stream that goes on for longer than the test, and has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"prompt": prompt, "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response


def rest_of(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except http.client.IncompleteRead as error:
        return error.partial


def test_replicas_serve_and_die(server: ServerProcess) -> None:
    server.wait_listening()
    until_up(server, 2)
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
    answers = [server.request("POST", "/v1/completions", body) for _ in range(4)]
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
    assert server.get("/v1/models")[1]["data"][0]["id"] == "demo"
    metrics = server.get("/metrics")[1]
    assert all(f'replica="{number}"' in metrics for number in (0, 1))
    killed, _ = replicas(server)
    streams = [open_stream(server, str(i) * 99) for i in range(2)]  # one on each
    ended: queue.Queue[bytes] = queue.Queue()
    for stream in streams:
        threading.Thread(target=lambda one: ended.put(rest_of(one)), args=(stream,), daemon=True).start()
    killed.send_signal(signal.SIGKILL)
    assert b"worker_died" in ended.get()
    assert server.request("POST", "/v1/completions", body)[1]["choices"] == answers[0][1]["choices"]


def test_ctrl_c_ends_all(server: ServerProcess) -> None:
    running = replicas(server)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert not psutil.wait_procs(running, timeout=10)[1]

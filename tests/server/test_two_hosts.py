"""``sgla serve --nnodes 2``: real processes on two hosts, which are network namespaces; those on loopback
addresses run always."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from server_process import ServerProcess, serving
from two_hosts import FAKE, Network, NodeProcess, loopback, namespaces, none_left

from sgla.processes import tied

PIPELINE = ("--pp", "2", "--device", "cpu")
CACHE = ("--kv-cache-bytes", "128M", "--no-prefix-cache")
MODEL = (*PIPELINE, *CACHE)
DATA = ("--tp", "2", "--dp-attention", "--device", "cpu", *CACHE)  # ranks of one layer on both
SETS = ("--cp", "2", "--device", "cpu", *CACHE)
BODY = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def cable() -> Iterator[Network]:
    with namespaces() as network:
        yield network


def stream(
    server: NodeProcess, rest: queue.Queue[bytes] | None = None, tokens: int = 5000
) -> queue.Queue[bytes]:
    """A long answer that has begun; its ``rest`` comes when it has ended."""
    rest = queue.Queue() if rest is None else rest
    with server.host.inside():
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**BODY, "max_tokens": tokens, "stream": True}),
            {"Content-Type": "application/json"},
        )
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    threading.Thread(target=lambda: rest.put(all_of(response)), daemon=True).start()
    return rest


def all_of(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except http.client.IncompleteRead as error:
        return error.partial


def until(process: ServerProcess, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in process.output:
        assert time.monotonic() < deadline, process.output
        assert process.process.poll() is None, process.output
        time.sleep(0.02)


def ended(*processes: NodeProcess) -> list[int]:
    """Their exit codes."""
    return [process.wait(30) for process in processes]


def test_two_nodes_serve_and_the_loss_of_one_is_told() -> None:
    with socket.create_server(("127.0.0.2", 0)) as sock:
        port = sock.getsockname()[1]
    with loopback(port) as network:
        first, second = network.nodes(*FAKE, *PIPELINE)
        first.wait_ready()
        status, answer = first.request("POST", "/v1/completions", BODY)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 12
        rest, family = stream(first), [*first.family(), *second.family()]
        second.signal(signal.SIGKILL)
        assert b"worker_died" in rest.get(timeout=20)
        assert ended(first, second) == [1, -signal.SIGKILL]
        assert "node 1 (127.0.0.1) is lost" in first.output
        assert not psutil.wait_procs(family, timeout=10)[1]


def until_up(server: NodeProcess, count: int) -> None:
    deadline = time.monotonic() + 60
    while (told := server.get("/health")[1]).get("up") != count:
        assert time.monotonic() < deadline, (told, server.output)
        assert server.process.poll() is None, server.output
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_host_takes_no_replica_along_and_comes_back() -> None:
    with socket.create_server(("127.0.0.2", 0)) as sock:
        port = sock.getsockname()[1]
    with loopback(port) as network:
        first, second = network.nodes(*FAKE, "--dp", "2", "--device", "cpu", "--drain-timeout", "0")
        first.wait_listening()
        until_up(first, 2)
        ends: queue.Queue[bytes] = queue.Queue()
        for _ in range(2):  # one on each
            stream(first, ends)
        second.signal(signal.SIGKILL)
        assert b"worker_died" in ends.get(timeout=20)
        until_up(first, 1)
        assert first.request("POST", "/v1/completions", BODY)[0] == 200
        again = network.node(1, *FAKE, "--dp", "2", "--device", "cpu")
        until_up(first, 2)
        family = [*first.family(), *again.family()]
        first.signal(signal.SIGTERM)
        assert ended(first, again) == [0, 0]
        assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.slow
def test_an_agent_that_is_told_to_end_ends_its_answers_first() -> None:
    with socket.create_server(("127.0.0.2", 0)) as sock:
        port = sock.getsockname()[1]
    with loopback(port) as network:
        first, second = network.nodes(*FAKE, "--dp", "2", "--device", "cpu")
        first.wait_listening()
        until_up(first, 2)
        ends: queue.Queue[bytes] = queue.Queue()
        for _ in range(2):  # one on each
            stream(first, ends, 700)  # 3.5 s
        second.signal(signal.SIGTERM)
        assert ended(second) == [0]
        assert all(ends.get(timeout=20).endswith(b"data: [DONE]\n\n") for _ in range(2))
        first.signal(signal.SIGTERM)
        assert ended(first) == [0]


def find(first: NodeProcess, second: NodeProcess, who: str) -> psutil.Process:
    node = first if "0" in who else second
    if "worker" not in who:
        return psutil.Process(node.process.pid)
    deadline = time.monotonic() + 30
    while not (workers := node.workers()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return workers[0]


WHO = ["node 0", "worker of 0", "node 1", "worker of 1"]


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("flags", [(*FAKE, *PIPELINE), DATA, SETS], ids=["fake", "data", "sets"])
def test_killed_while_serving(cable: Network, who: str, flags: tuple[str, ...]) -> None:
    first, second = cable.nodes(*flags)
    first.wait_ready()
    rest = stream(first)
    find(first, second, who).send_signal(signal.SIGKILL)
    if who != "node 0":
        assert b"worker_died" in rest.get(timeout=20)
    codes = ended(first, second)
    assert codes[0] != 0
    assert codes[1] != 0
    assert none_left(cable)


@pytest.mark.slow
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("flags", [MODEL, DATA], ids=["stages", "data"])
def test_killed_while_loading(cable: Network, who: str, flags: tuple[str, ...]) -> None:
    first, second = cable.nodes(*flags)
    until(first, "load ")
    find(first, second, who).send_signal(signal.SIGKILL)
    codes = ended(first, second)
    assert codes[0] != 0
    assert codes[1] != 0
    if who == "worker of 1":
        assert "worker rank 1 " in first.output
    assert none_left(cable)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["node 0", "worker of 0"])
def test_killed_while_waiting(cable: Network, who: str) -> None:
    first = cable.node(0, *FAKE, *PIPELINE)
    until(first, "waits for 1 more")
    find(first, first, who).send_signal(signal.SIGKILL)
    assert ended(first)[0] != 0
    assert none_left(cable)


@pytest.mark.slow
def test_node_1_may_be_killed_while_it_waits_and_come_again(cable: Network) -> None:
    early = cable.node(1, *FAKE, *PIPELINE)
    until(early, "waits for node 0")
    early.signal(signal.SIGKILL)
    first, _ = cable.nodes(*FAKE, *PIPELINE)
    first.wait_ready()
    first.signal(signal.SIGTERM)
    assert ended(first) == [0]
    assert none_left(cable)


@pytest.mark.slow
def test_a_signal_ends_both_in_order(cable: Network) -> None:
    first, second = cable.nodes(*FAKE, *PIPELINE)
    first.wait_ready()
    first.signal(signal.SIGTERM)
    assert ended(first, second) == [0, 0]
    assert none_left(cable)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(*FAKE, *PIPELINE), MODEL, DATA, SETS], ids=["fake", "stages", "data", "sets"]
)
def test_a_cut_cable_ends_requests_and_both_nodes(cable: Network, flags: tuple[str, ...]) -> None:
    first, second = cable.nodes(*flags)
    first.wait_ready()
    rest = stream(first)
    begun = time.monotonic()
    cable.cut()
    assert b"worker_died" in rest.get(timeout=20)
    print(f"told after {time.monotonic() - begun:.2f} s")
    assert ended(first, second) == [1, 1]
    assert "node 1 (10.213.7.2) is lost" in first.output
    assert "node 0 is lost" in second.output
    assert none_left(cable)


@pytest.mark.slow
def test_a_cut_cable_takes_no_replica_of_node_0_along(cable: Network) -> None:
    flags = (*FAKE, "--dp", "2", "--device", "cpu", "--drain-timeout", "0")
    first, second = cable.nodes(*flags)
    first.wait_listening()
    until_up(first, 2)
    ends: queue.Queue[bytes] = queue.Queue()
    for _ in range(2):
        stream(first, ends)
    cable.cut()
    assert b"worker_died" in ends.get(timeout=20)
    assert ended(second) == [1]
    assert first.request("POST", "/v1/completions", BODY)[0] == 200
    cable.mend()
    cable.node(1, *flags)
    until_up(first, 2)
    first.signal(signal.SIGTERM)
    assert ended(first) == [0]
    assert none_left(cable)


@pytest.mark.slow
def test_a_router_notices_that_the_host_of_a_worker_is_gone(cable: Network) -> None:
    """No connection is closed. An answer that has begun ends."""
    there = ["ip", "netns", "exec", cable.second.name]
    worker = ServerProcess(*FAKE, "--device", "cpu", "--host", cable.second.address, prefix=there)
    here = ["ip", "netns", "exec", cable.first.name, sys.executable, "-m", "sgla", "route", "--port", "0"]
    router = None
    try:
        worker.wait_listening()
        url = f"http://{cable.second.address}:{worker.port}"
        router = subprocess.Popen(tied([*here, "--worker", url]), stdout=subprocess.PIPE, text=True)
        assert router.stdout is not None
        port = int(router.stdout.readline().split("http://127.0.0.1:")[1].split()[0])
        front: Any = SimpleNamespace(host=cable.first, port=port)
        with cable.first.inside():
            until_answered(port)
        rest = stream(front)
        cable.cut()
        assert b"worker_died" in rest.get(timeout=30)
    finally:
        worker.process.kill()
        worker.stop()
        if router is not None:
            router.kill()
            router.wait()


def until_answered(port: int) -> None:
    for _ in range(600):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/health")
        if connection.getresponse().status == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the router has no worker")


def text(server: ServerProcess) -> Any:
    status, answer = server.request("POST", "/v1/completions", {**BODY, "prompt": "Once upon a time " * 40})
    assert status == 200, answer
    return answer["choices"][0]["text"]


@pytest.fixture(scope="module")
def alone() -> Any:
    with serving("--threads", "1", "--device", "cpu", "--dtype", "float32") as server:
        return text(server)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [MODEL, DATA, SETS], ids=["stages", "data", "sets"])
def test_two_hosts_answer_as_one_also_over_a_slow_cable(
    cable: Network, flags: tuple[str, ...], alone: Any
) -> None:
    expected = alone
    first, second = cable.nodes(*flags, "--dtype", "float32")
    first.wait_ready()
    with ThreadPoolExecutor(2) as pool:  # with attention by data one on each
        assert [*pool.map(text, [first] * 2)] == [expected] * 2
    try:
        cable.slow()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"tc has no token bucket here: {error.stderr}")
    assert text(first) == expected
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {**BODY, "max_tokens": 40, "structured_outputs": {"json": schema}}
    del body["ignore_eos"]
    assert "a" in json.loads(first.request("POST", "/v1/completions", body)[1]["choices"][0]["text"])
    first.signal(signal.SIGTERM)
    assert ended(first, second) == [0, 0]
    assert none_left(cable)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"secret": "another"}, (), "another secret"),
        ({}, ("--page-size", "32"), "--page-size: 32 here"),
        ({}, ("--tp", "2"), "--tp: 2 here"),
    ],
)
def test_a_node_that_does_not_belong_ends_and_the_right_one_serves(
    cable: Network, changes: dict[str, str], flags: tuple[str, ...], words: str
) -> None:
    first, wrong = cable.node(0, *FAKE, *PIPELINE), cable.node(1, *FAKE, *PIPELINE, *flags, **changes)
    assert wrong.wait(60) == 2
    assert words in wrong.output
    cable.node(1, *FAKE, *PIPELINE)
    first.wait_ready()
    first.signal(signal.SIGTERM)
    assert ended(first) == [0]
    assert none_left(cable)

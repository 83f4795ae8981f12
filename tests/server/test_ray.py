"""``sgla serve --executor ray`` on a real Ray of this machine: actors, and what is left of them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import ServerProcess, serving
from two_hosts import Host, namespaces

from sgla.errors import ConfigError

ray = pytest.importorskip("ray")

FLAGS = ("--executor", "ray", "--device", "cpu", "--threads", "1", "--kv-cache-bytes", "64M")
BODY = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
STATE = """
import json, ray
from ray.util import placement_group_table
ray.init(log_to_driver=False)
groups = [each["state"] for each in placement_group_table().values()]
print(json.dumps([ray.available_resources().get("CPU", 0), groups]))
"""
CPUS = 4  # of the cluster
START = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
pytestmark = pytest.mark.slow  # a cluster takes 10 s to start


def alone(folder: str) -> dict[str, str]:
    """Variables that keep Ray away from what else there is of it in this account."""
    return {
        "RAY_TMPDIR": folder,
        "RAY_ADDRESS": "",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture
def folder() -> Iterator[str]:
    """Of Ray's sessions. Its sockets want a short name."""
    made = tempfile.mkdtemp(prefix="sgla-ray-", dir="/tmp")
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def serve(folder: str) -> Iterator[Any]:
    """Starts servers; in the end looks for what they left behind."""
    made: list[ServerProcess] = []

    def start(*flags: str, **variables: str) -> ServerProcess:
        made.append(ServerProcess(*FLAGS, *flags, variables=alone(folder) | variables))
        return made[-1]

    yield start
    for process in made:
        process.stop()


def running(folder: str) -> list[psutil.Process]:
    """Ray's processes whose sessions are in ``folder``, and what they have started."""
    found = []
    for process in psutil.process_iter():
        try:
            if folder in " ".join(process.cmdline()) or process.environ().get("RAY_TMPDIR") == folder:
                found.append(process)
        except psutil.Error:
            pass
    return found


def none_left(folder: str) -> bool:
    return ended(running(folder), 20)


def ended(processes: list[psutil.Process], seconds: float) -> bool:
    """Whether they end in that time; those that nobody has asked for their exit code have."""
    rest = psutil.wait_procs(processes, seconds)[1]
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in rest)


def actors(folder: str) -> list[psutil.Process]:
    return [process for process in running(folder) if "ray::Node" in " ".join(process.cmdline())]


@pytest.fixture
def cluster(folder: str) -> Iterator[str]:
    """The address of one that others have started."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    flags = [
        "--head",
        "--num-cpus",
        str(CPUS),
        "--port",
        str(port),
        "--temp-dir",
        folder,
        "--include-dashboard",
        "false",
    ]
    head = subprocess.Popen(
        [*START, *flags, "--node-ip-address", "127.0.0.1"],
        env=os.environ | alone(folder),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(30)
        assert none_left(folder)


def left(cluster: str, folder: str) -> dict[str, Any]:
    """What the cluster has, when it has noticed who is gone."""
    for _ in range(10):
        variables = os.environ | alone(folder) | {"RAY_ADDRESS": cluster}
        done = subprocess.run([sys.executable, "-c", STATE], env=variables, capture_output=True, text=True)
        free, groups = json.loads(done.stdout)
        if free == CPUS:
            break
        time.sleep(0.5)
    return {"free": free, "groups": set(groups)}


SETS, DATA = ("--cp", "2"), ("--tp", "2", "--dp-attention")


@pytest.mark.parametrize(
    "flags",
    [("--pp", "2", *SETS), ("--pp", "2", *DATA), ("--nnodes", "2", *SETS), ("--nnodes", "2", *DATA)],
)
def test_nodes_of_several_ranks_answer_as_one(serve: Any, cluster: str, flags: tuple[str, ...]) -> None:
    body = {**BODY, "prompt": "Once upon a time " * 20}
    plain = ("--dtype", "float32", "--max-running-requests", "4")
    with serving("--device", "cpu", "--threads", "1", "--kv-cache-bytes", "64M", *plain) as alone:
        expected = alone.request("POST", "/v1/completions", body)[1]["choices"]
    server = serve(*flags, *plain, RAY_ADDRESS=cluster)
    server.wait_ready(240)
    assert server.request("POST", "/v1/completions", body, 240)[1]["choices"] == expected
    server.signal(signal.SIGTERM)
    assert server.wait(60) == 0


@contextmanager
def started(host: Host, folder: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Ray on a host, with room for one node."""
    command = ["ip", "netns", "exec", host.name, *START, "--num-cpus", "1"]
    process = subprocess.Popen(
        [*command, "--node-ip-address", host.address, *flags],
        env=os.environ | alone(folder),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()  # in order it would wait for what is behind the cable
        process.wait(30)


def test_two_hosts_of_a_cluster_serve_and_a_cut_cable_is_told(folder: str) -> None:
    """Each has room for one node, and the server's ranks meet over the cable."""
    with namespaces() as network:
        head = "--head", "--port", "6399", "--temp-dir", folder, "--include-dashboard", "false"
        address = f"{network.first.address}:6399"
        with started(network.first, folder, *head), started(network.second, folder, "--address", address):
            prefix = ["ip", "netns", "exec", network.first.name]
            variables = alone(folder) | {"RAY_ADDRESS": address}
            server = ServerProcess(*FLAGS, "--pp", "2", prefix=prefix, variables=variables)
            try:
                with network.first.inside():
                    server.wait_ready()
                    status, answer = server.request("POST", "/v1/completions", BODY)
                    assert (status, answer["usage"]["completion_tokens"]) == (200, 12)
                    connection = http.client.HTTPConnection("127.0.0.1", server.port)
                    body = {**BODY, "max_tokens": 3000, "stream": True}
                    connection.request(
                        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                    )
                    response = connection.getresponse()
                [actor] = actors(folder)
                assert actor.pid in network.second.pids
                assert response.readline().startswith(b"data: ")
                network.cut()
                begun = time.monotonic()
                assert b"worker_died" in response.read()
                assert time.monotonic() - begun < 4  # of which 2 s are said
                assert server.wait(30) == 1
            finally:
                server.stop()
        assert none_left(folder)


def job(folder: str) -> psutil.Process:
    """Ray's driver."""
    return next(each for each in running(folder) if "sgla.cli.ray_job" in " ".join(each.cmdline()))


@pytest.mark.parametrize("who", ["actor", "driver"])
def test_two_nodes_serve_and_the_loss_of_one_is_told(serve: Any, folder: str, who: str) -> None:
    server = serve("--pp", "2")
    server.wait_ready()
    status, answer = server.request("POST", "/v1/completions", BODY)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 12
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {**BODY, "max_tokens": 3000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    [lost] = actors(folder) if who == "actor" else [job(folder)]
    family, begun = server.family(), time.monotonic()
    lost.kill()
    try:
        rest = response.read()
    except http.client.IncompleteRead as error:
        rest = error.partial
    print(f"told after {time.monotonic() - begun:.2f} s")
    assert b"worker_died" in rest
    assert server.wait(30) == 1
    assert none_left(folder)
    assert ended(family, 180)  # Ray's agents look for their parent about once a minute


def test_ctrl_c_leaves_nothing_in_a_cluster_of_others(serve: Any, folder: str, cluster: str) -> None:
    server = serve("--pp", "2", RAY_ADDRESS=cluster)
    server.wait_ready()
    assert server.request("POST", "/v1/completions", BODY)[0] == 200
    family = server.family()
    server.signal(signal.SIGINT)
    assert server.wait(30) == 0
    assert ended(family, 20)
    assert left(cluster, folder) == {"free": CPUS, "groups": {"REMOVED"}}
    assert not actors(folder)


def test_ray_finds_room_for_each_of_two_replicas(serve: Any, folder: str, cluster: str) -> None:
    server = serve("--dp", "2", "--pp", "2", RAY_ADDRESS=cluster)
    server.wait_ready()
    end = time.monotonic() + 120
    while "replica 1 is ready" not in server.output and time.monotonic() < end:
        time.sleep(0.2)
    assert len(actors(folder)) == 2, server.output
    answers = [server.request("POST", "/v1/completions", BODY) for _ in range(3)]
    assert [status for status, _ in answers] == [200] * 3
    family = server.family()
    server.signal(signal.SIGINT)
    assert server.wait(30) == 0
    assert ended(family, 20)
    assert left(cluster, folder) == {"free": CPUS, "groups": {"REMOVED"}}


def test_a_killed_server_and_nodes_without_room_leave_nothing(serve: Any, folder: str, cluster: str) -> None:
    server = serve("--pp", "2", RAY_ADDRESS=cluster)
    while not actors(folder):
        assert server.process.poll() is None, server.output
        time.sleep(0.1)
    family = server.family()
    server.signal(signal.SIGKILL)
    assert server.wait(30) == -signal.SIGKILL
    assert ended(family, 20)
    assert left(cluster, folder) == {"free": CPUS, "groups": {"REMOVED"}}
    large = serve("--pp", "5", "--dist-timeout", "2", RAY_ADDRESS=cluster)
    assert large.wait(60) == 2
    assert "no room for 5 nodes of 1 CPU for 2 s" in large.output
    assert "it has 4 CPU, of which 4 CPU are free" in large.output
    assert left(cluster, folder) == {"free": CPUS, "groups": {"REMOVED"}}


def test_an_actor_that_cannot_serve_says_why(serve: Any, folder: str, tmp_path: Path) -> None:
    """Its own settings are wrong, which only its host can know."""
    server = serve("--pp", "2", "--dist-secret-file", "/proc/self/comm")  # each process has its own
    assert server.wait(120) == 2
    assert "another secret" in server.output
    assert none_left(folder)


def test_a_cluster_that_is_gone_is_not_waited_for(serve: Any, folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        gone = f"127.0.0.1:{sock.getsockname()[1]}"
    asked = serve("--pp", "2", "--dist-timeout", "3", RAY_ADDRESS=gone)
    assert asked.wait(60) == 2
    assert f"Ray has not reached {gone} for 3 s" in asked.output
    (Path(folder) / "ray").mkdir(exist_ok=True)
    (Path(folder) / "ray" / "ray_current_cluster").write_text(gone)  # as one that was killed leaves it
    server = serve("--pp", "2")
    server.wait_ready()
    assert f"no Ray cluster is at {gone} any more" in server.output
    server.signal(signal.SIGINT)
    assert server.wait(30) == 0
    assert none_left(folder)


APPLICATION = """
import sys
from ray import serve
from sgla.ray_serve import app
serve.start(http_options={"port": int(sys.argv[1])})
serve.run(app({"executor": "fake", "device": "cpu", "context_length": 512}), route_prefix="/")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
"""


def test_replicas_of_ray_serve_pass_all_through(folder: str) -> None:
    pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(port)],
        env=os.environ | alone(folder) | {"SGLA_DEMO": "packaged"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert any(line == b"ready\n" for line in process.stdout)

        def send(body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            return connection, connection.getresponse()

        def ask(body: dict[str, Any]) -> tuple[int, str, bytes]:
            _, answer = send(body)
            once = {name.lower() for name in answer.headers}
            assert len(once) == len(answer.headers), answer.headers
            return answer.status, answer.headers["Content-Type"], answer.read()

        status, _, whole = ask(BODY)
        assert status == 200
        assert json.loads(whole)["usage"]["completion_tokens"] == 12
        status, kind, stream = ask({**BODY, "stream": True})
        assert (status, kind.split(";")[0]) == (200, "text/event-stream")
        assert stream.endswith(b"data: [DONE]\n\n")
        assert ask({**BODY, "max_tokens": -1})[0] == 400
        # One whose server has ended says so, and is replaced.
        connection, answer = send({**BODY, "stream": True, "max_tokens": 400})
        begun = answer.readline()
        [server] = [each for each in running(folder) if "--config" in each.cmdline()]
        server.kill()
        rest = begun + answer.read()
        assert json.loads(rest.split(b"data: ")[-1])["error"]["code"] == "worker_died", rest
        status, _, told = ask(BODY)
        assert (status, json.loads(told)["error"]["code"]) == (503, "worker_died")
        for _ in range(40):
            status, _, told = ask(BODY)
            if status == 200:
                break
            time.sleep(0.5)
        assert json.loads(told)["choices"] == json.loads(whole)["choices"]
    finally:
        process.stdin.close()
        process.wait(60)
    assert none_left(folder)


def test_what_is_not_for_a_replica_is_refused() -> None:
    pytest.importorskip("ray.serve")
    from sgla.ray_serve import app

    for settings, words in (
        ({"nnodes": 2}, "nnodes is not for a replica"),
        ({"executor": "ray", "pp": 2}, "executor ray is not for a replica"),
        ({"page_size": "x"}, "page_size"),
    ):
        with pytest.raises(ConfigError, match=words):
            app(settings)

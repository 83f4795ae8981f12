"""``executor/ray.py`` without Ray: a script is the process that has it. ``tests/server/test_ray.py`` has a
real one."""

from __future__ import annotations

import asyncio
import socket
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_executor import STUB

from sgla.cli.ray_job import left_behind
from sgla.config import Config
from sgla.errors import ConfigError, SglaError, WorkerDied
from sgla.executor import ray as module
from sgla.executor.ray import RayExecutor, needs, require
from sgla.nodes import common
from sgla.observe.machine import Machine
from sgla.resolve import check, resolve
from sgla.route.replicas import Share, of_replica, shares

GIVEN = Config(executor="ray", pp=2, device="cpu", threads=1, dist_timeout=30.0)
# Says in its error what it was told.
JOB = """
import json, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
file = channel.makefile("rw")
def say(**message):
    file.write(json.dumps(message) + "\\n")
    file.flush()
wanted = json.loads(file.readline())
say(type="Placed", here="127.0.0.2")
begin = json.loads(file.readline())
[node] = begin["nodes"]
words = [wanted["nodes"], wanted["resources"], node["node_rank"], node["executor"], len(node["dist_secret"])]
words += [node["dist_init_addr"].split(":")[0], node["api_key"], begin["variables"]["GLOO_X"]]
say(type="Over", fault=["ConfigError", " ".join(map(str, words)), "model"])
file.readline()
"""


@pytest.fixture(autouse=True)
def ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        "sgla.executor.nodes.common", lambda config, torch, source: common(config, torch, None)
    )


async def failed(job: str, monkeypatch: pytest.MonkeyPatch) -> SglaError:
    """What a start ends with; nothing is left of it."""
    monkeypatch.setattr(module, "ENTRY", job)
    executor = RayExecutor(replace(GIVEN, nnodes=2, api_key=["key"]), {}, runner=STUB)  # type: ignore[arg-type]
    executor.spawn()
    with pytest.raises(SglaError) as caught:
        await asyncio.wait_for(executor.start(lambda progress: None), 20)
    await executor.close()
    assert executor._job is not None
    while executor._job.poll() is None:
        await asyncio.sleep(0.01)
    return caught.value


async def test_nodes_that_ray_places_get_all_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_X", "y")
    error = await failed(JOB, monkeypatch)
    assert isinstance(error, ConfigError)
    assert (error.message, error.param) == ("2 {'CPU': 1.0} 1 procs 64 127.0.0.2 [] y", "model")


async def test_the_end_of_the_process_that_has_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    error = await failed("raise SystemExit", monkeypatch)
    assert isinstance(error, WorkerDied)
    assert "the process that speaks with Ray has ended" in error.message


def test_each_stage_is_a_node_if_nobody_says_otherwise() -> None:
    machine = Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    found = resolve(replace(GIVEN, tp=2, pp=3), machine)
    assert (found.config.nnodes, found.config.local_ranks) == (3, 2)
    assert found.reasons["nnodes"] == "Ray places each of the --pp stages"
    assert resolve(found.config, machine).config == found.config
    assert resolve(replace(GIVEN, pp=4, nnodes=2), machine).config.nnodes == 2


def test_ray_finds_room_for_each_replica() -> None:
    config, machine = replace(GIVEN, dp=3), Machine(cores=2, physical_cores=2, memory_available=1 << 34)
    check(config)
    assert shares(config, "cuda", machine) == [Share()] * 3
    assert str(Share()) == "what Ray has found for it"
    each = of_replica(config)
    assert (each.executor, each.pp, each.dp) == ("ray", 2, 1)
    assert resolve(each, machine).config.nnodes == 2


def test_what_a_node_needs() -> None:
    config = replace(GIVEN, tp=4, nnodes=2)
    assert needs(replace(config, threads=3)) == {"CPU": 12.0}
    assert needs(replace(config, threads=None)) == {"CPU": 4.0}
    assert needs(replace(config, device="cuda", threads=3)) == {"CPU": 4.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp": 1}, "with --tp 1 --pp 1: a stage stays on one host"),
        ({"pp": 1, "tp": 2}, "with --tp 2 --pp 1: a stage stays on one host"),
        ({"pp": 1, "tp": 2, "nnodes": 2}, "a layer's ranks stay on one host"),
        ({"pp": 3, "nnodes": 2}, "a layer's ranks stay on one host"),
        ({"node_rank": 1, "nnodes": 2}, "with --node-rank 1: Ray starts the other nodes"),
        ({"dp": 2, "nnodes": 2}, "with --dp 2 and --nnodes 2: each stage is a node"),
        ({"dp": 2, "pp": 1}, "with --tp 1 --pp 1: a stage stays on one host"),
        ({"role": "decode"}, "with --role"),
        ({"dist_init_addr": "http://a"}, "needs --dist-init-addr HOST:PORT"),
        ({"dist_secret_file": "/none"}, "No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(replace(GIVEN, **changes))


def test_without_ray_or_outside_of_its_cluster_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require()
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="cannot use Ray's client"):
        require()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sgla\[ray\]'"):
        require()


def test_a_cluster_that_was_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not left_behind(), "there was none"
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address + "\n")
        assert not left_behind(), "it runs"
    assert left_behind() == address
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not left_behind(), "another one is asked for"

"""Mooncake's store: a package in its place, and the package itself where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny import make_core, run, submit, tiny_config, tiny_source

from sgla.errors import ConfigError
from sgla.worker.cpu import CpuRunner

TEXT = [(7 * i + 7) % 300 for i in range(100)]


class Stored:
    """In the place of a MooncakeDistributedStore. ``objects``: of all; ``broken``: the master is gone."""

    objects: dict[str, bytes] = {}
    given: list[tuple[Any, ...]] = []
    broken = False

    def setup(self, *given: Any) -> int:
        self.given.append(given)
        return -1 if self.broken else 0

    def get(self, key: str) -> bytes:
        return b"" if self.broken else self.objects.get(key, b"")

    def upsert(self, key: str, value: bytes) -> int:
        if self.broken:
            return -900
        self.objects[key] = bytes(value)
        return 0

    def is_exist(self, key: str) -> int:
        return -900 if self.broken else key in self.objects


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> type[Stored]:
    kind = type("Fresh", (Stored,), {"objects": {}, "given": []})
    module: Any = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = kind
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return kind


@pytest.fixture
def master() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"mooncake://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(autouse=True)
def asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short texts, too."""
    monkeypatch.setattr("sgla.worker.store.ASKED", 32)


def start(url: str) -> CpuRunner:
    return CpuRunner(tiny_config(kv_store=url), tiny_source(), 0, 1, "", lambda progress: None)


def told(runner: CpuRunner) -> tuple[list[int], int, int]:
    """Tokens behind the text, how many of it were cached, and how many copies failed."""
    core = make_core(runner.facts)
    [delta, *more] = run(runner, [submit("r", TEXT, 3)], core)["r"]
    tokens = [token for each in (delta, *more) for token in each.tokens]
    return tokens, delta.cached_tokens, core.stats().tiers[0].failed


def test_servers_share_what_it_has(stored: type[Stored], master: str) -> None:
    tokens, cached, failed = told(start(f"{master}?segment=2G&host=10.0.0.7"))
    assert (cached, failed) == (0, 0)
    assert told(start(master)) == (tokens, 96, 0)
    [host, metadata, segment, _, protocol, device, address] = stored.given[0]
    assert (host, metadata, segment, protocol, device) == ("10.0.0.7", "P2PHANDSHAKE", 2 << 30, "tcp", "")
    assert master.endswith(address)


def test_damaged_objects_and_a_master_that_is_gone_cost_time_alone(
    stored: type[Stored], master: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, _, _ = told(start(master))
    name = min(stored.objects)
    stored.objects[name] = stored.objects[name][:-1]
    found, _, failed = told(start(master))
    assert (found, failed) == (tokens, 1)
    assert told(start(master)) == (tokens, 96, 0), "it has been written again"
    runner = start(master)
    stored.broken = True
    caplog.clear()
    found, cached, failed = told(runner)
    assert (found, cached) == (tokens, 0)
    assert failed > 0
    assert "Mooncake's store gives error -900" in caplog.text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mooncake://127.0.0.1:1", "no mooncake_master answers"),
        ("{}?segment=much", "much"),
        ("{}?sgment=1G", "sgment is none of segment, protocol, host"),
        ("lm://127.0.0.1:1", r"lmcache_server HOST PORT starts one .pip install 'sgla.lmcache.'"),
        ("lm://127.0.0.1:1/x", "it is lm://HOST:PORT"),
        ("nixl://a", "it is nixl:///FOLDER"),
    ],
)
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_is_refused(master: str, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        start(url.format(master))
    assert caught.value.param == "kv_store"


def test_a_package_that_is_missing_is_named(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'sgla\[mooncake\]'"):
        start(master)


@pytest.mark.slow
def test_the_package_itself(tmp_path: Path) -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    beside = str(Path(sys.executable).parent)
    program = shutil.which("mooncake_master", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    assert program is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        words = [program, f"--rpc_port={port}", "--metrics_port=0"]
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        due = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < due, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.05)
        url = f"mooncake://127.0.0.1:{port}?segment=64M"
        first, second = start(url), start(url)
        tokens, _, _ = told(first)
        assert told(second) == (tokens, 96, 0)
    finally:
        process.kill()
        process.wait()

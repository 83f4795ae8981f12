"""NIXL as a store of files: a package in its place, and the package itself where it is installed."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_mooncake import start, told

from sgla.errors import ConfigError
from sgla.worker import nixl


class Plugin:
    """What its agents do. ``fault``: ``state`` of a read that ends so, or what is raised; ``known``: places
    that are registered."""

    def __init__(self) -> None:
        self.fault = ""
        self.started: list[tuple[str, dict[str, str]]] = []
        self.known: dict[tuple[str, int], int] = {}

    @property
    def files(self) -> int:
        return sum(kind == "FILE" for kind, _ in self.known)


def module_of(plugin: Plugin) -> ModuleType:
    class Agent:
        def __init__(self, name: str, config: dict[str, Any]) -> None:
            self.name = name
            assert config["backends"] == []

        def get_plugin_list(self) -> list[str]:
            return ["GDS", "POSIX"]

        def create_backend(self, name: str, given: dict[str, str]) -> None:
            if name not in self.get_plugin_list():
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
            plugin.started.append((name, given))

        def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> Any:
            [(address, size, number, _)] = places
            name = kind, number if kind == "FILE" else address
            plugin.known[name] = size
            return name

        def deregister_memory(self, name: Any) -> None:
            del plugin.known[name]

        def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> Any:
            [(address, size, number)] = places
            assert plugin.known[kind, number if kind == "FILE" else address] >= size
            return address, size, number

        def initialize_xfer(self, verb: str, mine: Any, theirs: Any, agent: str) -> Any:
            assert agent == self.name
            ends = ["ERR"] if plugin.fault == "state" and verb == "READ" else ["PROC", "DONE"]
            return SimpleNamespace(verb=verb, mine=mine, file=theirs[2], states=itertools.cycle(ends))

        def transfer(self, handle: Any) -> str:
            if plugin.fault == "raise":
                raise RuntimeError("NIXL_ERR_BACKEND")
            address, size, _ = handle.mine
            room = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * size).from_address(address))
            if handle.verb == "WRITE":
                os.pwrite(handle.file, room.tobytes(), 0)
            else:
                data = os.pread(handle.file, size, 0)
                room[: len(data)] = np.frombuffer(data, np.uint8)
            return str(next(handle.states))

        def check_xfer_state(self, handle: Any) -> str:
            return str(next(handle.states))

        def release_xfer_handle(self, handle: Any) -> None: ...

    made: Any = ModuleType("nixl._api")
    made.nixl_agent, made.nixl_agent_config = Agent, lambda **settings: settings
    made.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    return made  # type: ignore[no-any-return]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    made = Plugin()
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module_of(made))
    return made


@pytest.fixture(autouse=True)
def asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short texts, too."""
    monkeypatch.setattr("sgla.worker.store.ASKED", 32)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_servers_share_what_it_has(plugin: Plugin, tmp_path: Path) -> None:
    url = f"nixl://{tmp_path}/kv"
    tokens, cached, failed = told(start(f"{url}?use_uring=true"))
    assert (cached, failed) == (0, 0)
    assert len(files(tmp_path)) == 6
    assert told(start(f"{url}?backend=GDS")) == (tokens, 96, 0)
    assert plugin.started == [("POSIX", {"use_uring": "true"}), ("GDS", {})]
    assert plugin.files == 0


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("change", [short, empty, other])
def test_damaged_files_cost_time_alone(change: Callable[[Path], None], tmp_path: Path) -> None:
    url = f"nixl://{tmp_path}"
    tokens, _, _ = told(start(url))
    change(files(tmp_path)[0])
    found, _, failed = told(start(url))
    assert (found, failed) == (tokens, 1)
    assert told(start(url)) == (tokens, 96, 0), "it has been written again"


@pytest.mark.parametrize(
    ("fault", "words"), [("raise", "NIXL_ERR_BACKEND"), ("state", "a read ends with ERR")]
)
def test_what_fails_costs_time_alone(
    plugin: Plugin, fault: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"nixl://{tmp_path}"
    tokens, _, _ = told(start(url))
    plugin.fault = fault
    found, cached, failed = told(start(url))
    assert (found, cached) == (tokens, 0)
    assert failed > 0
    assert words in caplog.text
    assert plugin.files == 0
    plugin.fault = ""
    assert told(start(url)) == (tokens, 96, 0)


def test_half_a_file_has_no_name(plugin: Plugin, tmp_path: Path) -> None:
    store, root = nixl.open_nixl(f"nixl://{tmp_path}/kv")
    store.pipe_file(f"{root}/a", b"whole")
    plugin.fault = "raise"
    with pytest.raises(OSError, match="NIXL_ERR_BACKEND"):
        store.pipe_file(f"{root}/a", b"other")
    with pytest.raises(FileNotFoundError):
        store.pipe_file(f"{root}/no/a", b"other")
    plugin.fault = ""
    assert [path.name for path in files(tmp_path)] == ["a"]
    assert store.cat_file(f"{root}/a", 1, 3) == b"ho"


def test_a_file_that_takes_too_long(plugin: Plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its place in memory is not used again."""
    store, root = nixl.open_nixl(f"nixl://{tmp_path}")
    store.pipe_file(f"{root}/a", b"whole")
    before = store._own.room
    monkeypatch.setattr(nixl, "PATIENCE", 0.0)
    with pytest.raises(TimeoutError):
        store.cat_file(f"{root}/a", 0, 9)
    assert store._lost[0].base is before
    monkeypatch.setattr(nixl, "PATIENCE", 10.0)
    assert store.cat_file(f"{root}/a", 0, 9) == b"whole"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nixl://bucket", "it is nixl:///FOLDER"),
        ("nixl:///", "it is nixl:///FOLDER"),
        ("nixl://{}?backend=OBJ", "its plugin OBJ does not start here.*there are GDS, POSIX"),
        ("nixl:///proc/kv", "No such file|denied"),
    ],
)
def test_what_cannot_be_is_refused(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        start(url.format(tmp_path))
    assert caught.value.param == "kv_store"


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"--kv-store nixl:.*pip install 'sgla\[nixl\]'"):
        start(f"nixl://{tmp_path}")


@pytest.mark.slow
def test_the_package_itself(tmp_path: Path) -> None:
    pytest.importorskip("nixl._api", exc_type=ImportError)
    tokens, cached, failed = told(start(f"nixl://{tmp_path}"))
    assert (cached, failed) == (0, 0)
    assert told(start(f"nixl://{tmp_path}")) == (tokens, 96, 0)

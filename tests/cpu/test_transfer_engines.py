"""Units that a decode server reads out of a prefill server's memory, by NIXL or Mooncake: functions in their
places, and the packages themselves where they are installed."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from forked import CONTEXT
from servers import (
    ASKED,
    MODELS,
    TEXTS,
    begin,
    check_idle,
    decoding,
    port_of,
    prefilling,
    same,
    same_text,
    stats,
    tell,
    wait_until,
    write,
)

from sgla.errors import ConfigError
from sgla.peers import Channel, Message, Unit
from sgla.worker.offer import HostUnits

BACKENDS = "nixl", "mooncake"


class Wire:
    """What fakes of both have in common: what of this process's memory may be read, and what goes wrong."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # bytes, by their address
        self.fault = ""  # to "meet" somebody, or to "read"
        self.reads = 0

    def read(self, into: int, address: int, count: int) -> bool:
        self.reads += 1
        for start in (into, address):
            assert any(a <= start and start + count <= a + size for a, size in self.registered.items())
        if self.fault == "read":
            return False
        ctypes.memmove(into, address, count)
        if self.fault == "bytes":
            ctypes.memset(into, 7, 1)
        return True


def nixl(wire: Wire) -> ModuleType:
    class Agent:
        def __init__(self, name: str, config: Any) -> None:
            self.name = name

        def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> int:
            [(address, size, _, _)] = places
            wire.registered[address] = size
            return address

        def deregister_memory(self, address: int) -> None:
            del wire.registered[address]

        def get_agent_metadata(self) -> bytes:
            return self.name.encode()

        def add_remote_agent(self, metadata: bytes) -> bytes:
            if wire.fault == "meet":
                raise RuntimeError("NIXL_ERR_MISMATCH")
            return metadata

        def remove_remote_agent(self, name: str) -> None: ...

        def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> Any:
            return places[0]

        def initialize_xfer(self, kind: str, mine: Any, theirs: Any, agent: str) -> Any:
            assert (kind, mine[1]) == ("READ", theirs[1])
            return SimpleNamespace(
                ends=(mine[0], theirs[0], mine[1]), states=itertools.cycle(["PROC", "DONE"])
            )

        def transfer(self, handle: Any) -> str:
            if not wire.read(*handle.ends):
                raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
            return next(handle.states)

        def check_xfer_state(self, handle: Any) -> str:
            return next(handle.states)

        def release_xfer_handle(self, handle: Any) -> None: ...

    made: Any = ModuleType("nixl._api")
    made.nixl_agent, made.nixl_agent_config = Agent, lambda **settings: settings
    made.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    return made  # type: ignore[no-any-return]


def mooncake(wire: Wire) -> ModuleType:
    class Engine:
        def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
            assert (host, metadata, protocol, device) == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
            return 0

        def get_rpc_port(self) -> int:
            return 1234

        def register_memory(self, address: int, size: int) -> int:
            wire.registered[address] = size
            return 0

        def unregister_memory(self, address: int) -> int:
            del wire.registered[address]
            return 0

        def transfer_sync_read(self, engine: str, into: int, address: int, size: int) -> int:
            return -1 if engine != "127.0.0.1:1234" else wire.read(into, address, size) - 1

    made: Any = ModuleType("mooncake.engine")
    made.TransferEngine = Engine
    return made  # type: ignore[no-any-return]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """In the places of both packages."""
    wire = Wire()
    for module in (nixl(wire), mooncake(wire)):
        above = ModuleType(module.__name__.split(".")[0])
        above.__spec__ = ModuleSpec(above.__name__, None)
        monkeypatch.setitem(sys.modules, above.__name__, above)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), MODELS["pages"])


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Any]:
    with begin(folder) as engine:
        return tell(engine, ASKED)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of those that were told of, whether they have a place, and bytes beside the message."""
    told, send = list[tuple[bool, int]](), Channel.send

    def watch(channel: Channel, message: Message, beside: bytes = b"") -> None:
        if isinstance(message, Unit):
            told.append((message.place >= 0, len(beside)))
        send(channel, message, beside)

    monkeypatch.setattr(Channel, "send", watch)
    return told


@pytest.mark.parametrize("backend", BACKENDS)
def test_units_are_read_and_not_sent(
    backend: str, folder: Path, alone: list[Any], wire: Wire, units: list[tuple[bool, int]]
) -> None:
    both = {"kv_transfer_backend": backend}
    with prefilling(folder, **both) as first, decoding(folder, port_of(first), **both) as second:
        assert same(tell(second, ASKED), alone)
        [tier] = stats(second).tiers
        assert (tier.asked, tier.unanswered, tier.failed) == (3, 0, 0)
        assert wire.reads == 2 * tier.loaded > 24
        assert set(units) == {(True, 0)}
        check_idle(second)
        check_idle(first)
    assert not wire.registered


@pytest.mark.parametrize(
    ("backend", "fault"),
    [("nixl", "read"), ("mooncake", "read"), ("nixl", "bytes"), ("nixl", "mark"), ("nixl", "meet")],
)
def test_what_cannot_be_read_is_sent_or_computed(
    backend: str,
    fault: str,
    folder: Path,
    alone: list[Any],
    wire: Wire,
    units: list[tuple[bool, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reads fail; somebody has written to what is read; a unit has made room for another; or the engine there
    is none that is known."""
    both, lent = {"kv_transfer_backend": backend}, HostUnits.lent

    def late(units: HostUnits, key: bytes) -> Any:
        place, mark = lent(units, key) or (0, 0)
        return place, mark - 2

    if fault == "mark":
        monkeypatch.setattr(HostUnits, "lent", late)
    wire.fault = fault
    with prefilling(folder, **both) as first, decoding(folder, port_of(first), **both) as second:
        assert same_text(tell(second, ASKED), alone)
        [tier] = stats(second).tiers
        assert (tier.loaded > 0, tier.failed > 0) == ((True, False) if fault == "meet" else (False, True))
        assert {placed for placed, _ in units} == {fault != "meet"}
        check_idle(second)
        check_idle(first)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_both_servers_need_the_same(folder: Path, wire: Wire) -> None:
    with (
        prefilling(folder, kv_transfer_backend="nixl") as first,
        pytest.raises(ConfigError, match="--kv-transfer-backend: auto or tcp here, nixl there"),
    ):
        decoding(folder, port_of(first))


def test_mooncake_wants_an_address(folder: Path, wire: Wire) -> None:
    with pytest.raises(ConfigError, match="--host 0.0.0.0 must be the address"):
        prefilling(folder, kv_transfer_backend="mooncake", host="0.0.0.0")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_missing_is_named(
    backend: str, folder: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs --role prefill or decode"):
        begin(folder, kv_transfer_backend=backend)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'sgla\[{backend}\]'") as caught:
        prefilling(folder, kv_transfer_backend=backend)
    assert caught.value.param == "kv_transfer_backend"


def serve(folder: str, backend: str, pipe: Connection) -> None:
    with prefilling(Path(folder), kv_transfer_backend=backend) as engine:
        pipe.send(port_of(engine))
        pipe.recv()


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> Iterator[str]:
    name = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}[request.param]
    pytest.importorskip(name, exc_type=ImportError)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("installed", BACKENDS, indirect=True)
def test_the_package_itself(
    installed: str,
    folder: Path,
    alone: list[Any],
    units: list[tuple[bool, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two processes, one of which is killed."""
    ours, theirs = Pipe()
    process = CONTEXT.Process(target=serve, args=(str(folder), installed, theirs), daemon=True)
    process.start()
    theirs.close()
    with decoding(folder, ours.recv(), kv_transfer_backend=installed) as second:
        assert same(tell(second, ASKED), alone)
        [tier] = stats(second).tiers
        assert (tier.asked, tier.unanswered, tier.failed) == (3, 0, 0)
        assert tier.loaded > 12
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.extend(tell(second, [TEXTS[1]])))
        thread.start()
        process.kill()
        thread.join()
        wait_until(lambda: "is gone" in caplog.text)
        assert same_text(told, tell(second, [TEXTS[1]]))
        check_idle(second)

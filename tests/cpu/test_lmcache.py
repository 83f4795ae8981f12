"""LMCache's server as a store: one that speaks its protocol, and the package's own where it is installed."""

from __future__ import annotations

import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from test_mooncake import start, told

HEAD = struct.Struct("9i150s")


class Kept(socketserver.ThreadingTCPServer):
    """``objects``: by key; ``breaks``: it closes a connection instead of an answer."""

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.breaks = False
        super().__init__(("127.0.0.1", 0), Client)


class Client(socketserver.StreamRequestHandler):
    server: Kept

    def handle(self) -> None:
        while head := self.rfile.read(HEAD.size):
            command, length, kind, dtype, *_, key = HEAD.unpack(head)
            assert len(key.split(b"@")) == 5
            if command == 1:
                assert (kind, dtype) == (4, 6)
                self.server.objects[key] = self.rfile.read(length)
                continue
            if self.server.breaks:
                return
            found = self.server.objects.get(key)
            code = 200 if command == 5 or found is not None else 400
            data = found or b"" if command == 2 else b""
            self.wfile.write(struct.pack("9i", code, len(data), 4, 6, len(data), 0, 0, 0, 0) + data)


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short texts, too."""
    monkeypatch.setattr("sgla.worker.store.ASKED", 32)


def url_of(server: Kept) -> str:
    return f"lm://127.0.0.1:{server.server_address[1]}"


def test_servers_share_what_it_has(kept: Kept) -> None:
    tokens, cached, failed = told(start(url_of(kept)))
    assert (cached, failed) == (0, 0)
    assert len(kept.objects) == 6
    assert told(start(url_of(kept))) == (tokens, 96, 0)


@pytest.mark.parametrize("change", ["short", "long", "other"])
def test_damaged_objects_cost_time_alone(kept: Kept, change: str) -> None:
    tokens, _, _ = told(start(url_of(kept)))
    name = min(kept.objects)
    data = kept.objects[name]
    kept.objects[name] = {"short": data[:-1], "long": data + b"x", "other": data[::-1]}[change]
    found, _, failed = told(start(url_of(kept)))
    assert (found, failed) == (tokens, 1)
    assert told(start(url_of(kept))) == (tokens, 96, 0), "it has been written again"


def test_a_server_that_is_gone_costs_time_alone(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    tokens, _, _ = told(start(url_of(kept)))
    runner = start(url_of(kept))
    kept.breaks = True
    found, cached, failed = told(runner)
    assert (found, cached) == (tokens, 0)
    assert failed > 0
    assert "LMCache's server has closed the connection" in caplog.text
    kept.breaks = False
    assert told(start(url_of(kept))) == (tokens, 96, 0)


@pytest.mark.slow
def test_the_package_itself() -> None:
    pytest.importorskip("lmcache.v1.server.__main__", exc_type=ImportError)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)])
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        tokens, cached, failed = told(start(f"lm://127.0.0.1:{port}"))
        assert (cached, failed) == (0, 0)
        assert told(start(f"lm://127.0.0.1:{port}")) == (tokens, 96, 0)
    finally:
        process.kill()
        process.wait()

"""Who may talk to a server that hands out KV, and what becomes of strangers."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from sgla import peers
from sgla.peers import PROTOCOL, STRANGERS, Channel, Hello, Listener, connect
from sgla.version import __version__

HOST, SECRET = "127.0.0.1", "s3cret"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(peers, "PATIENCE", 0.5)
    joined: list[Channel] = []
    made = Listener(HOST, 0, SECRET, {"model": "m"}, joined.append)
    yield made
    made.close()
    for channel in joined:
        channel.close()


def join(listener: Listener) -> None:
    """Raises PeerRefused or OSError if it is not let in."""
    channel, _ = connect(HOST, listener.port, SECRET, {"model": "m"})
    channel.close()


def test_a_crowd_that_says_nothing_keeps_nobody_out(listener: Listener) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2 * STRANGERS):
            held.enter_context(socket.create_connection((HOST, listener.port)))
        join(listener)


def test_who_says_little_by_little_has_to_end(listener: Listener) -> None:
    with socket.create_connection((HOST, listener.port)) as sock:
        sock.sendall(struct.pack("<IQ", 1000, 0) + bytes(32))
        sock.settimeout(0.03)
        for _ in range(100):
            sock.send(b"\0")
            with contextlib.suppress(TimeoutError):
                assert sock.recv(1) == b""
                return
    pytest.fail("it is still listened to")


def test_a_greeting_must_draw_its_part_of_the_key(listener: Listener) -> None:
    """With nothing drawn both directions would have one key."""
    channel = Channel(socket.create_connection((HOST, listener.port)))
    channel.send(Hello(PROTOCOL, __version__, b""))
    with pytest.raises(ConnectionError):
        channel.receive()
    channel.close()


def test_a_lack_of_descriptors_passes(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    real = listener._socket

    class Full:
        refused = False

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def accept(self) -> Any:
            if not self.refused:
                self.refused = True
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

    full = Full()
    monkeypatch.setattr(listener, "_socket", full)
    for _ in range(3):  # the first is accepted before
        join(listener)
    assert full.refused

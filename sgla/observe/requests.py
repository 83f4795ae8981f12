"""Request bodies, kept in a file so that they can be sent again.
Off unless ``--dump-requests`` names the file."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from pathlib import Path

import msgspec

from sgla import clock
from sgla.errors import ConfigError

log = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode

BACKLOG_BYTES = 64 << 20  # that may wait for the disk; what comes then is dropped
SLICE = 1 << 20  # bytes that are made ready at once: copying holds Python's lock
ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # outside of strings, where JSON has no bare ones


class Dumped(msgspec.Struct, kw_only=True):
    """One line of the file. ``at``: seconds since the server's start; ``body``: as the client sent it.
    No keys, no headers."""

    at: float
    rid: str
    method: str
    path: str
    body: msgspec.Raw


class RequestDump:
    """Appends to ``path``, which only its owner may read. Raises ConfigError if it cannot be opened.

    A thread writes, so that a slow disk does not hold up the loop; nobody waits for it at the end but
    ``flush``. Requests that cannot be written are counted in ``dropped``.
    """

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--dump-requests {path}: {error.strerror}", param="dump_requests") from error
        self.dropped = 0
        self._path = path
        self._started = clock.now()
        self._taken = self._done = 0  # bytes that add took, and that the thread is done with
        self._lines: queue.SimpleQueue[tuple[Dumped, bytes] | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="dump", daemon=True).start()

    def add(self, rid: str, method: str, path: str, body: bytes) -> None:
        """``body`` is valid JSON."""
        if self._taken - self._done + len(body) > BACKLOG_BYTES:
            self._drop(f"more than {BACKLOG_BYTES >> 20} MiB wait for the disk")
            return
        self._taken += len(body)
        at = round(clock.now() - self._started, 6)
        self._lines.put((Dumped(at=at, rid=rid, method=method, path=path, body=msgspec.Raw(b"null")), body))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until what was added before is written or dropped, but not longer than ``timeout`` seconds."""
        done = threading.Event()
        self._lines.put(done)
        done.wait(timeout)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._write(*line)
            except OSError as error:
                self._drop(os.strerror(error.errno or 0))
            self._done += len(line[1])

    def _write(self, line: Dumped, body: bytes) -> None:
        """One line, or nothing of it. Raises OSError."""
        end = os.fstat(self._fd).st_size
        head, tail = encode(line).rsplit(b"null", 1)
        try:
            self._put(head)
            for start in range(0, len(body), SLICE):
                self._put(body[start : start + SLICE].translate(ONE_LINE))
            self._put(tail + b"\n")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
            raise

    def _put(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def _drop(self, why: str) -> None:
        if not self.dropped:
            log.warning("requests are missing in %s: %s; a metric counts them", self._path, why)
        self.dropped += 1


def read_dump(path: str) -> list[Dumped]:
    """The requests of a file in order. Raises ConfigError."""
    try:
        lines = Path(path).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Dumped) for line in lines if line]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no file of --dump-requests: {error}") from error

"""Request bodies, kept in a file so that they can be sent again. Off unless ``--dump-requests`` names the file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sgla import clock
from sgla.errors import ConfigError

encode = msgspec.json.Encoder().encode


class Dumped(msgspec.Struct, kw_only=True):
    """One line of the file. ``at``: seconds since the server's start; ``body``: as the client sent it. No keys, no headers."""

    at: float
    rid: str
    method: str
    path: str
    body: msgspec.Raw


class RequestDump:
    """Appends to ``path``, which only its owner may read. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--dump-requests {path}: {error.strerror}", param="dump_requests") from error
        self._started = clock.now()

    def add(self, rid: str, method: str, path: str, body: bytes) -> None:
        """``body`` is valid JSON."""
        at = round(clock.now() - self._started, 6)
        compact = msgspec.json.format(body, indent=-1)  # a line has no line breaks
        line = Dumped(at=at, rid=rid, method=method, path=path, body=msgspec.Raw(compact))
        os.write(self._fd, encode(line) + b"\n")


def read_dump(path: str) -> list[Dumped]:
    """The requests of a file in order. Raises ConfigError."""
    try:
        lines = Path(path).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Dumped) for line in lines if line]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no file of --dump-requests: {error}") from error

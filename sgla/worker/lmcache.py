"""LMCache's server as a place for units: memory of a process (https://github.com/LMCache/LMCache).

Its protocol, which needs no package: a header of nine int32 and a key of 150 characters, with the object
behind it if that is written, which is not answered; else it answers with nine int32, and with the object.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from sgla.errors import ConfigError

SCHEMES = "lm", "lmcache"
PORT = 65432
PATIENCE = 10.0  # seconds for each part of an answer
LONGEST = 150  # characters of a key
PUT, GET, EXIST, HEALTH = 1, 2, 3, 5
SUCCESS = 200
BINARY, BYTES = 4, 6  # how LMCache calls what has no shape, and its type
_ASKED, _ANSWER = struct.Struct(f"9i{LONGEST}s"), struct.Struct("9i")


class Address(NamedTuple):
    host: str
    port: int


class LMCacheServer:
    """The four methods that ``store.Objects`` wants of a file system. Each thread has a connection. They
    raise OSError."""

    def __init__(self, address: Address) -> None:
        self._address, self._own = address, threading.local()

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        with self._asking() as sock:
            sock.sendall(_asked(GET, path))
            code, length, *_ = _ANSWER.unpack(_read(sock, _ANSWER.size))
            if code != SUCCESS:
                raise FileNotFoundError(f"LMCache has no {path}")
            if length > end:
                self.leave()  # what comes is of no use
                raise OSError(f"an object of {length} bytes is not what was written")
            return _read(sock, length)[start:]

    def pipe_file(self, path: str, data: bytes) -> None:
        with self._asking() as sock:
            sock.sendall(_asked(PUT, path, len(data)) + data + _asked(EXIST, path))
            if _ANSWER.unpack(_read(sock, _ANSWER.size))[0] != SUCCESS:
                raise OSError("LMCache has not kept an object")

    def exists(self, path: str) -> bool:
        return self._succeeds(EXIST, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no folders."""

    def check(self) -> None:
        """Whether it answers."""
        if not self._succeeds(HEALTH, "health/0"):
            raise OSError("it is not well")

    def _succeeds(self, command: int, path: str) -> bool:
        with self._asking() as sock:
            sock.sendall(_asked(command, path))
            code: int = _ANSWER.unpack(_read(sock, _ANSWER.size))[0]
            return code == SUCCESS

    def _asking(self) -> _Asking:
        return _Asking(self)

    def connected(self) -> socket.socket:
        own = self._own
        if getattr(own, "socket", None) is None:
            own.socket = socket.create_connection(self._address, PATIENCE)
        found: socket.socket = own.socket
        return found

    def leave(self) -> None:
        """This thread connects anew."""
        own = self._own
        if getattr(own, "socket", None) is not None:
            with suppress(OSError):
                own.socket.close()
            own.socket = None


class _Asking:
    """A connection, which is left where something fails on it."""

    def __init__(self, server: LMCacheServer) -> None:
        self._server = server

    def __enter__(self) -> socket.socket:
        return self._server.connected()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None and kind is not FileNotFoundError:
            self._server.leave()


def _asked(command: int, path: str, length: int = 0) -> bytes:
    """The last part of ``path`` is a number in hexadecimal digits."""
    *folders, name = path.split("/")
    key = f"{'.'.join(folders)}@1@0@{name}@uint8".encode()
    if len(key) > LONGEST:
        raise OSError(f"a key of {len(key)} characters is longer than LMCache's {LONGEST}")
    return _ASKED.pack(command, length, BINARY, BYTES, 0, length, 0, 0, 0, key.ljust(LONGEST))


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionResetError("LMCache's server has closed the connection")
        at += got
    return bytes(data)


def open_lmcache(url: str) -> LMCacheServer:
    """``lm://HOST[:PORT]``. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        server = LMCacheServer(Address(parts.hostname or "", parts.port or PORT))
        if parts.path.strip("/") or parts.query:
            raise ValueError("it is lm://HOST:PORT")
        server.check()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--kv-store {url}: {error}; lmcache_server HOST PORT starts one (pip install 'sgla[lmcache]')",
            param="kv_store",
        ) from error
    return server

"""NIXL (https://github.com/ai-dynamo/nixl) as a transfer engine, by whatever UCX finds between two hosts, and
as what reads and writes the files of a store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.errors import ConfigError
from sgla.worker.transfer import TransferEngine, refused

PATIENCE = 10.0  # seconds for a read, or a write
LOOK = 5e-5  # seconds between looks whether it has ended
SCHEME, FILES = "nixl", "POSIX"  # of stores, and the plugin that has their files if nobody names another


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def begin_agent(backends: list[str], refuse: Callable[[str], ConfigError]) -> Any:
    """Raises ConfigError."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what fails is raised, too
    try:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise refuse(f"{error}; pip install 'sgla[nixl]'") from error
    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        return nixl_agent(os.urandom(8).hex(), nixl_agent_config(backends=backends, sync_mode=strict))
    except Exception as error:  # of its own kinds, as everywhere below
        raise refuse(f"it does not start here: {_told(error)}") from error


def _cross(agent: Any, verb: str, mine: Any, theirs: Any, name: str) -> None:
    """Raises OSError; TimeoutError if it may go on."""
    try:
        handle = agent.initialize_xfer(verb, mine, theirs, name)
        state = agent.transfer(handle)
        due = clock.now() + PATIENCE
        while state == "PROC" and clock.now() < due:
            time.sleep(LOOK)
            state = agent.check_xfer_state(handle)
    except Exception as error:
        raise OSError(f"NIXL: {_told(error)}") from error
    if state == "PROC":
        raise TimeoutError(f"NIXL has not come to the end of a {verb.lower()} within {PATIENCE:.0f} s")
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise OSError(f"NIXL: a {verb.lower()} ends with {state}")


class Nixl(TransferEngine):
    """An agent."""

    def __init__(self) -> None:
        """Raises ConfigError."""
        super().__init__()
        self._agent = begin_agent(["UCX"], lambda why: refused("nixl", why))
        self._known: dict[int, str] = {}  # agents, by where they were met
        self._registered: list[Any] = []

    def register(self, memory: NDArray[np.uint8]) -> int:
        address = int(memory.ctypes.data)
        try:
            made = self._agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM")
        except Exception as error:
            why = f"{memory.nbytes} bytes of memory cannot be registered: {_told(error)}"
            raise refused("nixl", f"{why}; raise ulimit -l, or lower --kv-transfer-bytes") from error
        self._registered.append(made)
        return address

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, source: int, metadata: bytes) -> str:
        if (before := self._known.pop(source, None)) is not None:
            with suppress(Exception):  # it may be gone already
                self._agent.remove_remote_agent(before)
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise OSError(f"NIXL: {_told(error)}") from error
        found = self._known[source] = name.decode() if isinstance(name, bytes) else name
        return found

    def fetch(self, engine: str, address: int, room: NDArray[np.uint8]) -> None:
        try:
            mine, theirs = (
                self._agent.get_xfer_descs([(at, room.nbytes, 0)], "DRAM")
                for at in (int(room.ctypes.data), address)
            )
        except Exception as error:
            raise OSError(f"NIXL: {_told(error)}") from error
        _cross(self._agent, "READ", mine, theirs, engine)

    def close(self) -> None:
        for made in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(made)
        self._registered.clear()


class NixlFiles:
    """The four methods that ``store.Objects`` wants of a file system. A plugin of NIXL reads and writes the
    files. Each thread has a place in memory. They raise OSError."""

    def __init__(self, agent: Any) -> None:
        self._agent, self._own = agent, threading.local()
        self._lost: list[NDArray[np.uint8]] = []  # that may be written to at any time

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            count = min(os.fstat(file).st_size, end)
            if not count:
                return b""
            room = self._room(count)
            self._move("READ", room, file)
            return room[start:].tobytes()
        finally:
            os.close(file)

    def pipe_file(self, path: str, data: bytes) -> None:
        """It has its name once it is whole."""
        made = f"{path}.{os.urandom(4).hex()}"
        file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            room = self._room(len(data))
            room[:] = np.frombuffer(data, np.uint8)
            self._move("WRITE", room, file)
            os.replace(made, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise
        finally:
            os.close(file)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def _room(self, count: int) -> NDArray[np.uint8]:
        room: NDArray[np.uint8] | None = getattr(self._own, "room", None)
        if room is None or len(room) < count:
            room = self._own.room = np.empty(count, np.uint8)
            try:
                self._agent.register_memory([(int(room.ctypes.data), count, 0, "")], "DRAM")
            except Exception as error:
                self._own.room = None
                raise OSError(f"NIXL: {_told(error)}") from error
        return room[:count]

    def _move(self, verb: str, room: NDArray[np.uint8], file: int) -> None:
        agent, known = self._agent, None
        try:
            known = agent.register_memory([(0, room.nbytes, file, "")], "FILE")
            mine = agent.get_xfer_descs([(int(room.ctypes.data), room.nbytes, 0)], "DRAM")
            theirs = agent.get_xfer_descs([(0, room.nbytes, file)], "FILE")
            _cross(agent, verb, mine, theirs, agent.name)
        except TimeoutError:
            self._own.room = None  # it may still be written to, so it stays where it is
            self._lost.append(room)
            raise
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"NIXL: {_told(error)}") from error
        finally:
            if known is not None:
                with suppress(Exception):
                    agent.deregister_memory(known)


def open_nixl(url: str) -> tuple[NixlFiles, str]:
    """``nixl:///FOLDER``, with ``?backend=GDS`` for another of NIXL's plugins that have files, and what else
    that takes. Also the folder. Raises ConfigError."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"--kv-store {url}: {why}", param="kv_store")

    parts, given = urlsplit(url), dict(parse_qsl(urlsplit(url).query))
    if parts.netloc or len(parts.path) < 2:
        raise refuse(
            "NIXL reads and writes files: it is nixl:///FOLDER; object stores are s3:// and the like"
        )
    agent, backend = begin_agent([], refuse), given.pop("backend", FILES)
    try:
        os.makedirs(parts.path, exist_ok=True)
        agent.create_backend(backend, given)
    except OSError as error:
        raise refuse(f"{error.strerror}") from error
    except Exception as error:
        known = ", ".join(agent.get_plugin_list())
        raise refuse(
            f"its plugin {backend} does not start here: {_told(error)} (there are {known})"
        ) from error
    return NixlFiles(agent), parts.path

"""NIXL as a transfer engine, by whatever UCX finds between two hosts (https://github.com/ai-dynamo/nixl)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.worker.transfer import TransferEngine, refused

PATIENCE = 10.0  # seconds for a read
LOOK = 5e-5  # seconds between looks whether it has ended


class Nixl(TransferEngine):
    """An agent."""

    def __init__(self) -> None:
        """Raises ConfigError."""
        super().__init__()
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what fails is raised, too
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise refused("nixl", f"{error}; pip install 'sgla[nixl]'") from error
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = nixl_agent(
                os.urandom(8).hex(), nixl_agent_config(backends=["UCX"], sync_mode=strict)
            )
        except Exception as error:  # of its own kinds, as everywhere below
            raise refused("nixl", f"it does not start here: {_told(error)}") from error
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
            handle = self._agent.initialize_xfer("READ", mine, theirs, engine)
            state = self._agent.transfer(handle)
            due = clock.now() + PATIENCE
            while state == "PROC" and clock.now() < due:
                time.sleep(LOOK)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise OSError(f"NIXL: {_told(error)}") from error
        if state == "PROC":
            raise TimeoutError(f"NIXL has not read {room.nbytes} bytes within {PATIENCE:.0f} s")
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL: a read ends with {state}")

    def close(self) -> None:
        for made in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(made)
        self._registered.clear()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

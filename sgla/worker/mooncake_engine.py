"""Mooncake's transfer engine (https://github.com/kvcache-ai/Mooncake)."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from sgla.nodes import at
from sgla.worker.transfer import TransferEngine, refused

ANY = "", "0.0.0.0", "::"  # hosts that mean all addresses


class MooncakeEngine(TransferEngine):
    """``MOONCAKE_PROTOCOL`` (tcp, rdma) and ``MOONCAKE_DEVICE`` in the environment say by what it reads, as
    everywhere with Mooncake. ``host``: the address of this server, if others read of it."""

    def __init__(self, host: str | None) -> None:
        """Raises ConfigError."""
        super().__init__()
        os.environ.setdefault("GLOG_minloglevel", "2")  # else it tells of each step
        try:
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise refused(
                "mooncake",
                f"{error}; pip install 'sgla[mooncake]', which wants libibverbs1, librdmacm1 and libnuma1 of "
                "the system",
            ) from error
        if host in ANY:
            raise refused("mooncake", f"--host {host} must be the address by which others reach this server")
        self._engine, self._host = Engine(), host or "127.0.0.1"
        protocol, device = (os.environ.get(f"MOONCAKE_{name}") for name in ("PROTOCOL", "DEVICE"))
        code = self._engine.initialize(self._host, "P2PHANDSHAKE", protocol or "tcp", device or "")
        if code:
            raise refused("mooncake", f"it gives error {code} at its start")
        self._registered: list[int] = []

    def register(self, memory: NDArray[np.uint8]) -> int:
        address = int(memory.ctypes.data)
        if code := self._engine.register_memory(address, memory.nbytes):
            raise refused("mooncake", f"{memory.nbytes} bytes of memory cannot be registered: error {code}")
        self._registered.append(address)
        return address

    def metadata(self) -> bytes:
        return at(self._host, self._engine.get_rpc_port()).encode()

    def meet(self, source: int, metadata: bytes) -> str:
        try:
            return metadata.decode()
        except UnicodeDecodeError as error:
            raise OSError("Mooncake: an address that is none") from error

    def fetch(self, engine: str, address: int, room: NDArray[np.uint8]) -> None:
        if code := self._engine.transfer_sync_read(engine, int(room.ctypes.data), address, room.nbytes):
            raise OSError(f"Mooncake: a read ends with error {code}")

    def close(self) -> None:
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered.clear()

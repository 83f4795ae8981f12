"""Transfer engines between servers that hand KV over: by one of them a decode server reads units out of the
memory of a prefill server on another host.

A unit is read first and its mark behind it, in a read of its own that begins when the other has ended. So a
unit that was written meanwhile has another mark, as in memory that both share (``lent``). Engines ask nobody
who he is, so units have checksums, which come with the messages.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError
from sgla.worker.lent import HEAD, begin_of

MARK = 8  # bytes


def refused(name: str, why: object) -> ConfigError:
    return ConfigError(f"--kv-transfer-backend {name}: {why}", param="kv_transfer_backend")


class TransferEngine(ABC):
    """Of a rank. Several threads may read by it."""

    def __init__(self) -> None:
        self._rooms: list[NDArray[np.uint8]] = []  # that are free; what is read comes there first
        self._lost: list[NDArray[np.uint8]] = []  # that may be written to at any time
        self._lock = threading.Lock()

    @abstractmethod
    def register(self, memory: NDArray[np.uint8]) -> int:
        """Let it be read, and read into. Its address. Raises ConfigError."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What those have to know who read what has been registered until now."""

    @abstractmethod
    def meet(self, source: int, metadata: bytes) -> str:
        """The name of the engine that is at that ``source`` now, in place of one before. Raises OSError."""

    @abstractmethod
    def fetch(self, engine: str, address: int, room: NDArray[np.uint8]) -> None:
        """Fill the ``room``, of memory that is registered. Raises OSError; TimeoutError if it may still be
        written to."""

    @abstractmethod
    def close(self) -> None: ...

    def read(self, engine: str, address: int, count: int) -> NDArray[np.uint8]:
        """uint8[count] from there. Raises OSError."""
        room = self._room(count)
        try:
            self.fetch(engine, address, room[:count])
        except TimeoutError:
            self._lost.append(room)
            raise
        except OSError:
            self._rooms.append(room)
            raise
        found = room[:count].copy()
        self._rooms.append(room)
        return found

    def _room(self, count: int) -> NDArray[np.uint8]:
        with self._lock:
            for i, room in enumerate(self._rooms):
                if room.nbytes >= count:
                    return self._rooms.pop(i)
        made = np.empty(count, np.uint8)
        try:
            self.register(made)
        except ConfigError as error:
            raise OSError(str(error)) from error
        return made


class FarSegment:
    """A ``lent.Segment`` in the memory of another host, at ``address`` there."""

    def __init__(self, ours: TransferEngine, theirs: str, address: int, units: int, nbytes: int) -> None:
        self._ours, self._theirs, self._address, self._nbytes = ours, theirs, address, nbytes
        self.count = units + 1

    def read(self, place: int) -> tuple[NDArray[np.uint8], int]:
        unit = self._address + begin_of(self.count - 1) + place * self._nbytes
        found = self._ours.read(self._theirs, unit, self._nbytes)
        mark = self._ours.read(self._theirs, self._address + HEAD + place * MARK, MARK)
        return found, int(mark.view(np.int64)[0])

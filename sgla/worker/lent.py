"""Units in memory that processes of one host share: a prefill server lends them, a decode server copies them
out, and nothing is sent. They lie in the host's memory here, in a GPU's in ``gpu_lent``.

Each unit has a mark, which is another one whenever the unit is about to be written and when it has been. Who
has copied a unit looks whether its mark is still the one that it was told. That needs a processor that keeps
the order in which memory is written and read, as x86 does; others send.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgla.peers import Lent
from sgla.worker.tiers import Source, Units

TOKEN = 32  # bytes that tell a segment from all others
HEAD = 64  # bytes: the token, and room that keeps marks where they can be read at once


class Segment:
    """Of one cache group: a token, a mark of each unit, and the units, whose numbers begin with 1. Without
    ``fd`` it is this process's own. ``whole`` uint8[*] is all of it, of which units begin at ``begin``."""

    handle = b""  # of units that lie elsewhere: what others find them by

    def __init__(self, memory: mmap.mmap, units: int, nbytes: int, fd: int | None = None) -> None:
        count, self.fd, self.begin = units + 1, fd, begin_of(units)
        self.whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.head = self.whole[:TOKEN]
        self.marks: NDArray[np.int64] = np.frombuffer(memory, np.int64, count, HEAD)
        self.units = self.whole[self.begin :].reshape(count, nbytes)
        self.count = count

    def content(self, place: int) -> NDArray[np.uint8]:
        """A unit as it is, or was a moment ago."""
        found: NDArray[np.uint8] = self.units[place]
        return found

    def read(self, place: int) -> tuple[NDArray[np.uint8], int]:
        """A copy of the unit, and the mark that it had behind that."""
        copied = self.content(place).copy()
        return copied, int(self.marks[place])

    def close(self) -> None:
        """The memory itself goes with the last view of it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class SegmentUnits(Units):
    """A segment as ``tiers.Units``. Whoever moves units looks after their marks."""

    def __init__(self, segment: Segment) -> None:
        self._units = segment.units

    def read(self, unit: int, key: bytes) -> memoryview:
        return self._units[unit].data

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None:
        self._units[unit] = np.frombuffer(data, np.uint8)

    def erase(self, unit: int) -> None: ...

    def find(self, keys: list[bytes]) -> bytes:
        raise AssertionError("units of a segment are known by their numbers")

    def close(self) -> None: ...


Mover = Callable[[Sequence[Segment]], Source]
"""What copies between the device and segments of all cache groups. Raises RuntimeError if it cannot."""


def begin_of(units: int) -> int:
    """Where units begin in their segment: on a page."""
    return -(-(HEAD + 8 * (units + 1)) // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(units: int, nbytes: int) -> int:
    return begin_of(units) + (units + 1) * nbytes


def _seals() -> int:
    """Memory that is read stays there. Linux alone knows them."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Lending(Protocol):
    """Where units for other servers lie."""

    def lend(self, units: int, nbytes: int, token: bytes) -> Segment:
        """Memory of ``units`` units, which others can borrow where the system can do that."""
        ...

    def borrow(self, lent: Lent, group: int, nbytes: int) -> Segment | None:
        """What a process lends; None: it is on another host, or may not be read, or is another. Raises
        RuntimeError."""
        ...


class HostLending:
    """In the host's memory."""

    def lend(self, units: int, nbytes: int, token: bytes) -> Segment:
        """Zeros at first."""
        memory, fd = shared(units, nbytes, token)
        return Segment(memory, units, nbytes, fd)

    def borrow(self, lent: Lent, group: int, nbytes: int) -> Segment | None:
        units = lent.units[group]
        memory = sharing(lent.pid, lent.fds[group], lent.token, units, nbytes)
        return None if memory is None else Segment(memory, units, nbytes)


def shared(units: int, nbytes: int, token: bytes) -> tuple[mmap.mmap, int | None]:
    """Memory of a segment, and its descriptor if others can have it."""
    size = _size(units, nbytes)
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return mmap.mmap(-1, size), None
    fd = os.memfd_create("sgla-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
    memory = mmap.mmap(fd, size)
    memory[:TOKEN] = token
    return memory, fd


def sharing(pid: int, fd: int, token: bytes, units: int, nbytes: int) -> mmap.mmap | None:
    """The memory of a segment of the process ``pid``."""
    with suppress(OSError, ValueError):
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not sealed or os.fstat(own).st_size != _size(units, nbytes):
                return None
            memory = mmap.mmap(own, _size(units, nbytes))
        finally:
            os.close(own)
        if memory[:TOKEN] == token:
            return memory
    return None

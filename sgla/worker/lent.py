"""Units in memory that processes of one host share: a prefill server lends them, a decode server copies them
out, and nothing is sent.

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

import numpy as np
from numpy.typing import NDArray

from sgla.worker.tiers import Source

TOKEN = 32  # bytes that tell a segment from all others
HEAD = 64  # bytes: the token, and room that keeps marks where they can be read at once


class Segment:
    """Of one cache group: a token, a mark of each unit, and the units, whose numbers begin with 1. Without
    ``fd`` it is this process's own. ``whole`` uint8[*] is all of it, of which units begin at ``begin``."""

    def __init__(self, memory: mmap.mmap, units: int, nbytes: int, fd: int | None = None) -> None:
        count, self.fd, self.begin = units + 1, fd, begin_of(units)
        self.whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.head = self.whole[:TOKEN]
        self.marks: NDArray[np.int64] = np.frombuffer(memory, np.int64, count, HEAD)
        self.units = self.whole[self.begin :].reshape(count, nbytes)
        self.count = count

    def read(self, place: int) -> tuple[NDArray[np.uint8], int]:
        """A copy of the unit, and the mark that it had behind that."""
        copied = self.units[place].copy()
        return copied, int(self.marks[place])

    def close(self) -> None:
        """The memory itself goes with the last view of it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class SegmentUnits:
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


def lend(units: int, nbytes: int, token: bytes) -> Segment:
    """Memory of ``units`` units, zeros at first, which others can borrow where the system can do that."""
    size = _size(units, nbytes)
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return Segment(mmap.mmap(-1, size), units, nbytes)
    fd = os.memfd_create("sgla-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
    segment = Segment(mmap.mmap(fd, size), units, nbytes, fd)
    segment.head[:] = np.frombuffer(token, np.uint8)
    return segment


def borrow(pid: int, fd: int, token: bytes, units: int, nbytes: int) -> Segment | None:
    """What the process ``pid`` lends; None: it is on another host, or may not be read, or is another."""
    with suppress(OSError, ValueError):
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not sealed or os.fstat(own).st_size != _size(units, nbytes):
                return None
            segment = Segment(mmap.mmap(own, _size(units, nbytes)), units, nbytes)
        finally:
            os.close(own)
        if segment.head.tobytes() == token:
            return segment
    return None

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
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

TOKEN = 32  # bytes that tell a segment from all others
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # memory that is read stays there
HEAD = 64  # bytes: the token, and room that keeps marks where they can be read at once


class Segment:
    """Of one cache group: a token, a mark of each unit, and the units. Without a descriptor it is this
    process's own."""

    def __init__(self, memory: mmap.mmap, units: int, nbytes: int, fd: int | None = None) -> None:
        begin = HEAD + 8 * units
        self._fd = fd
        self.head: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, TOKEN)
        self.marks: NDArray[np.int64] = np.frombuffer(memory, np.int64, units, HEAD)
        self.units = np.frombuffer(memory, np.uint8, units * nbytes, begin).reshape(units, nbytes)

    @property
    def fd(self) -> int | None:
        return self._fd

    def write(self, place: int, data: NDArray[np.uint8]) -> None:
        """Places begin with 0."""
        self.marks[place] += 1
        self.units[place] = data
        self.marks[place] += 1

    def read(self, place: int, mark: int, into: NDArray[np.uint8]) -> bool:
        """Whether ``into`` is what was there under the mark."""
        if self.marks[place] != mark:
            return False
        np.copyto(into, self.units[place])
        return bool(self.marks[place] == mark)

    def close(self) -> None:
        """The memory itself goes with the last view of it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _size(units: int, nbytes: int) -> int:
    return HEAD + units * (8 + nbytes)


def lend(units: int, nbytes: int, token: bytes) -> Segment:
    """Memory of ``units`` units, zeros at first, which others can borrow where the system can do that."""
    size = _size(units, nbytes)
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"):
        return Segment(mmap.mmap(-1, size), units, nbytes)
    fd = os.memfd_create("sgla-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    segment = Segment(mmap.mmap(fd, size), units, nbytes, fd)
    segment.head[:] = np.frombuffer(token, np.uint8)
    return segment


def borrow(pid: int, fd: int, token: bytes, units: int, nbytes: int) -> Segment | None:
    """What the process ``pid`` lends; None: it is on another host, or may not be read, or is another."""
    with suppress(OSError, ValueError):
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            sealed = fcntl.fcntl(own, fcntl.F_GET_SEALS) & SEALS == SEALS
            if not sealed or os.fstat(own).st_size != _size(units, nbytes):
                return None
            segment = Segment(mmap.mmap(own, _size(units, nbytes), prot=mmap.PROT_READ), units, nbytes)
        finally:
            os.close(own)
        if segment.head.tobytes() == token:
            return segment
    return None

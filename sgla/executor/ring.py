"""A single-producer, single-consumer ring of byte records in shared memory, woken by an eventfd.

The memory is a memfd made by the worker and handed over as a file descriptor, so it has no name and nothing
is left behind by a SIGKILL. It needs no torch, takes nothing of ``/dev/shm``, and has the pages that were
written.

Layout: word 0 is ``head`` (bytes ever produced), word 1 is ``origin`` (what ``head`` was when a record began
at the start of the ring), word 8, in a cache line of its own, is ``tail`` (bytes ever consumed); records
start at byte 128: a uint32 length, the bytes, padding to 8. A record may wrap around the end. When the ring
is empty and far from its start, the producer goes back to the start: a ring that is sized for the largest
record then touches only as much memory as its records need. It does so by setting ``origin``, which the
consumer reads only while a record waits; so this takes no room of the ring.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading

DATA = 128  # bytes before the first record
REWIND = 1 << 18  # an empty ring whose next record would start above this offset is rewound
_LENGTH = struct.Struct("<I")


class RingFull(RuntimeError):
    """More was pushed than the ring holds. Steps in flight are bounded, so this is a bug of the producer."""


class Ring:
    """One end of the ring. ``push`` belongs to one process and thread, ``pop`` and ``clear`` to one other.

    ``memory``: writable buffer of ``DATA + capacity`` bytes, ``capacity`` a multiple of 8. ``event``: an
    eventfd, set by every ``push``; the consumer polls ``fileno()`` and calls ``clear`` *before* it pops.
    """

    def __init__(
        self, memory: memoryview, event: int, *, shared_fd: int = -1, owner: mmap.mmap | None = None
    ) -> None:
        self.capacity = len(memory) - DATA
        assert self.capacity % 8 == 0, "records are aligned to 8 bytes"
        self.shared_fd = shared_fd
        self._event = event
        self._owner = owner
        self._words = memory[:DATA].cast("Q")
        self._data = memory[DATA:]
        # Releasing and taking a lock orders the loads and stores around it
        # on machines with a weak memory model.
        self._fence = threading.Lock()
        self._fence.acquire()

    @classmethod
    def create(cls, capacity: int) -> Ring:
        """A new ring in shared memory; ``shared_fd`` and ``fileno()`` are what the other side attaches to.
        Raises OSError where there is no memory."""
        fd = os.memfd_create("sgla-ring")
        try:
            os.ftruncate(fd, DATA + capacity)
            mapping = mmap.mmap(fd, DATA + capacity)
            event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            os.close(fd)
            raise
        return cls(memoryview(mapping), event, shared_fd=fd, owner=mapping)

    @classmethod
    def attach(cls, shared_fd: int, event: int) -> Ring:
        """The other end of ``create``; takes over both descriptors, and closes that of the memory: the
        mapping has its own."""
        try:
            mapping = mmap.mmap(shared_fd, os.fstat(shared_fd).st_size)
        finally:
            os.close(shared_fd)
        return cls(memoryview(mapping), event, owner=mapping)

    def fileno(self) -> int:
        return self._event

    @property
    def empty(self) -> bool:
        return self._words[0] == self._words[8]

    def push(self, record: bytes) -> None:
        """Append ``record`` and wake the consumer. Never blocks; raises RingFull."""
        head, tail = self._words[0], self._words[8]
        size = (4 + len(record) + 7) & ~7
        if size > self.capacity - (head - tail):
            raise RingFull(
                f"a record of {len(record)} bytes does not fit: {head - tail} of {self.capacity} bytes in use"
            )
        offset = (head - self._words[1]) % self.capacity
        if head == tail and offset > REWIND:
            self._words[1] = head
            offset = 0
        _LENGTH.pack_into(self._data, offset, len(record))
        first = min(len(record), self.capacity - offset - 4)
        self._data[offset + 4 : offset + 4 + first] = record[:first]
        self._data[: len(record) - first] = record[first:]
        self._order()
        self._words[0] = head + size
        os.eventfd_write(self._event, 1)

    def pop(self) -> bytes | None:
        """The oldest record, or None."""
        head, tail = self._words[0], self._words[8]
        if head == tail:
            return None
        self._order()
        offset = (tail - self._words[1]) % self.capacity
        (length,) = _LENGTH.unpack_from(self._data, offset)
        first = min(length, self.capacity - offset - 4)
        record = bytes(self._data[offset + 4 : offset + 4 + first])
        if first < length:
            record += bytes(self._data[: length - first])
        self._order()
        self._words[8] = tail + ((4 + length + 7) & ~7)
        return record

    def clear(self) -> None:
        """Reset the eventfd. A record pushed later sets it again."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Give back the mapping and the descriptors; idempotent."""
        if self._event < 0:
            return
        self._words.release()
        self._data.release()
        if self._owner is not None:
            self._owner.close()
        self._owner = None
        os.close(self._event)
        if self.shared_fd >= 0:
            os.close(self.shared_fd)
        self._event = self.shared_fd = -1

    def _order(self) -> None:
        self._fence.release()
        self._fence.acquire()

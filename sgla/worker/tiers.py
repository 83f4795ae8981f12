"""Tiers that threads read and write: copies of what the prefix tree has, beside steps.

Nothing that goes wrong here is an error of a request. What cannot be written is not kept; what cannot be
read, or is not what was written, is computed.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Condition
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.messages import Copy, Moved, int32, keys_in
from sgla.worker.state import column

SUM = 16  # bytes of a checksum
COLUMNS = 512, 509  # of a stretch's words: whatever moves within it is in another column of one of them
STRETCH = 512 * 509  # words of a unit
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # what a disk without room answers
PATIENCE = 30.0  # seconds in which nothing of a copy may come
log = logging.getLogger(__name__)

Rows = NDArray[np.uint8]
"""Of units, and of their bytes."""
Ints = list[int]


def checksum(key: bytes, data: bytes | memoryview, place: bytes = b"") -> bytes:
    """``checksums`` of one."""
    return checksums([key], np.frombuffer(data, np.uint8)[None], place)[0]


def checksums(keys: Sequence[bytes], rows: Rows, place: bytes = b"") -> list[bytes]:
    """Of units, and of what each is. ``place``: at most 64 bytes that say where alone it may be found. Of a
    unit's words of 8 bytes they have the sums of columns, in two widths, for each stretch, a fifteenth of the
    work of a cryptographic hash: they are for what memory, disks and networks do to them. Who may write there
    could make any sum."""
    units, nbytes = rows.shape
    words = rows[:, : nbytes // 8 * 8].view(np.uint64)
    parts = [words[:, :0]]
    for begun in range(0, words.shape[1], STRETCH):
        stretch = words[:, begun : begun + STRETCH]
        for columns in COLUMNS:
            end = stretch.shape[1] // columns * columns
            parts += [np.add.reduce(stretch[:, :end].reshape(units, -1, columns), axis=1), stretch[:, end:]]
    sums, size = np.concatenate(parts, axis=1), nbytes.to_bytes(8, "little")
    tails = rows[:, nbytes // 8 * 8 :]
    found = (key + each.tobytes() + tail.tobytes() + size for key, each, tail in zip(keys, sums, tails))
    return [blake2b(each, digest_size=SUM, key=place).digest() for each in found]


def runs_of(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Places that follow each other: where they begin, their count, and the first of them."""
    begun = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield begun, i - begun, places[begun]
            begun = i


class Source(Protocol):
    """One of them, and what copies are made by. A tier is a target as well."""

    @property
    def under_way(self) -> bool:
        """Some copy has not been told of by ``ended``."""

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""

    def drop(self, transfer: int) -> None:
        """Nobody wants this copy any more, if it is one that is under way here: it may end, and have
        failed."""

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call."""

    def close(self) -> None: ...


class UnitMemory(Protocol):
    """Units of one cache group on the device, ``nbytes`` each, which threads read and write, ``batch`` at a
    time."""

    nbytes: int
    batch: int

    def mark(self) -> object:
        """Of the steps that have been launched, for ``wait``."""
        ...

    def wait(self, mark: object) -> None:
        """Until those are done."""
        ...

    def room(self, count: int) -> Rows:
        """This thread's, for what it is about to write."""
        ...

    def read(self, units: Sequence[int]) -> Rows:
        """What is there, in this thread's room."""
        ...

    def write(self, units: Sequence[int], rows: Rows) -> None: ...


class HostMemory:
    """Of a CPU, whose steps are done when they have been launched."""

    batch = 1

    def __init__(self, tensors: Sequence[NDArray[np.uint8]]) -> None:
        """[units, bytes] of each tensor"""
        self._tensors = tensors
        self.nbytes = sum(tensor.shape[1] for tensor in tensors)
        self._own = threading.local()

    def mark(self) -> None: ...

    def wait(self, mark: object) -> None: ...

    def room(self, count: int) -> Rows:
        """To find new memory takes longer than to read."""
        if not hasattr(self._own, "rows"):
            self._own.rows = np.empty((self.batch, self.nbytes), np.uint8)
        rows: Rows = self._own.rows[:count]
        return rows

    def read(self, units: Sequence[int]) -> Rows:
        rows = self.room(len(units))
        for tensor, part in self._pairs(rows):
            part[:] = tensor[units]
        return rows

    def write(self, units: Sequence[int], rows: Rows) -> None:
        for tensor, part in self._pairs(rows):
            tensor[units] = part

    def _pairs(self, rows: Rows) -> Iterator[tuple[NDArray[np.uint8], Rows]]:
        at = 0
        for tensor in self._tensors:
            yield tensor, rows[:, at : at + tensor.shape[1]]
            at += tensor.shape[1]


class Units(Protocol):
    """Where units of one cache group are kept. All raise OSError."""

    def read(self, unit: int, key: bytes) -> bytes | memoryview:
        """What was written, until this thread reads again, or OSError."""
        ...

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None: ...

    def read_all(self, units: Sequence[int], keys: Sequence[bytes], rows: Rows) -> None:
        """As ``read``, into ``rows``."""
        for unit, key, row in zip(units, keys, rows):
            row[:] = np.frombuffer(self.read(unit, key), np.uint8)

    def write_all(self, units: Sequence[int], keys: Sequence[bytes], rows: Rows) -> None:
        """As ``write``. Where it fails, some may have been written."""
        for unit, key, row in zip(units, keys, rows):
            self.write(unit, key, row.data)

    def erase(self, unit: int) -> None: ...

    def find(self, keys: list[bytes]) -> bytes:
        """Of each key, whether it is there."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class Job:
    """A copy. What is not ``wanted`` any more may neither read nor write the device's memory. ``moved``: when
    something of it was copied, or else when a thread has taken it; None: it waits for one."""

    copy: Copy
    mark: object
    begun: float
    moved: float | None = None
    wanted: bool = True
    full: list[tuple[Units, int]] = field(default_factory=list)  # places for which there is no room
    done: Future[list[bytes]] = field(default_factory=Future)
    _changed: Condition = field(default_factory=Condition)
    _users: int = 0  # threads that read or write the device's memory

    def give_up(self) -> None:
        with self._changed:
            self.wanted = False
            self._changed.wait_for(lambda: not self._users)

    @contextmanager
    def using(self) -> Iterator[bool]:
        """Whether the device's memory may be read or written meanwhile. ``give_up`` waits for the end."""
        with self._changed:
            wanted = self.wanted
            self._users += wanted
        try:
            yield wanted
        finally:
            with self._changed:
                self._users -= wanted
                self._changed.notify_all()


class FileTier:
    """``kept``: each cache group's units; ``memory``: those on the device. ``flag`` names it in warnings.
    There are threads for each direction, so that what is read does not wait for what is written. ``abreast``:
    threads that share out the units of a copy, where there are cores to spare."""

    def __init__(
        self,
        flag: str,
        kept: Sequence[Units],
        memory: Sequence[UnitMemory],
        threads: int = 1,
        abreast: int = 1,
    ) -> None:
        self._flag, self._kept, self._memory = flag, kept, memory
        self._reader = ThreadPoolExecutor(threads, "kv-read")
        self._writer = ThreadPoolExecutor(threads, "kv-write")
        self._abreast = ThreadPoolExecutor(abreast, "kv-unit") if abreast > 1 else None
        self._under_way: list[Job] = []
        self._failed: list[Moved] = []
        self._stuck: list[Job] = []  # that nobody waits for any more
        self._owed: list[Copy] = []  # what is to be forgotten as soon as that can be said
        self._warned: set[str] = set()

    @property
    def under_way(self) -> bool:
        return bool(self._under_way or self._failed)

    def begin(self, copy: Copy) -> None:
        self._stuck = [job for job in self._stuck if not job.done.done()]
        if self._stuck:
            self._owed += [copy] if copy.target and not copy.source else []
            self._failed.append(Moved(copy.transfer, ok=False))
            return
        owed, self._owed = self._owed, []
        for late in owed:
            self._writer.submit(self._save, Job(late, None, clock.now()))
        job = Job(copy, self._memory[0].mark(), clock.now())
        threads, work = self._reader, self._load
        if copy.target != "device":
            threads, work = (self._writer, self._save) if copy.target else (self._reader, self._look)
        job.done = threads.submit(work, job)
        self._under_way.append(job)

    def drop(self, transfer: int) -> None:
        for job in self._under_way:
            if job.copy.transfer == transfer:
                job.give_up()

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call, or that bring nothing any more."""
        now = clock.now()
        over = [job for job in self._under_way if job.done.done() or self._hangs(job, now)]
        if over:
            self._under_way = [job for job in self._under_way if job not in over]
        for job in over:
            if not job.done.done():
                job.give_up()
                self.warn("be had in time; what it holds is computed", TimeoutError("it does not answer"))
                self._stuck.append(job)
        failed, self._failed = self._failed, []
        return failed + [self._moved(job) for job in over]

    def _moved(self, job: Job) -> Moved:
        if not job.wanted or job.done.exception() is not None:
            full = [int32([place for at, place in job.full if at is kept]) for kept in self._kept]
            return Moved(job.copy.transfer, ok=False, full=full if job.full else [])
        return Moved(job.copy.transfer, ok=True, there=job.done.result())

    def _hangs(self, job: Job, now: float) -> bool:
        """A job that waits for a thread does as soon as no other has brought anything for so long."""
        moved = job.moved
        if moved is None:
            moved = max(job.begun, *(other.moved or 0.0 for other in self._under_way))
        return now - moved > PATIENCE

    def _load(self, job: Job) -> list[bytes]:
        def load(kept: Units, memory: UnitMemory, places: Ints, units: Ints, keys: list[bytes]) -> None:
            rows = memory.room(len(units))
            kept.read_all(places, keys, rows)
            with job.using() as wanted:
                if wanted:
                    memory.write(units, rows)

        try:
            self._each(load, job)
        except OSError as error:
            self.warn("be read; what it holds is computed", error)
            raise
        return []

    def _save(self, job: Job) -> list[bytes]:
        def save(kept: Units, memory: UnitMemory, units: Ints, places: Ints, keys: list[bytes]) -> None:
            with job.using() as wanted:
                rows = memory.read(units) if wanted else None
            if rows is not None:
                self._keep(job, kept, places, keys, rows)

        try:
            if job.copy.source:
                self._each(save, job)
                if job.full:
                    raise OSError(errno.ENOSPC, "no room is left, so less is kept from now on")
            else:
                self._erase(job)
        except OSError as error:
            self.warn("be written; what it lacks is computed again", error)
            raise
        return []

    def _keep(self, job: Job, kept: Units, places: Ints, keys: list[bytes], rows: Rows) -> None:
        """What finds no room is told of, one by one."""
        try:
            kept.write_all(places, keys, rows)
        except OSError as error:
            if error.errno not in FULL:
                raise
            if len(places) == 1:
                job.full.append((kept, places[0]))
                return
            for i in range(len(places)):
                self._keep(job, kept, places[i : i + 1], keys[i : i + 1], rows[i : i + 1])

    def _erase(self, job: Job) -> None:
        job.moved = clock.now()
        for kept, targets in zip(self._kept, job.copy.targets):
            for place in column(targets).tolist():
                kept.erase(place)
                job.moved = clock.now()

    def _look(self, job: Job) -> list[bytes]:
        """Of each cache group and key, whether it is there. Where the first group ends, nothing is of use."""
        job.moved = clock.now()
        try:
            first, *others = [keys_in(keys) for keys in job.copy.keys]
            found = self._kept[0].find(first)
            end = (found + b"\0").index(0)
            more = [
                kept.find(keys[:end]).ljust(len(keys), b"\0") for kept, keys in zip(self._kept[1:], others)
            ]
            return [found, *more]
        except OSError as error:
            self.warn("be read; what it holds is computed", error)
            raise

    def _each(self, work: Callable[..., None], job: Job) -> None:
        """Of so many units as memory takes at a time, behind the steps before; the last of them is done when
        this is, whatever is raised."""

        def one(*unit: Any) -> None:
            if job.wanted:
                work(*unit)
            job.moved = clock.now()

        job.moved = clock.now()
        self._memory[0].wait(job.mark)
        copy = job.copy
        sources, targets = ([column(c).tolist() for c in columns] for columns in (copy.sources, copy.targets))
        keys = [keys_in(names) for names in copy.keys]
        groups = zip(self._kept, self._memory, sources, targets, keys, strict=True)
        units = [
            (kept, memory, *(column[at : at + memory.batch] for column in columns))
            for kept, memory, *columns in groups
            for at in range(0, len(columns[0]), memory.batch)
        ]
        if self._abreast is None:
            for unit in units:
                one(*unit)
            return
        begun = [self._abreast.submit(one, *unit) for unit in units]
        wait(begun)
        for each in begun:
            each.result()

    def warn(self, what: str, error: OSError) -> None:
        """Once of its kind."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s: %s: not everything can %s", self._flag, error, what)

    def close(self) -> None:
        """Another server may have the files."""
        for job in self._under_way:
            job.give_up()
        for threads in filter(None, (self._reader, self._writer, self._abreast)):
            threads.shutdown(wait=not self._stuck, cancel_futures=True)
        for kept in self._kept:
            kept.close()

"""Tiers that threads read and write: copies of what the prefix tree has, beside steps.

Nothing that goes wrong here is an error of a request. What cannot be written is not kept; what cannot be
read, or is not what was written, is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.messages import KEY, Copy, Moved
from sgla.worker.state import column

SUM = 16  # bytes of a checksum
PATIENCE = 30.0  # seconds that a copy may take
log = logging.getLogger(__name__)


def checksum(key: bytes, data: bytes | memoryview) -> bytes:
    """Of a unit and what it is."""
    made = blake2b(key, digest_size=SUM)
    made.update(data)
    return made.digest()


class Source(Protocol):
    """One of them, and what copies are made by. A tier is a target as well."""

    @property
    def under_way(self) -> bool:
        """Some copy has not been told of by ``ended``."""

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call."""

    def close(self) -> None: ...


class Memory(Protocol):
    """Units of one cache group on the device, which threads read and write: ``nbytes`` each."""

    nbytes: int

    def mark(self) -> object:
        """Of the steps that have been launched, for ``wait``."""
        ...

    def wait(self, mark: object) -> None:
        """Until those are done."""
        ...

    def read(self, unit: int) -> bytes: ...

    def write(self, unit: int, data: bytes | memoryview) -> None: ...


class HostMemory:
    """Of a CPU, whose steps are done when they have been launched."""

    def __init__(self, tensors: Sequence[NDArray[np.uint8]]) -> None:
        """[units, bytes] of each tensor"""
        self._tensors = tensors
        self.nbytes = sum(tensor.shape[1] for tensor in tensors)

    def mark(self) -> None: ...

    def wait(self, mark: object) -> None: ...

    def read(self, unit: int) -> bytes:
        return b"".join(tensor[unit].data for tensor in self._tensors)

    def write(self, unit: int, data: bytes | memoryview) -> None:
        values, at = np.frombuffer(data, np.uint8), 0
        for tensor in self._tensors:
            tensor[unit] = values[at : at + tensor.shape[1]]
            at += tensor.shape[1]


class Units(Protocol):
    """Where units of one cache group are kept. All raise OSError."""

    def read(self, unit: int, key: bytes) -> bytes | memoryview:
        """What was written, or OSError."""
        ...

    def write(self, unit: int, key: bytes, data: bytes) -> None: ...

    def erase(self, unit: int) -> None: ...

    def find(self, keys: list[bytes]) -> bytes:
        """Of each key, whether it is there."""
        ...

    def close(self) -> None: ...


class Job(NamedTuple):
    """A copy. What is not ``wanted`` any more may neither read nor write the device's memory."""

    transfer: int
    due: float
    lock: Lock
    wanted: list[bool]  # one
    done: Future[list[bytes]]

    def give_up(self) -> None:
        with self.lock:
            self.wanted[0] = False


class FileTier:
    """``kept``: each cache group's units; ``memory``: those on the device. ``flag`` names it in warnings.
    There are threads for each direction, so that what is read does not wait for what is written. ``abreast``:
    units of a copy that are on their way at a time, where there are cores to spare."""

    def __init__(
        self, flag: str, kept: Sequence[Units], memory: Sequence[Memory], threads: int = 1, abreast: int = 1
    ) -> None:
        self._flag, self._kept, self._memory = flag, kept, memory
        self._reader = ThreadPoolExecutor(threads, "kv-read")
        self._writer = ThreadPoolExecutor(threads, "kv-write")
        self._abreast = ThreadPoolExecutor(abreast, "kv-unit") if abreast > 1 else None
        self._under_way: list[Job] = []
        self._failed: list[Moved] = []
        self._stuck: list[Job] = []  # that nobody waits for any more
        self._warned: set[str] = set()

    @property
    def under_way(self) -> bool:
        return bool(self._under_way or self._failed)

    def begin(self, copy: Copy) -> None:
        self._stuck = [job for job in self._stuck if not job.done.done()]
        if self._stuck:
            self._failed.append(Moved(copy.transfer, ok=False))
            return
        threads, work = self._reader, self._load
        if copy.target != "device":
            threads, work = (self._writer, self._save) if copy.target else (self._reader, self._look)
        lock, wanted = Lock(), [True]
        done = threads.submit(work, copy, lock, wanted, self._memory[0].mark())
        self._under_way.append(Job(copy.transfer, clock.now() + PATIENCE, lock, wanted, done))

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call, or take too long."""
        now = clock.now()
        over = [job for job in self._under_way if job.done.done() or job.due < now]
        if not over:
            failed, self._failed = self._failed, []
            return failed
        self._under_way = [job for job in self._under_way if job not in over]
        for job in over:
            if not job.done.done():
                job.give_up()
                self.warn("be had in time; what it holds is computed", TimeoutError("it does not answer"))
                self._stuck.append(job)
        failed, self._failed = self._failed, []
        return failed + [_ended(job) for job in over]

    def _load(self, copy: Copy, lock: Lock, wanted: list[bool], mark: object) -> list[bytes]:
        def load(kept: Units, memory: Memory, place: int, unit: int, key: bytes) -> None:
            data = kept.read(place, key)
            with lock:
                if wanted[0]:
                    memory.write(unit, data)

        try:
            self._memory[0].wait(mark)
            self._each(load, copy)
        except OSError as error:
            self.warn("be read; what it holds is computed", error)
            raise
        return []

    def _save(self, copy: Copy, lock: Lock, wanted: list[bool], mark: object) -> list[bytes]:
        def save(kept: Units, memory: Memory, unit: int, place: int, key: bytes) -> None:
            with lock:
                data = memory.read(unit) if wanted[0] else None
            if data is not None:
                kept.write(place, key, data)

        try:
            if not copy.source:
                for kept, targets in zip(self._kept, copy.targets):
                    for place in column(targets).tolist():
                        kept.erase(place)
                return []
            self._memory[0].wait(mark)
            self._each(save, copy)
        except OSError as error:
            self.warn("be written; what it lacks is computed again", error)
            raise
        return []

    def _look(self, copy: Copy, lock: Lock, wanted: list[bool], mark: object) -> list[bytes]:
        """Of each cache group and key, whether it is there. Where the first group ends, nothing is of use."""
        try:
            first, *others = [_parted(keys) for keys in copy.keys]
            found = self._kept[0].find(first)
            end = (found + b"\0").index(0)
            more = [
                kept.find(keys[:end]).ljust(len(keys), b"\0") for kept, keys in zip(self._kept[1:], others)
            ]
            return [found, *more]
        except OSError as error:
            self.warn("be read; what it holds is computed", error)
            raise

    def _each(self, work: Callable[..., None], copy: Copy) -> None:
        """Of each unit; the last of them is done when this is, whatever is raised."""
        sources, targets = ([column(c).tolist() for c in columns] for columns in (copy.sources, copy.targets))
        keys = [_parted(names) for names in copy.keys]
        groups = zip(self._kept, self._memory, sources, targets, keys, strict=True)
        units = [(kept, memory, *ends) for kept, memory, *columns in groups for ends in zip(*columns)]
        if self._abreast is None:
            for unit in units:
                work(*unit)
            return
        begun = [self._abreast.submit(work, *unit) for unit in units]
        wait(begun)
        for one in begun:
            one.result()

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


def _ended(job: Job) -> Moved:
    if not job.wanted[0] or job.done.exception() is not None:
        return Moved(job.transfer, ok=False)
    return Moved(job.transfer, ok=True, there=job.done.result())


def _parted(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY] for at in range(0, len(keys), KEY)]

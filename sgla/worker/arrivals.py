"""Units that have come from a prefill server, until somebody takes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sgla.peers import Beside, Unit
from sgla.worker.parts import Fit
from sgla.worker.tiers import Units, checksum

Name = tuple[int, int, bytes]
"""Of a unit: which of the ranks that are read it comes from (``Fit.sources``), its cache group, its key."""


class Borrows(Protocol):
    """Memory of units on the prefill server."""

    count: int  # of its places

    def read(self, place: int) -> tuple[NDArray[np.uint8], int]:
        """A unit, and the mark that it had behind that. Raises OSError."""
        ...


class Arrived(NamedTuple):
    """A unit, or where it lies in the ``segment`` that was borrowed."""

    data: Beside
    told: Unit
    came: float
    segment: Borrows | None = None

    def content(self) -> Beside:
        """Raises OSError if it is not what was computed."""
        if self.segment is None:
            return self._checked(self.data)
        copied, mark = self.segment.read(self.told.place)
        if mark != self.told.mark:
            raise OSError("a unit was overwritten before it was read; raise --kv-transfer-bytes there")
        return self._checked(copied.data) if self.told.sum else copied.data

    def _checked(self, data: Beside) -> Beside:
        if checksum(self.told.key, data) != self.told.sum:
            raise OSError("a unit is not what was computed")
        return data


class Arrivals:
    """Units that nobody has taken yet, of at most ``room`` bytes: then those go that came first. Whoever uses
    it holds ``lock``. ``fit``: of the ranks that they come from; it tells what a unit of each has."""

    def __init__(self, fit: Fit, room: int) -> None:
        self.lock = threading.Lock()
        self.fit = fit
        self._room, self._used = room, 0
        self._there: dict[Name, Arrived] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._there

    def suit(self, fit: Fit) -> None:
        """From here on units come from other ranks. Those of the ranks before are of no use."""
        self.fit, self._there, self._used = fit, {}, 0

    def names(self, group: int, key: bytes) -> list[Name]:
        """Of what a unit is put together from."""
        return [(source, group, key) for source in range(len(self.fit.sources))]

    def has(self, group: int, key: bytes) -> bool:
        return all(name in self._there for name in self.names(group, key))

    def nbytes(self, counts: Sequence[int]) -> int:
        """Of so many units of each cache group."""
        return sum(n * size for sizes in self.fit.nbytes for n, size in zip(counts, sizes))

    def put(self, name: Name, arrived: Arrived) -> None:
        self._take(name)
        self._there[name] = arrived
        self._used += len(arrived.data)
        while self._used > self._room:
            self._take(next(iter(self._there)))

    def _take(self, name: Name) -> Arrived | None:
        arrived = self._there.pop(name, None)
        self._used -= len(arrived.data) if arrived else 0
        return arrived

    def take(self, group: int, key: bytes) -> tuple[Fit, list[Arrived]] | None:
        """What a unit is put together from; None, and nothing is taken, if it is not all there."""
        names = self.names(group, key)
        if not self.has(group, key):
            return None
        return self.fit, [arrived for name in names if (arrived := self._take(name)) is not None]

    def forget(self) -> None:
        """What was borrowed cannot be read any more."""
        for name in [name for name, arrived in self._there.items() if arrived.segment is not None]:
            self._take(name)

    def lent(self, keys: Sequence[Sequence[bytes]]) -> list[list[Unit]] | None:
        """Of units of each cache group that lie as they do here, where they are in memory that was borrowed;
        None, and nothing is taken, if one of them is not."""
        if not self.fit.whole:
            return None
        names = [[(0, g, key) for key in group] for g, group in enumerate(keys)]
        found = [[self._there.get(name) for name in group] for group in names]
        if any(arrived is None or arrived.segment is None for group in found for arrived in group):
            return None
        return [[arrived.told for name in group if (arrived := self._take(name))] for group in names]

    def purge(self, before: float) -> None:
        """What came then goes."""
        for name in [name for name, arrived in self._there.items() if arrived.came < before]:
            self._take(name)


class Taken(Units):
    """The arrivals of one cache group as ``tiers.Units``: each is read once."""

    def __init__(self, arrivals: Arrivals, group: int) -> None:
        self._arrivals, self._group = arrivals, group

    def read(self, unit: int, key: bytes) -> Beside:
        with self._arrivals.lock:
            taken = self._arrivals.take(self._group, key)
        if taken is None:
            raise OSError("a unit is not there any more")
        fit, arrived = taken
        return fit.join(self._group, [one.content() for one in arrived])

    def write(self, unit: int, key: bytes, data: Beside) -> None:
        raise AssertionError("nothing is saved to a prefill server")

    def erase(self, unit: int) -> None:
        raise AssertionError("units have no places")

    def find(self, keys: list[bytes]) -> bytes:
        raise AssertionError("it is asked otherwise")

    def close(self) -> None: ...

"""What was made of pictures, sounds and videos that came lately, for requests that have them again."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary, finalize

from sgla.messages import Array, Prepared

THINGS = 1 << 12  # that lie here
SOURCES = 1 << 14  # files of which it is known what they show


class Shown(NamedTuple):
    """``digest``: of the pixels or samples; ``kind``: of ``Prepared``."""

    digest: bytes
    kind: str


class Made:
    """Arrays of one thing of a ``kind``, in a file without a name, which is gone when nobody has this."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.arrays: list[Array] = []
        self.descriptor = os.memfd_create("picture", os.MFD_CLOEXEC)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def __del__(self) -> None:
        os.close(self.descriptor)


class Shelf:
    """``most``: bytes that lie here. What a request has in use stays; of the rest, the longest unused goes
    first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.bytes = 0
        self.asked = self.found = 0  # files that came, and of which something lay here
        self._kept: OrderedDict[bytes, tuple[Made, int]] = (
            OrderedDict()
        )  # by digest, the latest used one last
        # What requests have: for which it was made, and to which it was lent.
        self._new: WeakValueDictionary[bytes, Prepared] = WeakValueDictionary()
        self._lent: WeakValueDictionary[bytes, Prepared] = WeakValueDictionary()
        self._sources: OrderedDict[bytes, Shown] = OrderedDict()

    def lend(self, digest: bytes) -> Prepared | None:
        """What lies here of the thing with this digest."""
        if digest not in self._kept:
            return None
        self._kept.move_to_end(digest)
        lent = self._lent.get(digest)
        if lent is None:
            made, _ = self._kept[digest]
            lent = self._lent[digest] = _prepared(digest, made, lambda: None)
        return lent

    def get(self, digest: bytes) -> Prepared | None:
        """What lies here, or is another request's."""
        return self.lend(digest) or self._new.get(digest)

    def put(self, digest: bytes, made: Made, done: Callable[[], None]) -> Prepared:
        """``made``, for a request; ``done`` is called when no request has this any more."""
        prepared = self._new[digest] = _prepared(digest, made, done)
        size = made.size
        if size <= self._most:
            for old in list(self._kept):
                if self._fits(size):
                    break
                if old not in self._new and old not in self._lent:
                    self.bytes -= self._kept.pop(old)[1]
            if self._fits(size):
                self._kept[digest] = made, size
                self.bytes += size
        return prepared

    def _fits(self, size: int) -> bool:
        """Each thing is an open file."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = THINGS if files == resource.RLIM_INFINITY else min(THINGS, files // 4)
        return self.bytes + size <= self._most and len(self._kept) < most

    def shows(self, source: bytes) -> Shown | None:
        """What a file shows, by the digest of the file."""
        if source in self._sources:
            self._sources.move_to_end(source)
        return self._sources.get(source)

    def came(self, source: bytes, shown: Shown) -> None:
        """A file with the digest ``source`` shows this."""
        self._sources[source] = shown
        if len(self._sources) > SOURCES:
            self._sources.popitem(last=False)


def _prepared(digest: bytes, made: Made, done: Callable[[], None]) -> Prepared:
    prepared = Prepared(digest, made.path, made.arrays, made.kind)
    finalize(prepared, _returned, made, done)
    return prepared


def _returned(made: Made, done: Callable[[], None]) -> None:
    """``made`` is there until now."""
    done()

"""What a rank of a prefill server has computed, in the host's memory, where decode servers get it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.messages import Copy, Moved, keys_in
from sgla.peers import (
    Beside,
    Borrowed,
    Channel,
    Exposed,
    Frame,
    Lent,
    Link,
    Listener,
    Message,
    Placed,
    Unit,
    Want,
)
from sgla.worker.lent import Lending
from sgla.worker.state import column
from sgla.worker.tiers import Source, checksum
from sgla.worker.transfer import TransferEngine

Name = tuple[int, bytes]
"""Of a unit: its cache group and its key."""


class HostUnits:
    """Units of one cache group in memory that other processes may read, and what they are."""

    def __init__(self, units: int, nbytes: int, token: bytes, lending: Lending) -> None:
        """``lending``: where. Raises RuntimeError."""
        self.nbytes, self.memory = nbytes, lending.lend(units, nbytes, token)
        self._keys = [b""] * (units + 1)
        self._sums: dict[int, Future[bytes]] = {}  # of units of which one is made
        self._units: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def begin(self, unit: int) -> None:
        """It is going to be written."""
        with self._lock:
            self._drop(unit)
            self.memory.marks[unit] += 1

    def end(self, unit: int, key: bytes, threads: ThreadPoolExecutor | None) -> None:
        """It has been. ``threads`` make a checksum; without them it is made when it is wanted."""
        with self._lock:
            self.memory.marks[unit] += 1
            self._keys[unit], self._units[key] = key, unit
            if threads is not None:
                self._sums[unit] = threads.submit(self._checksum, unit, key)

    def _checksum(self, unit: int, key: bytes) -> bytes:
        return checksum(key, self.memory.content(unit).data)

    def has(self, key: bytes) -> bool:
        return key in self._units

    def take(self, key: bytes, into: NDArray[np.uint8]) -> bytes | None:
        """What is there under the key, and its checksum; None: it is not there any more. Whoever gets it
        compares the two."""
        with self._lock:
            unit = self._units.get(key)
            if unit is None:
                return None
            np.copyto(into, self.memory.content(unit))
            made = self._sums.get(unit)
        return checksum(key, into.data) if made is None else made.result()

    def lent(self, key: bytes) -> tuple[int, int] | None:
        """The place and mark of what is there under the key."""
        with self._lock:
            unit = self._units.get(key)
            return None if unit is None else (unit, int(self.memory.marks[unit]))

    def sum(self, key: bytes) -> bytes:
        """The checksum of what is there under the key; nothing where none was made."""
        with self._lock:
            made = self._sums.get(self._units.get(key, 0))
        return b"" if made is None else made.result()

    def erase(self, unit: int) -> None:
        with self._lock:
            self._drop(unit)

    def _drop(self, unit: int) -> None:
        self._units.pop(self._keys[unit], None)
        self._sums.pop(unit, None)
        self._keys[unit] = b""


class Offer:
    """A tier of a prefill server, and who waits for its units: each gets them as soon as they are there.
    ``mover`` copies units between the device and the memory of ``kept``."""

    def __init__(
        self,
        config: Config,
        told: dict[str, str],
        kept: Sequence[HostUnits],
        mover: Source,
        rank: int,
        abreast: int,
        token: bytes = b"",
        engine: TransferEngine | None = None,
    ) -> None:
        """``token``: of the units' memory, if it is lent; ``engine``: by what other hosts read it. Raises
        ConfigError if the port, as many behind ``--kv-transfer-port``, cannot be had."""
        self._units, self._mover = kept, mover
        self._saving: dict[int, Copy] = {}  # by their transfer
        self._erased: list[Moved] = []
        self._wanted: dict[Name, list[Link]] = {}
        self._links: set[Link] = set()
        self._borrowers: set[Link] = set()
        self._threads = ThreadPoolExecutor(abreast, "kv-sum")
        self._engine = engine
        self._lent = self._exposed(engine) if engine is not None else self._terms(token) if token else None
        self._lock = threading.Lock()
        port = config.kv_transfer_port and config.kv_transfer_port + 1 + rank
        try:
            self._listener = Listener(config.host, port, config.kv_transfer_secret or "", told, self._joined)
        except OSError as error:
            raise ConfigError(
                f"--kv-transfer-port {config.kv_transfer_port}: {error.strerror or error} (of port {port}, "
                "which a rank needs)",
                param="kv_transfer_port",
            ) from error

    @property
    def under_way(self) -> bool:
        return bool(self._erased) or self._mover.under_way

    def begin(self, copy: Copy) -> None:
        """Save, bring back what this server's own tree has lost, or forget."""
        if copy.target == "device":
            self._mover.begin(copy)
            return
        for units, targets in zip(self._units, copy.targets):
            for unit in column(targets).tolist():
                units.begin(unit) if copy.source else units.erase(unit)
        if copy.source:
            self._saving[copy.transfer] = copy
            self._mover.begin(copy)
        else:
            self._erased.append(Moved(copy.transfer, ok=True))

    def drop(self, transfer: int) -> None: ...

    def ended(self) -> list[Moved]:
        erased, self._erased = self._erased, []
        saved = self._mover.ended()
        for moved in saved:
            copy = self._saving.pop(moved.transfer, None)
            if copy is not None and moved.ok:
                self._saved(copy)
        return erased + saved

    def _saved(self, copy: Copy) -> None:
        summed = self._engine is not None or len(self._borrowers) < len(self._links)
        threads = self._threads if summed else None
        names: list[Name] = []
        for g, (targets, keys) in enumerate(zip(copy.targets, copy.keys)):
            for unit, key in zip(column(targets).tolist(), keys_in(keys)):
                self._units[g].end(unit, key, threads)
                names.append((g, key))
        self.written(names)

    @property
    def port(self) -> int:
        return self._listener.port

    def _joined(self, channel: Channel) -> None:
        def take(message: Message, beside: Beside) -> None:
            if isinstance(message, Want):
                self._want(link, message)
            elif isinstance(message, Borrowed):
                with self._lock:
                    self._borrowers.add(link)

        link = Link(channel, take, lambda: self._left(link))
        with self._lock:
            self._links.add(link)
        if self._lent is not None:
            link.post(self._lent)
        link.begin()

    def _terms(self, token: bytes) -> Lent | None:
        fds = [fd for units in self._units if (fd := units.memory.fd) is not None]
        counts = [units.memory.count - 1 for units in self._units]
        handles = [units.memory.handle for units in self._units]
        if len(fds) < len(counts):
            return None
        return Lent(os.getpid(), token, fds, counts, handles if any(handles) else [])

    def _exposed(self, engine: TransferEngine) -> Exposed:
        addresses = [engine.register(units.memory.whole) for units in self._units]
        return Exposed(engine.metadata(), addresses, [units.memory.count - 1 for units in self._units])

    def _want(self, link: Link, want: Want) -> None:
        there: list[Name] = []
        for group, keys in enumerate(want.keys[: len(self._units)]):
            for key in keys_in(keys):
                name = group, key
                with self._lock:
                    links = self._wanted.setdefault(name, [])
                    if link in links:
                        links.remove(link)
                    if not want.drop:
                        links.append(link)
                    if not links:
                        del self._wanted[name]
                if not want.drop and self._units[group].has(key):
                    there.append(name)
        self.written(there)

    def written(self, names: Sequence[Name]) -> None:
        """Send units to all who want them, or tell them where they are."""
        wanted: dict[Link, list[Name]] = {}
        with self._lock:
            for name in names:
                for link in self._wanted.pop(name, ()):
                    wanted.setdefault(link, []).append(name)
        for link, own in wanted.items():
            if link in self._borrowers and self._engine is None:
                for group in range(len(self._units)):
                    keys = [key for g, key in own if g == group]
                    link.post(partial(self._placed, link, group, keys))
            else:
                for name in own:
                    link.post(partial(self._frame, link, *name))

    def _placed(self, link: Link, group: int, keys: Sequence[bytes]) -> Frame | None:
        """What is lost meanwhile is still wanted."""
        found = [(key, *place) for key in keys if (place := self._lent_at(link, group, key)) is not None]
        if not found:
            return None
        there, places, marks = zip(*found)
        told = np.array(places, np.int32).tobytes(), np.array(marks, np.int64).tobytes()
        return Placed(group, b"".join(there), *told), b""

    def _lent_at(self, link: Link, group: int, key: bytes) -> tuple[int, int] | None:
        place = self._units[group].lent(key)
        if place is None:
            self._wait(link, group, key)
        return place

    def _frame(self, link: Link, group: int, key: bytes) -> Frame | None:
        """``_placed`` of one unit, which is sent, or has a checksum where it lies."""
        units = self._units[group]
        if link in self._borrowers:
            place, made = self._lent_at(link, group, key), units.sum(key)
            return None if place is None else (Unit(group, key, made, *place), b"")
        room = np.empty(units.nbytes, np.uint8)
        found = units.take(key, room)
        return self._wait(link, group, key) if found is None else (Unit(group, key, found), room.data)

    def _wait(self, link: Link, group: int, key: bytes) -> Frame | None:
        with self._lock:
            if link in self._links:
                self._wanted.setdefault((group, key), []).append(link)
        return None

    def _left(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
            self._borrowers.discard(link)
            left = [name for name, links in self._wanted.items() if link in links]
            for name in left:
                self._wanted[name].remove(link)
                if not self._wanted[name]:
                    del self._wanted[name]

    def close(self) -> None:
        self._listener.close()
        for link in list(self._links):
            link.close()
        self._threads.shutdown(cancel_futures=True)
        self._mover.close()
        if self._engine is not None:
            self._engine.close()
        for units in self._units:
            units.memory.close()

"""What a rank of a prefill server has computed, in the host's memory, where decode servers get it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.messages import KEY
from sgla.peers import Beside, Borrowed, Channel, Frame, Lent, Link, Listener, Message, Unit, Want
from sgla.worker.lent import TOKEN, lend
from sgla.worker.tiers import FileTier, Memory, checksum


class HostUnits:
    """Units of one cache group, whose numbers begin with 1, in memory that other processes may read."""

    def __init__(self, units: int, nbytes: int, token: bytes = bytes(TOKEN)) -> None:
        self.nbytes, self.memory = nbytes, lend(units, nbytes, token)
        self.sent = True  # whether anybody gets units by TCP, with a checksum
        self._entries = [b""] * (units + 1)  # key, and checksum if there is one
        self._places: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None:
        made = checksum(key, data) if self.sent else b""
        with self._lock:
            self._drop(unit)
            self.memory.write(unit - 1, np.frombuffer(data, np.uint8))
            self._entries[unit] = key + made
            self._places[key] = unit

    def read(self, unit: int, key: bytes) -> bytes:
        """For this server itself, whose tree has lost it. Raises OSError."""
        with self._lock:
            data, entry = self.memory.units[unit - 1].tobytes(), self._entries[unit]
        if entry[:KEY] != key or entry[KEY:] not in (b"", checksum(key, data)):
            raise OSError("memory has been changed")
        return data

    def has(self, key: bytes) -> bool:
        return key in self._places

    def take(self, key: bytes, into: NDArray[np.uint8]) -> bytes | None:
        """What is there under the key, and its checksum; None: it is not there any more. Whoever gets it
        compares the two."""
        with self._lock:
            unit = self._places.get(key)
            if unit is None:
                return None
            np.copyto(into, self.memory.units[unit - 1])
            made = self._entries[unit][KEY:]
        return made or checksum(key, into.data)

    def lent(self, key: bytes) -> tuple[int, int] | None:
        """The place and mark of what is there under the key."""
        with self._lock:
            unit = self._places.get(key)
            return None if unit is None else (unit - 1, int(self.memory.marks[unit - 1]))

    def erase(self, unit: int) -> None:
        with self._lock:
            self._drop(unit)

    def _drop(self, unit: int) -> None:
        self._places.pop(self._entries[unit][:KEY], None)
        self._entries[unit] = b""

    def find(self, keys: list[bytes]) -> bytes:
        raise AssertionError("the scheduler knows")

    def close(self) -> None:
        self.memory.close()


class Offer(FileTier):
    """A tier of a prefill server, and who waits for its units: each gets them as soon as they are there."""

    def __init__(
        self,
        config: Config,
        told: dict[str, str],
        kept: Sequence[HostUnits],
        memory: Sequence[Memory],
        rank: int,
        abreast: int,
        token: bytes = b"",
    ) -> None:
        """``token``: of the units' memory, if it is lent. Raises ConfigError if the port, as many behind
        ``--kv-transfer-port``, cannot be had."""
        telling = [_Told(self, g, units) for g, units in enumerate(kept)]
        super().__init__("--role prefill", telling, memory, 1, abreast)
        self._units = kept
        self._wanted: dict[tuple[int, bytes], list[Link]] = {}
        self._links: set[Link] = set()
        self._borrowers: set[Link] = set()
        self._lent = self._terms(token) if token else None
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
    def port(self) -> int:
        return self._listener.port

    def _joined(self, channel: Channel) -> None:
        def take(message: Message, beside: Beside) -> None:
            if isinstance(message, Want):
                self._want(link, message)
            elif isinstance(message, Borrowed):
                with self._lock:
                    self._borrowers.add(link)
                    self._count()

        link = Link(channel, take, lambda: self._left(link))
        with self._lock:
            self._links.add(link)
            self._count()
        if self._lent is not None:
            link.post(self._lent)
        link.begin()

    def _terms(self, token: bytes) -> Lent | None:
        fds = [fd for units in self._units if (fd := units.memory.fd) is not None]
        counts = [len(units.memory.units) for units in self._units]
        return Lent(os.getpid(), token, fds, counts) if len(fds) == len(counts) else None

    def _count(self) -> None:
        """Whether all who are here borrow: then units need no checksums."""
        for units in self._units:
            units.sent = len(self._borrowers) < max(1, len(self._links))

    def _want(self, link: Link, want: Want) -> None:
        for group, keys in enumerate(want.keys[: len(self._units)]):
            for at in range(0, len(keys), KEY):
                name = group, keys[at : at + KEY]
                with self._lock:
                    links = self._wanted.setdefault(name, [])
                    if link in links:
                        links.remove(link)
                    if not want.drop:
                        links.append(link)
                    if not links:
                        del self._wanted[name]
                if not want.drop and self._units[group].has(name[1]):
                    self.written(*name)

    def written(self, group: int, key: bytes) -> None:
        """Send a unit to all who want it."""
        with self._lock:
            links = self._wanted.pop((group, key), [])
        for link in links:
            link.post(partial(self._frame, link, group, key))

    def _frame(self, link: Link, group: int, key: bytes) -> Frame | None:
        """What is lost meanwhile is still wanted."""
        units = self._units[group]
        if link in self._borrowers:
            place = units.lent(key)
            return self._wait(link, group, key) if place is None else (Unit(group, key, b"", *place), b"")
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
            self._count()
            left = [name for name, links in self._wanted.items() if link in links]
            for name in left:
                self._wanted[name].remove(link)
                if not self._wanted[name]:
                    del self._wanted[name]

    def close(self) -> None:
        self._listener.close()
        for link in list(self._links):
            link.close()
        super().close()


class _Told:
    """Units that tell of what is written."""

    def __init__(self, offer: Offer, group: int, units: HostUnits) -> None:
        self._offer, self._group, self._units = offer, group, units
        self.read, self.erase, self.find, self.close = units.read, units.erase, units.find, units.close

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None:
        self._units.write(unit, key, data)
        self._offer.written(self._group, key)

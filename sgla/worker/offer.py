"""What a rank of a prefill server has computed, in the host's memory, where decode servers get it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.messages import KEY
from sgla.peers import Beside, Channel, Frame, Link, Listener, Message, Unit, Want
from sgla.worker.tiers import FileTier, Memory, checksum


class HostUnits:
    """Units of one cache group, whose numbers begin with 1, in this process's memory."""

    def __init__(self, units: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._data = np.zeros((units, nbytes), np.uint8)
        self._entries = [b""] * (units + 1)  # key and checksum
        self._places: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def write(self, unit: int, key: bytes, data: bytes) -> None:
        made = checksum(key, data)
        with self._lock:
            self._drop(unit)
            self._data[unit - 1] = np.frombuffer(data, np.uint8)
            self._entries[unit] = key + made
            self._places[key] = unit

    def read(self, unit: int, key: bytes) -> bytes:
        raise AssertionError("units are sent, not brought back")

    def has(self, key: bytes) -> bool:
        return key in self._places

    def take(self, key: bytes, into: NDArray[np.uint8]) -> bytes | None:
        """What is there under the key, and its checksum; None: it is not there any more. Whoever gets it
        compares the two."""
        with self._lock:
            unit = self._places.get(key)
            if unit is None:
                return None
            np.copyto(into, self._data[unit - 1])
            return self._entries[unit][KEY:]

    def erase(self, unit: int) -> None:
        with self._lock:
            self._drop(unit)

    def _drop(self, unit: int) -> None:
        self._places.pop(self._entries[unit][:KEY], None)
        self._entries[unit] = b""

    def find(self, keys: list[bytes]) -> bytes:
        raise AssertionError("the scheduler knows")

    def close(self) -> None: ...


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
    ) -> None:
        """Raises ConfigError if the port, as many behind ``--kv-transfer-port``, cannot be had."""
        telling = [_Told(self, g, units) for g, units in enumerate(kept)]
        super().__init__("--role prefill", telling, memory, 1, abreast)
        self._units = kept
        self._wanted: dict[tuple[int, bytes], list[Link]] = {}
        self._links: set[Link] = set()
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

        link = Link(channel, take, lambda: self._left(link))
        with self._lock:
            self._links.add(link)
        link.begin()

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
        room = np.empty(units.nbytes, np.uint8)
        found = units.take(key, room)
        if found is not None:
            return Unit(group, key, found), room.data
        with self._lock:
            if link in self._links:
                self._wanted.setdefault((group, key), []).append(link)
        return None

    def _left(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
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

    def write(self, unit: int, key: bytes, data: bytes) -> None:
        self._units.write(unit, key, data)
        self._offer.written(self._group, key)

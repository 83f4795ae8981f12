"""A prefill server as a tier: it is asked for a prompt, and its units come while it computes.

Nothing that goes wrong here is an error of a request: what has not come is computed by this server.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.messages import KEY, Copy, Moved
from sgla.peers import (
    Ask,
    Beside,
    Borrowed,
    Channel,
    Done,
    Leave,
    Lent,
    Link,
    Message,
    PeerRefused,
    Unit,
    Want,
    connect,
)
from sgla.worker.lent import Mover, Segment, borrow
from sgla.worker.state import column
from sgla.worker.tiers import PATIENCE, FileTier, Memory, Source, checksum

log = logging.getLogger(__name__)

STALLED = 2.0  # seconds without a unit after the prompt has been computed
KEPT = 30.0  # seconds for which a unit that nobody has taken is kept
AGAIN = 1.0  # seconds between tries to connect
COPYING = 4  # threads

Name = tuple[int, bytes]  # of a unit: its cache group and key


@dataclass(slots=True, eq=False)
class Asked:
    """A prompt that the prefill server is asked for. ``sent``: it knows; ``moved``: when something came."""

    copy: Copy
    number: int
    names: list[list[Name]]  # of each cache group
    lacking: set[Name]
    nbytes: int
    moved: float
    sent: bool = False
    done: Done | None = None


class Arrived(NamedTuple):
    """A unit. What was borrowed has no ``data`` here."""

    data: Beside
    told: Unit
    came: float


class Arrivals:
    """Units that have come and that nobody has taken yet, at most ``room`` bytes: then those go that came
    first. Whoever uses it holds ``lock``."""

    def __init__(self, nbytes: Sequence[int], room: int) -> None:
        """``nbytes``: of a unit of each cache group"""
        self.lock = threading.Lock()
        self.nbytes, self._room, self._used = nbytes, room, 0
        self._there: dict[Name, Arrived] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._there

    def put(self, name: Name, arrived: Arrived) -> None:
        self.take(name)
        self._there[name] = arrived
        self._used += len(arrived.data)
        while self._used > self._room:
            self.take(next(iter(self._there)))

    def take(self, name: Name) -> Arrived | None:
        arrived = self._there.pop(name, None)
        self._used -= len(arrived.data) if arrived else 0
        return arrived

    def forget(self) -> None:
        """What was borrowed cannot be read any more."""
        for name in [name for name, arrived in self._there.items() if arrived.told.place >= 0]:
            self.take(name)

    def lent(self, names: Sequence[Sequence[Name]]) -> list[list[Unit]] | None:
        """Where they are in memory that was borrowed; None, and nothing is taken, if one of them is not."""
        found = [[self._there.get(name) for name in group] for group in names]
        if any(arrived is None or arrived.told.place < 0 for group in found for arrived in group):
            return None
        return [[arrived.told for name in group if (arrived := self.take(name))] for group in names]

    def purge(self, before: float) -> None:
        """What came then goes."""
        for name in [name for name, arrived in self._there.items() if arrived.came < before]:
            self.take(name)


class Taken:
    """The arrivals of one cache group as ``tiers.Units``: each is read once."""

    def __init__(self, arrivals: Arrivals, group: int) -> None:
        self._arrivals, self._group = arrivals, group

    def read(self, unit: int, key: bytes) -> Beside:
        with self._arrivals.lock:
            arrived = self._arrivals.take((self._group, key))
        if arrived is None:
            raise OSError("a unit is not there any more")
        if checksum(key, arrived.data) != arrived.told.sum:
            raise OSError("a unit is not what was computed")
        return arrived.data

    def write(self, unit: int, key: bytes, data: bytes) -> None:
        raise AssertionError("nothing is saved to a prefill server")

    def erase(self, unit: int) -> None:
        raise AssertionError("units have no places")

    def find(self, keys: list[bytes]) -> bytes:
        raise AssertionError("it is asked otherwise")

    def close(self) -> None: ...


class Loan:
    """The memory of a prefill server. ``mover`` copies from it."""

    def __init__(self, segments: Sequence[Segment], mover: Source) -> None:
        self._segments, self._mover = segments, mover
        self._copies: dict[int, Copy] = {}  # by their transfer
        self._marks: dict[int, list[NDArray[np.int64]]] = {}  # of their cache groups, as told

    @property
    def under_way(self) -> bool:
        return self._mover.under_way

    def begin(self, copy: Copy, told: Sequence[Sequence[Unit]]) -> None:
        """``told``: of each cache group."""
        places = [np.array([unit.place for unit in units], np.int32).tobytes() for units in told]
        self._marks[copy.transfer] = [np.array([unit.mark for unit in units], np.int64) for units in told]
        self._copies[copy.transfer] = msgspec.structs.replace(copy, sources=places)
        self._mover.begin(self._copies[copy.transfer])

    def ended(self) -> list[Moved]:
        return [self._checked(moved) for moved in self._mover.ended()]

    def _checked(self, moved: Moved) -> Moved:
        """What was overwritten before it was copied means nothing."""
        copy, marks = self._copies.pop(moved.transfer), self._marks.pop(moved.transfer)
        for segment, places, told in zip(self._segments, copy.sources, marks):
            if (segment.marks[column(places)] != told).any():
                log.warning(
                    "--prefill-url: a larger --kv-transfer-bytes there keeps units until they are read"
                )
                return Moved(moved.transfer, ok=False)
        return moved

    def close(self) -> None:
        self._mover.close()


class RemoteTier:
    """``mover``: what copies from memory that a prefill server on this host lends. ``room``: bytes of prompts
    that may be under way, while others wait for their turn, and of units that may wait to be taken."""

    def __init__(
        self,
        config: Config,
        told: dict[str, str],
        memory: Sequence[Memory],
        mover: Mover,
        rank: int,
        room: int,
        abreast: int,
    ) -> None:
        """Raises ConfigError if the prefill server is there and is another one."""
        self._arrivals = Arrivals([units.nbytes for units in memory], room)
        self._guard = self._arrivals.lock
        taken = [Taken(self._arrivals, group) for group in range(len(memory))]
        self._sent = FileTier("--prefill-url", taken, memory, COPYING, abreast)
        self._mover, self._loans = mover, list[Loan]()  # the last one is used, others come to their end
        self._url, self._secret = config.prefill_url or "", config.kv_transfer_secret or ""
        self._told, self._rank, self._room = told, rank, room
        self._borrows = config.kv_transfer_backend == "auto"
        self._asked: list[Asked] = []
        self._numbers = itertools.count(1)
        self._links: tuple[Link, Link] | None = None  # for questions, and for units
        self._closing = threading.Event()
        self._lost = threading.Event()
        try:
            self._connect()
        except OSError as error:
            log.warning("--prefill-url %s: %s; prompts are read here until it answers", self._url, error)
            self._lost.set()
        except PeerRefused as error:
            raise ConfigError(f"--prefill-url {self._url}: {error}", param="prefill_url") from error
        self._thread = threading.Thread(target=self._keep_connected, name="kv-prefill", daemon=True)
        self._thread.start()

    # --- the connection

    def _connect(self) -> None:
        """Raises OSError and PeerRefused."""
        parts = urlsplit(self._url)
        host, port = parts.hostname or "", parts.port or 0
        asking, ports = connect(host, port, self._secret, self._told)
        try:
            most = max(self._arrivals.nbytes)
            units, _ = connect(host, ports[self._rank], self._secret, self._told, most)
        except BaseException:
            asking.close()
            raise
        links = self._link(asking), self._link(units)
        with self._guard:
            self._links = links
            self._lost.clear()
        for link in links:
            link.begin()

    def _link(self, channel: Channel) -> Link:
        link = Link(channel, self._take, lambda: self._gone(link))
        return link

    def _gone(self, link: Link) -> None:
        """What was asked for ends with what has come."""
        with self._guard:
            if self._links is None or link not in self._links:
                return
            links, self._links = self._links, None
            self._arrivals.forget()
            for asked in self._asked:
                if asked.sent:
                    asked.done = asked.done or Done(asked.number)
                    asked.lacking.clear()
            self._lost.set()
        for other in links:
            other.close()
        if not self._closing.is_set():
            log.warning("--prefill-url %s is gone; prompts are read here until it answers", self._url)

    def _keep_connected(self) -> None:
        refused = ""
        while not self._closing.is_set():
            self._lost.wait()
            if self._closing.wait(AGAIN):
                return
            try:
                self._connect()
                log.warning("--prefill-url %s answers", self._url)
            except OSError:
                continue
            except PeerRefused as error:
                if str(error) != refused:
                    refused = str(error)
                    log.error("--prefill-url %s: %s; prompts are read here", self._url, refused)

    def _take(self, message: Message, beside: Beside) -> None:
        now = clock.now()
        with self._guard:
            if isinstance(message, Lent):
                self._borrow(message)
            elif isinstance(message, Unit):
                name = message.group, message.key
                waiting = [asked for asked in self._asked if name in asked.lacking]
                if waiting and (message.place >= 0 or len(beside) == self._arrivals.nbytes[message.group]):
                    self._arrivals.put(name, Arrived(beside, message, now))
                for asked in waiting:
                    asked.lacking.discard(name)
                    asked.moved = now
            elif isinstance(message, Done):
                for asked in self._asked:
                    if asked.number == message.number:
                        asked.done, asked.moved = message, now
        if isinstance(message, Done) and message.error:
            self._sent.warn("be computed by the prefill server", OSError(message.error))

    def _borrow(self, lent: Lent) -> None:
        nbytes = self._arrivals.nbytes
        if not self._borrows or self._links is None or not len(lent.fds) == len(lent.units) == len(nbytes):
            return
        self._loans = [loan for loan in self._loans if loan.under_way]
        found = [
            borrow(lent.pid, fd, lent.token, units, n) for fd, units, n in zip(lent.fds, lent.units, nbytes)
        ]
        segments = [segment for segment in found if segment is not None]
        if self._loans or len(segments) < len(found):
            return
        try:
            self._loans = [Loan(segments, self._mover(segments))]
        except RuntimeError as error:  # of pages that cannot be locked
            log.warning("--prefill-url: its memory cannot be read (%s); units are sent", error)
            return
        self._links[1].post(Borrowed())

    # --- copies

    @property
    def _sources(self) -> list[FileTier | Loan]:
        return [self._sent, *self._loans]

    @property
    def under_way(self) -> bool:
        return bool(self._asked) or any(source.under_way for source in self._sources)

    def begin(self, copy: Copy) -> None:
        parted = [[keys[at : at + KEY] for at in range(0, len(keys), KEY)] for keys in copy.keys]
        names = [[(g, key) for key in keys] for g, keys in enumerate(parted)]
        if copy.target:
            self._load(copy, names)
            return
        nbytes = sum(len(keys) * size for keys, size in zip(parted, self._arrivals.nbytes))
        with self._guard:
            self._asked.append(Asked(copy, next(self._numbers), names, set(), nbytes, clock.now()))
        self._send()

    def _load(self, copy: Copy, names: list[list[Name]]) -> None:
        with self._guard:
            lent = self._arrivals.lent(names)
            loan = self._loans[-1] if self._loans else None
        if lent is None or loan is None:
            self._sent.begin(copy)
        else:
            loan.begin(copy, lent)

    def _send(self) -> None:
        """Ask for what there is room for, in its order."""
        with self._guard:
            for asked in [asked for asked in self._asked if not asked.sent]:
                if self._links is None or asked.nbytes > self._room:
                    asked.sent, asked.done = True, Done(asked.number)
                    continue
                taken = sum(other.nbytes for other in self._asked if other.sent and other.done is None)
                if taken + asked.nbytes > self._room:
                    return
                self._ask(asked, *self._links)

    def _ask(self, asked: Asked, asking: Link, units: Link) -> None:
        wanted = set[Name]().union(*(other.lacking for other in self._asked))
        lacking = [[name for name in names if name not in self._arrivals] for names in asked.names]
        asked.sent, asked.moved, asked.lacking = True, clock.now(), set[Name]().union(*lacking)
        units.post(Want([b"".join(key for g, key in names if (g, key) not in wanted) for names in lacking]))
        asking.post(Ask(asked.number, asked.copy.namespace, asked.copy.tokens))

    def ended(self) -> list[Moved]:
        ended = [moved for source in self._sources for moved in source.ended()]
        if not self._asked:
            return ended
        now = clock.now()
        with self._guard:
            over = [asked for asked in self._asked if asked.sent and self._over(asked, now)]
            self._asked = [asked for asked in self._asked if asked not in over]
            self._arrivals.purge(now - KEPT)
        for asked in over:
            self._abandon(asked)
            ended.append(self._moved(asked))
        if over:
            self._send()
        return ended

    def _moved(self, asked: Asked) -> Moved:
        """Nothing is of use of a prompt that the server could not compute: its logits may be no numbers."""
        done = asked.done or Done(asked.number)
        usable = not done.error
        with self._guard:
            there = [bytes(usable and name in self._arrivals for name in names) for names in asked.names]
        return Moved(asked.copy.transfer, ok=usable, there=there, cached=done.cached)

    def _over(self, asked: Asked, now: float) -> bool:
        if asked.done is None:
            return now - asked.moved > PATIENCE
        return not asked.lacking or bool(asked.done.error) or now - asked.moved > STALLED

    def _abandon(self, asked: Asked) -> None:
        """Nobody waits for what has not come."""
        with self._guard:
            links = self._links
            left = asked.lacking.difference(*(other.lacking for other in self._asked))
        if links is None or (not left and asked.done is not None):
            return
        links[0].post(Leave(asked.number))
        keys = [b"".join(key for g, key in left if g == group) for group in range(len(self._arrivals.nbytes))]
        links[1].post(Want(keys, drop=True))

    def close(self) -> None:
        self._closing.set()
        self._lost.set()
        self._thread.join()
        for link in self._links or ():
            link.close()
        for source in self._sources:
            source.close()

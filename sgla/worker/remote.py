"""A prefill server as a tier: it is asked for a prompt, and its units come while it computes.

Nothing that goes wrong here is an error of a request: what has not come is computed by this server.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgla import clock
from sgla.config import Config
from sgla.messages import Copy, Moved, keys_in
from sgla.peers import (
    SILENCE,
    Ask,
    Beside,
    Borrowed,
    Channel,
    Done,
    Exposed,
    Leave,
    Lent,
    Link,
    Message,
    Placed,
    Reconnecting,
    Unit,
    Want,
    connect,
)
from sgla.worker.arrivals import Arrivals, Arrived, Borrows, Name, Taken
from sgla.worker.lent import Lending, Mover, Segment
from sgla.worker.parts import Fit
from sgla.worker.state import column
from sgla.worker.tiers import PATIENCE, FileTier, Source, UnitMemory
from sgla.worker.transfer import FarSegment, TransferEngine

log = logging.getLogger(__name__)

STALLED = 2.0  # seconds without a unit after the prompt has been computed
KEPT = 30.0  # seconds for which a unit that nobody has taken is kept
COPYING = 4  # threads


@dataclass(slots=True, eq=False)
class Asked:
    """A prompt that the prefill server is asked for. ``sent``: it knows; ``moved``: when something came."""

    copy: Copy
    number: int
    keys: list[list[bytes]]  # of each cache group
    lacking: set[Name]
    moved: float
    sent: bool = False
    done: Done | None = None
    dropped: bool = False  # nobody wants it any more


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
        # Whether it was overwritten shows when it has come, so nothing is told of before.
        self._copies[copy.transfer] = msgspec.structs.replace(copy, sources=places, slack=0.0)
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


def units_of(placed: Placed) -> Iterator[Unit]:
    places, marks = np.frombuffer(placed.places, np.int32), np.frombuffer(placed.marks, np.int64)
    for key, place, mark in zip(keys_in(placed.keys), places.tolist(), marks.tolist()):
        yield Unit(placed.group, key, place=place, mark=mark)


class Links(NamedTuple):
    """For questions, and for units of each rank that is read."""

    asking: Link
    units: list[Link]


class RemoteTier:
    """``mover``: what copies from memory that a prefill server on this host lends by its ``lending``.
    ``room``: bytes of prompts that may be under way, while others wait for their turn, and of units that may
    wait to be taken; where units stay with the prefill server, what it has for one prompt, and half of it for
    several. ``fit``: what a rank here reads of a server with so many ranks; raises PeerRefused if it can read
    none of it.
    ``engine``: what reads the memory of servers on other hosts; without it units are sent."""

    def __init__(
        self,
        config: Config,
        told: dict[str, str],
        memory: Sequence[UnitMemory],
        mover: Mover,
        lending: Lending,
        fit: Callable[[int], Fit],
        room: int,
        abreast: int,
        engine: TransferEngine | None = None,
    ) -> None:
        """Raises ConfigError if the prefill server is there and is another one."""
        self._fit, self._arrivals = fit, Arrivals(fit(config.tp), room)
        self._guard = self._arrivals.lock
        taken = [Taken(self._arrivals, group) for group in range(len(memory))]
        self._sent = FileTier("--prefill-url", taken, memory, COPYING, abreast)
        self._mover, self._lending = mover, lending
        self._loans = list[Loan]()  # the last one is used, others come to their end
        self._segments: dict[int, Sequence[Borrows]] = {}  # that were borrowed, by their source
        self._url, self._secret = config.prefill_url or "", config.kv_transfer_secret or ""
        self._told, self._room, self._groups = told, room, len(memory)
        self._borrows = config.kv_transfer_backend in ("auto", "cuda_ipc")
        self._engine = engine
        self._asked: list[Asked] = []
        self._numbers = itertools.count(1)
        self._links: Links | None = None
        self._server = Reconnecting(
            "--prefill-url", self._url, "prompts are read here", self._connect, log, "kv-prefill"
        )
        self._server.begin()

    # --- the connection

    def _connect(self) -> None:
        """Raises OSError and PeerRefused."""
        parts = urlsplit(self._url)
        host, port = parts.hostname or "", parts.port or 0
        asking, ports = connect(host, port, self._secret, self._told)
        asking.trust(0, silence=SILENCE)
        channels = [asking]
        try:
            fit = self._fit(len(ports))
            for source, nbytes in zip(fit.sources, fit.nbytes):
                channels.append(connect(host, ports[source], self._secret, self._told, max(nbytes))[0])
        except BaseException:
            for channel in channels:
                channel.close()
            raise
        first, *others = [self._link(channel, source) for source, channel in enumerate(channels, -1)]
        with self._guard:
            if fit.sources != self._arrivals.fit.sources or fit.nbytes != self._arrivals.fit.nbytes:
                self._arrivals.suit(fit)
            self._segments.clear()
            self._links = Links(first, others)
        for link in (first, *others):
            link.begin()

    def _link(self, channel: Channel, source: int) -> Link:
        link = Link(channel, partial(self._take, source), lambda: self._gone(link))
        return link

    def _gone(self, link: Link) -> None:
        """What was asked for ends with what has come."""
        with self._guard:
            if self._links is None or link not in (self._links.asking, *self._links.units):
                return
            links, self._links = self._links, None
            self._arrivals.forget()
            for asked in self._asked:
                if asked.sent:
                    asked.done = asked.done or Done(asked.number)
                    asked.lacking.clear()
        for other in (links.asking, *links.units):
            other.close()
        self._server.lost()

    def _take(self, source: int, message: Message, beside: Beside) -> None:
        """``source``: the one that it comes from, -1 where questions are asked."""
        now = clock.now()
        with self._guard:
            if isinstance(message, Lent):
                self._borrow(source, message)
            elif isinstance(message, Exposed):
                self._meet(source, message)
            elif isinstance(message, Unit):
                self._arrive(source, Arrived(beside, message, now))
            elif isinstance(message, Placed):
                for unit in units_of(message):
                    self._arrive(source, Arrived(b"", unit, now))
            elif isinstance(message, Done):
                for asked in self._asked:
                    if asked.number == message.number:
                        asked.done, asked.moved = message, now
        if isinstance(message, Done) and message.error:
            self._sent.warn("be computed by the prefill server", OSError(message.error))

    def _arrive(self, source: int, arrived: Arrived) -> None:
        told = arrived.told
        name = source, told.group, told.key
        waiting = [asked for asked in self._asked if name in asked.lacking]
        if waiting and told.place >= 0:
            segments = self._segments.get(source)
            if segments and told.place < segments[told.group].count:
                self._arrivals.put(name, arrived._replace(segment=segments[told.group]))
        elif waiting and len(arrived.data) == self._arrivals.fit.nbytes[source][told.group]:
            self._arrivals.put(name, arrived)
        for asked in waiting:
            asked.lacking.discard(name)
            asked.moved = arrived.came

    def _borrow(self, source: int, lent: Lent) -> None:
        if not self._borrows or self._links is None or source < 0:
            return
        fit = self._arrivals.fit
        nbytes = fit.nbytes[source]
        handles = len(lent.handles) or len(nbytes)
        if not len(lent.fds) == len(lent.units) == len(nbytes) == handles:
            return
        try:
            found = [self._lending.borrow(lent, group, n) for group, n in enumerate(nbytes)]
        except RuntimeError as error:  # of GPUs that no link joins
            self._sent.warn("be read, and is sent", OSError(str(error)))
            return
        segments = [segment for segment in found if segment is not None]
        if len(segments) < len(found) or (fit.whole and not self._lend(segments)):
            return
        self._segments[source] = segments
        self._links.units[source].post(Borrowed())

    def _meet(self, source: int, exposed: Exposed) -> None:
        if self._engine is None or self._links is None or source < 0:
            return
        nbytes = self._arrivals.fit.nbytes[source]
        if not len(exposed.addresses) == len(exposed.units) == len(nbytes):
            return
        try:
            theirs = self._engine.meet(source, exposed.engine)
        except OSError as error:
            self._sent.warn("be read, and is sent", error)
            return
        places = zip(exposed.addresses, exposed.units, nbytes)
        self._segments[source] = [FarSegment(self._engine, theirs, *place) for place in places]
        self._links.units[source].post(Borrowed())

    def _lend(self, segments: list[Segment]) -> bool:
        """Have the mover copy from them, where units lie as they do here."""
        self._loans = [loan for loan in self._loans if loan.under_way]
        if self._loans:
            return False
        try:
            self._loans = [Loan(segments, self._mover(segments))]
        except RuntimeError as error:  # of pages that cannot be locked
            log.warning("--prefill-url: its memory cannot be read (%s); units are sent", error)
            return False
        return True

    # --- copies

    @property
    def _sources(self) -> list[FileTier | Loan]:
        return [self._sent, *self._loans]

    @property
    def under_way(self) -> bool:
        return bool(self._asked) or any(source.under_way for source in self._sources)

    def begin(self, copy: Copy) -> None:
        parted = [keys_in(keys) for keys in copy.keys]
        if copy.target:
            self._load(copy, parted)
            return
        with self._guard:
            self._asked.append(Asked(copy, next(self._numbers), parted, set(), clock.now()))
        self._send()

    def _load(self, copy: Copy, keys: list[list[bytes]]) -> None:
        with self._guard:
            loan = self._loans[-1] if self._loans else None
            lent = None if loan is None else self._arrivals.lent(keys)
        if lent is None or loan is None:
            self._sent.begin(copy)
        else:
            loan.begin(copy, lent)

    def _send(self) -> None:
        """Ask for what there is room for, in its order."""
        with self._guard:
            for asked in [asked for asked in self._asked if not asked.sent]:
                nbytes, (alone, together) = self._nbytes(asked), self._most
                if self._links is None or nbytes > alone:
                    asked.sent, asked.done = True, Done(asked.number)
                    continue
                taken = sum(self._nbytes(other) for other in self._asked if other.sent and not other.done)
                if taken and taken + nbytes > together:
                    return
                self._ask(asked, self._links)

    @property
    def _most(self) -> tuple[int, int]:
        """Bytes of a prompt, and of several, that may be under way."""
        if self._links is None or len(self._segments) < len(self._links.units):
            return self._room, self._room
        nbytes = self._arrivals.fit.nbytes
        lent = [
            sum((segment.count - 1) * n for segment, n in zip(self._segments[source], sizes))
            for source, sizes in enumerate(nbytes)
        ]
        return sum(lent), sum(lent) // 2

    def _nbytes(self, asked: Asked) -> int:
        return self._arrivals.nbytes([len(keys) for keys in asked.keys])

    def _ask(self, asked: Asked, links: Links) -> None:
        wanted = set[Name]().union(*(other.lacking for other in self._asked))
        names = [
            name for g, keys in enumerate(asked.keys) for key in keys for name in self._arrivals.names(g, key)
        ]
        lacking = [name for name in names if name not in self._arrivals]
        asked.sent, asked.moved, asked.lacking = True, clock.now(), set(lacking)
        self._want(links, [name for name in lacking if name not in wanted])
        links.asking.post(Ask(asked.number, asked.copy.namespace, asked.copy.tokens))

    def _want(self, links: Links, names: Sequence[Name], drop: bool = False) -> None:
        for source, link in enumerate(links.units):
            own = [(g, key) for from_, g, key in names if from_ == source]
            keys = [b"".join(key for g, key in own if g == group) for group in range(self._groups)]
            link.post(Want(keys, drop))

    def drop(self, transfer: int) -> None:
        for asked in self._asked:
            asked.dropped |= asked.copy.transfer == transfer
        self._sent.drop(transfer)

    def ended(self) -> list[Moved]:
        ended = [moved for source in self._sources for moved in source.ended()]
        if not self._asked:
            return ended
        now = clock.now()
        with self._guard:
            over = [
                asked for asked in self._asked if asked.dropped or (asked.sent and self._over(asked, now))
            ]
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
            there = [
                bytes(usable and self._arrivals.has(g, key) for key in keys)
                for g, keys in enumerate(asked.keys)
            ]
        return Moved(asked.copy.transfer, ok=usable, there=there, cached=done.cached)

    def _over(self, asked: Asked, now: float) -> bool:
        if asked.dropped or not asked.sent:
            return asked.dropped
        if asked.done is None:
            return now - asked.moved > PATIENCE
        return not asked.lacking or bool(asked.done.error) or now - asked.moved > STALLED

    def _abandon(self, asked: Asked) -> None:
        """Nobody waits for what has not come."""
        with self._guard:
            links = self._links
            left = asked.lacking.difference(*(other.lacking for other in self._asked))
        if links is None or not asked.sent or (not left and asked.done is not None):
            return
        links.asking.post(Leave(asked.number))
        self._want(links, list(left), drop=True)

    def close(self) -> None:
        self._server.close()
        links = self._links
        for link in () if links is None else (links.asking, *links.units):
            link.close()
        for source in self._sources:
            source.close()
        if self._engine is not None:
            self._engine.close()

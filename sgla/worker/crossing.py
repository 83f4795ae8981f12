"""How copies between a GPU and memory beside it are queued, and how far they have got."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sgla import clock
from sgla.worker.device_state import upload
from sgla.worker.state import Int32s

AHEAD = 4  # pieces that are queued
SHARE = 0.018  # of the time of decode steps, which copies beside them may take
PASSED = 4  # pieces of the other direction that go before one that waits for its turn beside steps
ROWS = 256  # rows that cross in one call, which takes the host 0.7 to 1 us for each
TURN = 2e-4  # seconds after which no other piece is queued before the worker has looked at its steps again
LATE = 5e-4  # seconds by which the worker may look late without what crosses beside steps being less
MARGIN = 1.25  # by how much longer than so far a copy may take
# Seconds that a step has to take that begins before all is there: it is no graph, and the host takes 20 to 35
# ms to launch it. A briefer one ends sooner as a graph that begins then.
LAUNCH = 0.02


@dataclass(eq=False, slots=True)
class Crossing:
    """A copy that is under way, of ``total`` bytes in chunks, of which those of layers that are computed
    first go first: a *band* is what crosses of some layers. ``firsts``: bytes of the first band; ``ends``:
    of each band that is queued as a whole; ``slack``: see ``Copy``; ``units``: of each cache group;
    ``behind``: what has to be over before."""

    transfer: int
    slack: float = 0.0
    units: list[Int32s] = field(default_factory=list)
    behind: list[Crossing] = field(default_factory=list)
    total: int = 0
    firsts: int = 0
    done: int = 0
    begun: float = 0.0  # when the first chunk was queued, without the times for which a link was kept idle
    ends: list[torch.cuda.Event] = field(default_factory=list)
    bands: int = 0
    told: bool = False
    index: Tensor | None = None  # units of all chunks, on the GPU
    queued: int = 0  # of these

    @property
    def over(self) -> bool:
        return self.done == self.total

    @property
    def may_be_told(self) -> bool:
        """A step of ``slack`` seconds that begins now finds each layer there when it comes to it."""
        if self.over or self.slack < LAUNCH or self.done < max(1, self.firsts):
            return self.over
        left = (clock.now() - self.begun) * (self.total - self.done) / self.done
        return left * MARGIN <= self.slack * (self.bands - 1) / self.bands


class Chunk(NamedTuple):
    """Units of a section (see ``HostTier``) that cross together, and their places beside the cache.
    ``width``: bytes of a unit; ``rows``: those of it that may cross one by one, 0: it is always staged;
    ``long``: so many units follow each other that these are; ``never_staged``: even more do; ``closes``: it
    is the last of its band."""

    section: int
    units: Int32s
    places: Int32s
    width: int
    rows: int
    long: bool
    never_staged: bool
    closes: bool

    @property
    def nbytes(self) -> int:
        """One at least, though it may be empty."""
        return max(1, len(self.units) * self.width)

    def parted(self, count: int) -> tuple[Chunk, Chunk]:
        """Its first units, and the others."""
        first = self._replace(units=self.units[:count], places=self.places[:count], closes=False)
        return first, self._replace(units=self.units[count:], places=self.places[count:])


class Queued(NamedTuple):
    """``nbytes`` that have crossed once ``end`` has passed; ``toll``: seconds that decode steps beside them
    lose."""

    crossing: Crossing
    end: torch.cuda.Event
    nbytes: int
    toll: float


class Route(NamedTuple):
    """What copies a chunk, whose units an index on the GPU names, in one direction: into what is staged, and
    out of it; or ``rows`` of units without that, which takes more of the host's time and less of the GPU's
    memory's. ``toll``, ``rows_toll``: seconds that decode steps lose for a byte."""

    begin: Callable[[Chunk, Tensor, Tensor], None]
    end: Callable[[Chunk, Tensor, Tensor], None]
    toll: float
    rows: Callable[[Chunk], None]
    rows_toll: float


class Step(Protocol):
    """One that has been launched."""

    @property
    def begin(self) -> torch.cuda.Event: ...
    @property
    def done(self) -> bool: ...


class Toll:
    """What copies take from decode steps beside them, which wait for the same memory: while some run, chunks
    are queued so far apart that it is ``SHARE`` of their time at most. A lane that waits for that goes before
    one that has had its turn often meanwhile."""

    def __init__(self) -> None:
        self._steps: list[Step] = []  # that were on their way when the latest was launched
        self._latest: Step | None = None  # of all
        self._paid = 0.0  # until when nothing more may be queued
        self._passed: dict[object, int] = {}  # lanes that wait, and pieces of others that have gone meanwhile

    def beside(self, step: Step) -> None:
        """Decode rows alone have been launched."""
        self._steps = [*self._running(), step]

    def launched(self, step: Step) -> None:
        """Of any kind."""
        self._latest = step

    @property
    def busy(self) -> bool:
        """Some step is on its way."""
        return self._latest is not None and not self._latest.done

    @property
    def runs(self) -> bool:
        """A decode step is on its way."""
        return bool(self._running())

    def _running(self) -> list[Step]:
        return [step for step in self._steps if not step.done]

    def due(self, lane: object, begin: torch.cuda.Event) -> bool:
        """The lane may queue nothing now that is to come behind ``begin``."""
        steps = self._running()
        if steps and not begin.query():
            return True  # or all that is queued meanwhile comes at once
        if not any(step.begin.query() for step in steps):
            return False
        self._passed.setdefault(lane, 0)
        late = any(passed >= PASSED for other, passed in self._passed.items() if other is not lane)
        return late or self._paid > clock.now()

    def take(self, lane: object, seconds: float, before: float = 0.0) -> None:
        """For what the lane has queued now. ``before``: for what else of it has not crossed, which is paid
        for already beside steps, and is all that is to be paid for besides when some begin."""
        self._passed.pop(lane, None)
        self._passed = {other: passed + 1 for other, passed in self._passed.items()}
        now = clock.now()
        each, all_of_it = max(self._paid, now - LATE) + seconds / SHARE, now + (before + seconds) / SHARE
        self._paid = max(self._paid, min(each, all_of_it))


class Lane:
    """Copies of one direction, on streams of their own, behind the steps that had been launched when each was
    told of: one fills what is staged, the other one empties it, so that a link is never idle but for the
    ``toll``. A few chunks are queued at a time, so that to queue much does not hold up steps. ``staging``:
    uint8[HALVES, STAGED]"""

    def __init__(self, staging: Tensor, route: Route, toll: Toll) -> None:
        self._halves: deque[tuple[Tensor, torch.cuda.Event | None]] = deque((half, None) for half in staging)
        self._first, self._second = torch.cuda.Stream(), torch.cuda.Stream()
        self._waiting: deque[tuple[Chunk, torch.cuda.Event, Crossing]] = deque()
        self._queued: deque[Queued] = deque()
        self._route, self._toll = route, toll
        self._idle = 0.0  # since when a toll has kept the link so

    @property
    def under_way(self) -> bool:
        return bool(self._waiting or self._queued)

    def add(self, crossing: Crossing, chunks: Sequence[Chunk]) -> None:
        """``chunks``: at least one. Their units go to the GPU at once, so that nothing small lies between
        pieces on a link."""
        begin = torch.cuda.Event()
        begin.record()
        with torch.cuda.stream(self._first):
            crossing.index = upload(np.concatenate([chunk.units for chunk in chunks])).long()
        self._waiting += ((chunk, begin, crossing) for chunk in chunks)

    def go_on(self) -> list[Crossing]:
        """Queue what is next. Returns those that may be told of since the last call, in their order."""
        told = []
        while self._queued and self._queued[0].end.query():
            crossing, _, nbytes, _ = self._queued.popleft()
            crossing.done += nbytes
            if not crossing.told and crossing.may_be_told:
                crossing.told = True
                told.append(crossing)
        end = clock.now() + TURN
        while self._waiting and len(self._queued) < AHEAD:
            if not all(crossing.over for crossing in self._waiting[0][2].behind):
                break
            if self._toll.due(self, self._waiting[0][1]):
                self._idle = self._idle or (0.0 if self._queued else clock.now())
                break
            self._queue()
            if clock.now() > end:
                break
        return told

    def queue(self, crossing: Crossing, band: int) -> torch.cuda.Event:
        """Of its first bands up to this one; what ends when they have crossed."""
        band = min(band, crossing.bands - 1)
        while len(crossing.ends) <= band:
            self._queue(hurries=True)
        return crossing.ends[band]

    def _queue(self, hurries: bool = False) -> None:
        """The next chunk. Beside decode steps it is fewer units, whose rows cross one by one, where they may,
        and long ones beside others, too: what is staged waits for a kernel. Not where a step ``hurries``, for
        which that is too slow, unless it is ``never_staged``."""
        chunk, begin, crossing = self._waiting.popleft()
        runs = self._toll.runs
        apart = bool(chunk.rows) and not hurries and (runs or (chunk.long and self._toll.busy))
        by_rows = apart or chunk.never_staged
        if apart and runs and len(chunk.units) > (count := max(1, ROWS // chunk.rows)):
            chunk, rest = chunk.parted(count)
            self._waiting.appendleft((rest, begin, crossing))
        assert crossing.index is not None
        index = crossing.index[crossing.queued : crossing.queued + len(chunk.units)]
        crossing.queued += len(index)
        now = clock.now()
        if not crossing.begun:
            crossing.begun = now
        elif self._idle:
            crossing.begun += now - self._idle
        self._idle = 0.0
        end = self._cross(chunk, begin) if by_rows else self._stage(chunk, begin, index)
        if chunk.closes:
            crossing.ends.append(end)
        toll = chunk.nbytes * (self._route.rows_toll if by_rows else self._route.toll)
        self._toll.take(self, toll, before=sum(queued.toll for queued in self._queued))
        self._queued.append(Queued(crossing, end, chunk.nbytes, toll))

    def _cross(self, chunk: Chunk, begin: torch.cuda.Event) -> torch.cuda.Event:
        end = torch.cuda.Event()
        with torch.cuda.stream(self._second):
            self._second.wait_event(begin)
            self._route.rows(chunk)
            end.record()
        return end

    def _stage(self, chunk: Chunk, begin: torch.cuda.Event, index: Tensor) -> torch.cuda.Event:
        half, empty = self._halves.popleft()
        full, end = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(self._first):
            self._first.wait_event(begin)
            if empty is not None:
                self._first.wait_event(empty)
            self._route.begin(chunk, index, half)
            full.record()
        with torch.cuda.stream(self._second):
            self._second.wait_event(full)
            self._route.end(chunk, index, half)
            end.record()
        self._halves.append((half, end))
        return end

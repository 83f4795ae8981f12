"""What the prefix tree loses on a GPU: a tier in the host's memory, and what tiers of files need."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.errors import OutOfMemory
from sgla.messages import CacheGroup, Copy, Moved, Tier
from sgla.worker.device_state import upload
from sgla.worker.gpu_lent import GpuSegment
from sgla.worker.lent import Segment
from sgla.worker.memory import available_bytes, mib, tier_units
from sgla.worker.pinned import Pinned
from sgla.worker.state import Int32s, column

STAGED = 32 << 20  # bytes that are gathered on the GPU and cross in one piece
HALVES = 2  # of what is staged in each direction: one is filled while the other is emptied
AHEAD = 4  # pieces that are queued
ABREAST = 8  # units of a copy that threads read or write at a time


def staging() -> Tensor:
    """Where what crosses is gathered, for both directions: uint8[2, HALVES, STAGED]"""
    return torch.empty(2, HALVES, STAGED, dtype=torch.uint8, device="cuda")


class Room(Protocol):
    """Units beside the cache: ``bytes`` uint8[*], pinned or on a GPU."""

    @property
    def bytes(self) -> Tensor: ...


class Chunk(NamedTuple):
    """Units of a group that cross together, and their places beside the cache. ``last`` of a transfer."""

    group: int
    units: Int32s
    places: Int32s
    transfer: int
    last: bool


class Queued(NamedTuple):
    """A chunk that has crossed once ``end`` has passed, and what has to be there until then."""

    chunk: Chunk
    end: torch.cuda.Event
    made: list[Tensor]


class Route(NamedTuple):
    """What copies a chunk in one direction: into what is staged, and out of it. ``begin`` returns what
    ``end`` has to know."""

    begin: Callable[[Chunk, Tensor], list[Tensor]]
    end: Callable[[Chunk, Tensor, list[Tensor]], None]


class Lane:
    """Copies of one direction, on streams of their own, behind the steps that had been launched when each was
    told of: one fills what is staged, the other one empties it, so that a link is never idle. A few chunks
    are queued at a time, so that to queue much does not hold up steps. ``staging``: uint8[HALVES, STAGED]"""

    def __init__(self, staging: Tensor) -> None:
        self._halves: deque[tuple[Tensor, torch.cuda.Event | None]] = deque((half, None) for half in staging)
        self._first, self._second = torch.cuda.Stream(), torch.cuda.Stream()
        self._waiting: deque[tuple[Chunk, torch.cuda.Event]] = deque()
        self._queued: deque[Queued] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._waiting or self._queued)

    def add(self, chunks: Iterable[Chunk]) -> None:
        begin = torch.cuda.Event()
        begin.record()
        self._waiting += ((chunk, begin) for chunk in chunks)

    def go_on(self, route: Route) -> list[int]:
        """Queue what is next. Returns the transfers that have ended since the last call."""
        ended = []
        while self._queued and self._queued[0].end.query():
            chunk = self._queued.popleft().chunk
            ended += [chunk.transfer] if chunk.last else []
        while self._waiting and len(self._queued) < AHEAD:
            self._queued.append(self._queue(*self._waiting.popleft(), route))
        return ended

    def _queue(self, chunk: Chunk, begin: torch.cuda.Event, route: Route) -> Queued:
        half, empty = self._halves.popleft()
        full, end = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(self._first):
            self._first.wait_event(begin)
            if empty is not None:
                self._first.wait_event(empty)
            made = route.begin(chunk, half)
            full.record()
        with torch.cuda.stream(self._second):
            self._second.wait_event(full)
            route.end(chunk, half, made)
            end.record()
        self._halves.append((half, end))
        return Queued(chunk, end, made)


class HostTier:
    """``memory``: of each cache group, on the device (``kv.memory_of``); ``rooms``: of each, room for units
    whose numbers begin with 1, as a rule in the host's memory. What a unit holds in all layers lies together
    there. What is loaded does not wait for what is saved."""

    def __init__(self, memory: Sequence[Sequence[Tensor]], rooms: Sequence[Room], staging: Tensor) -> None:
        """``staging``: uint8[2, HALVES, STAGED]"""
        self._memory = [_joined(_wide(tensors)) for tensors in memory]
        self._rooms = rooms  # which keep their memory
        flat = [room.bytes.flatten() for room in rooms]
        widths = [_width(tensors) for tensors in memory]
        self._beside = [
            beside[: len(beside) // max(1, width) * width].view(-1, width)
            for beside, width in zip(flat, widths)
        ]
        self._in, self._out = Lane(staging[0]), Lane(staging[1])
        self._inward, self._outward = (
            Route(self._cross_in, self._scatter),
            Route(self._gather, self._cross_out),
        )

    @property
    def under_way(self) -> bool:
        return self._in.under_way or self._out.under_way

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""
        inward = copy.target == "device"
        units, places = (copy.targets, copy.sources) if inward else (copy.sources, copy.targets)
        parts = list(self._parted([column(u) for u in units], [column(p) for p in places]))
        chunks = [
            Chunk(*part, copy.transfer, last)
            for last, part in zip([*[False] * (len(parts) - 1), True], parts)
        ]
        (self._in if inward else self._out).add(chunks)

    def _parted(
        self, units: Sequence[Int32s], places: Sequence[Int32s]
    ) -> Iterator[tuple[int, Int32s, Int32s]]:
        """At least one part, which may be empty."""
        some = False
        for g, (here, there) in enumerate(zip(units, places)):
            width = self._beside[g].shape[1]
            most = max(1, STAGED // width) if width else 0
            for at in range(0, len(here) if most else 0, most):
                some = True
                yield g, here[at : at + most], there[at : at + most]
        if not some:
            yield 0, units[0][:0], places[0][:0]

    def _cross_in(self, chunk: Chunk, half: Tensor) -> list[Tensor]:
        if (rows := self._staged(chunk, half)) is None:
            return []
        index = upload(chunk.units).long()
        beside, places = self._beside[chunk.group], chunk.places.tolist()
        for first, count, place in _runs(places):
            rows[first : first + count].copy_(beside[place : place + count], non_blocking=True)
        return [index]

    def _scatter(self, chunk: Chunk, half: Tensor, made: list[Tensor]) -> None:
        if (rows := self._staged(chunk, half)) is None:
            self._direct(chunk, True)
            return
        for tensor, part in zip(self._memory[chunk.group], self._parts(chunk.group, rows)):
            tensor.index_copy_(0, made[0], part)

    def _gather(self, chunk: Chunk, half: Tensor) -> list[Tensor]:
        if (rows := self._staged(chunk, half)) is None:
            return []
        index = upload(chunk.units).long()
        for tensor, part in zip(self._memory[chunk.group], self._parts(chunk.group, rows)):
            torch.index_select(tensor, 0, index, out=part)
        return []

    def _cross_out(self, chunk: Chunk, half: Tensor, made: list[Tensor]) -> None:
        if (rows := self._staged(chunk, half)) is None:
            self._direct(chunk, False)
            return
        beside = self._beside[chunk.group]
        for first, count, place in _runs(chunk.places.tolist()):
            beside[place : place + count].copy_(rows[first : first + count], non_blocking=True)

    def _staged(self, chunk: Chunk, half: Tensor) -> Tensor | None:
        """Room for the chunk's units, uint8[n, bytes of a unit]; None: they are too large for it, or none."""
        width = self._beside[chunk.group].shape[1]
        if width > len(half) or not len(chunk.units):
            return None
        return half[: len(chunk.units) * width].view(len(chunk.units), width)

    def _direct(self, chunk: Chunk, inward: bool) -> None:
        """Units that are large: each part crosses by itself."""
        g = chunk.group
        for unit, place in zip(chunk.units.tolist(), chunk.places.tolist()):
            for tensor, part in zip(self._memory[g], self._parts(g, self._beside[g][place : place + 1])):
                for here, there in zip(tensor[unit], part[0]):
                    ends = (here, there) if inward else (there, here)
                    ends[0].copy_(ends[1], non_blocking=True)

    def _parts(self, g: int, rows: Tensor) -> list[Tensor]:
        return parts_of(rows, self._memory[g])

    def drop(self, transfer: int) -> None: ...

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call."""
        done = self._in.go_on(self._inward) + self._out.go_on(self._outward)
        return [Moved(transfer, ok=True) for transfer in done]

    def close(self) -> None: ...


def open_host(
    config: Config,
    ranks: int,
    groups: Sequence[CacheGroup],
    tensors: Sequence[Sequence[Tensor]],
    staging: Tensor,
) -> tuple[Tier, HostTier]:
    """The tier of ``--kv-host-bytes``, of which each of ``ranks`` has its part, or of ``--kv-host-ratio``.
    ``tensors``: of each cache group (``kv.memory_of``); ``staging``: see ``HostTier``. Raises OutOfMemory."""
    nbytes, pages = [_width(found) for found in tensors], [group.pages for group in groups]
    param, flag = "kv_host_bytes", f"--kv-host-bytes {config.kv_host_bytes}"
    if config.kv_host_bytes is not None:
        room = config.kv_host_bytes // ranks
    else:
        param, flag = "kv_host_ratio", f"--kv-host-ratio {config.kv_host_ratio}"
        room = int((config.kv_host_ratio or 0) * sum(map(mul, nbytes, pages)))
    units = tier_units(room, pages, nbytes)
    if not all(units):
        raise OutOfMemory(f"{flag} has no room for one page; raise it, or leave it out", param=param)
    if room > (there := available_bytes()) > 0:
        raise OutOfMemory(
            f"{flag} takes {mib(room)} of the host's memory, and {mib(there)} are there; lower it",
            param=param,
        )
    try:
        host = [Pinned(max(1, (count + 1) * n)) for count, n in zip(units, nbytes)]
        return Tier("host", units), HostTier(tensors, host, staging)
    except RuntimeError as error:  # of pages that cannot be locked
        raise OutOfMemory(
            f"the host's memory ran out while {mib(room)} for prefixes were taken ({error}); lower "
            f"--{param.replace('_', '-')}",
            param=param,
        ) from error


def by_lanes(
    tensors: Sequence[Sequence[Tensor]],
    staging: Tensor | None,
    begin_thread: Callable[[], None],
    segments: Sequence[Segment],
) -> HostTier:
    """A ``lent.Mover``, made in any thread: see ``HostTier`` and ``GpuMemory``."""
    assert staging is not None
    begin_thread()
    rooms = [s if isinstance(s, GpuSegment) else Pinned(memory=s.whole, begin=s.begin) for s in segments]
    return HostTier(tensors, rooms, staging)


def _width(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.shape[1] for tensor in tensors)


def parts_of(rows: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of uint8[n, bytes of a unit]: those of each tensor [units, parts, width]."""
    parts, at = [], 0
    for tensor in tensors:
        width = tensor.shape[1] * tensor.shape[2] * tensor.itemsize
        parts.append(rows[:, at : at + width].view(tensor.dtype).view(len(rows), *tensor.shape[1:]))
        at += width
    return parts


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """Places that follow each other cross together: the first of them, their count, and where they begin."""
    begun = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield begun, i - begun, places[begun]
            begun = i


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Eight bytes at a time, which GPUs copy faster than single ones, where all widths allow it."""
    wide = all(tensor.shape[1] % 8 == 0 for tensor in tensors)
    return [tensor.view(torch.int64) if wide else tensor for tensor in tensors]


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """``[units, parts, width]``: tensors of one width that follow each other in memory at the same distance,
    as those of all layers do, become parts of one, which one kernel reads or writes."""
    made: list[Tensor] = []
    for run in _even(tensors):
        first, gap = run[0], 0
        if len(run) > 1:
            gap = (run[1].data_ptr() - first.data_ptr()) // first.itemsize
        made.append(first.as_strided((len(first), len(run), first.shape[1]), (first.stride(0), gap, 1)))
    return made


def _even(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    run: list[Tensor] = []
    for tensor in tensors:
        if run and _follows(tensor, run):
            run.append(tensor)
            continue
        if run:
            yield run
        run = [tensor]
    if run:
        yield run


def _follows(tensor: Tensor, run: list[Tensor]) -> bool:
    last = run[-1]
    gap = tensor.data_ptr() - last.data_ptr()
    before = last.data_ptr() - run[-2].data_ptr() if len(run) > 1 else gap
    same = tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and gap == before > 0 and (tensor.shape, tensor.stride()) == (last.shape, last.stride())


class GpuMemory:
    """Units of one cache group, ``nbytes`` each, for threads that bring them to files and back."""

    def __init__(self, tensors: Sequence[Tensor], begin_thread: Callable[[], None]) -> None:
        """``tensors``: see ``HostTier``; ``begin_thread``: of one that uses the GPU."""
        self._tensors, self._begin = _joined(_wide(tensors)), begin_thread
        self.nbytes = sum(tensor.shape[1] for tensor in tensors)
        self._own = threading.local()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    @torch.inference_mode()
    def read(self, unit: int) -> bytes:
        with self._row() as (row, parts):
            for tensor, part in zip(self._tensors, parts):
                part.copy_(tensor[unit], non_blocking=True)
        return row.numpy().tobytes()

    @torch.inference_mode()
    def write(self, unit: int, data: bytes | memoryview) -> None:
        with self._row() as (row, parts):
            row.numpy()[:] = np.frombuffer(data, np.uint8)
            for tensor, part in zip(self._tensors, parts):
                tensor[unit].copy_(part, non_blocking=True)

    @contextmanager
    def _row(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """This thread's room for a unit, on the host, and its parts; what is done with it is done then."""
        own = self._own
        if not hasattr(own, "stream"):
            self._begin()
            own.stream = torch.cuda.Stream()
            own.row = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(own.stream):
            yield own.row, [part[0] for part in parts_of(own.row[None], self._tensors)]
        own.stream.synchronize()

"""What the prefix tree loses on a GPU: a tier in the host's memory, and what tiers of files need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import mul
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.errors import OutOfMemory
from sgla.messages import CacheGroup, Copy, Moved, StepPlan, Tier
from sgla.worker.crossing import Chunk, Crossing, Lane, Route, Toll
from sgla.worker.gpu_lent import GpuSegment
from sgla.worker.lent import Segment
from sgla.worker.memory import available_bytes, mib, tier_units
from sgla.worker.pinned import Pinned
from sgla.worker.rows import Int64s, copy_rows, in_batches
from sgla.worker.state import Int32s, column
from sgla.worker.tiers import Rows, runs_of

STAGED = 32 << 20  # bytes that are gathered on the GPU and cross in one piece
HALVES = 2  # of what is staged in each direction: one is filled while the other is emptied
# Seconds that decode steps lose for a byte that comes beside them, and for one that leaves. Staged, it passes
# the GPU's memory three times, in rows that cross by themselves once; what is written costs more than what is
# read.
TOLL_IN, TOLL_OUT = 2.1e-12, 1.0e-12
ROWS_IN, ROWS_OUT = 0.95e-12, 0.3e-12
ROW = 16 << 10  # bytes of a unit in each tensor from which on that does not take the host too long
LONG = 64 << 10  # bytes of a row, on average, from which on rows need not be staged beside prompts
# And from which on they never are: to queue a piece that is staged takes the host 0.25 to 0.5 of the 0.6 ms
# in which it crosses, and such rows no longer.
NEVER_STAGED = 256 << 10
PIECE = 128 << 20  # bytes that come in one piece then, so that a host that is slow for a while is never late
BANDS = 6  # parts of the layers that cross one after the other, so that a step may begin with the first
ABREAST = 8  # threads that read or write units of a copy
BATCH = 16 << 20  # bytes of units that each takes at a time: with every call it waits for the interpreter


def staging() -> Tensor:
    """Where what crosses is gathered, for both directions: uint8[2, HALVES, STAGED]"""
    return torch.empty(2, HALVES, STAGED, dtype=torch.uint8, device="cuda")


class Room(Protocol):
    """Units beside the cache: ``bytes`` uint8[*], pinned or on a GPU."""

    @property
    def bytes(self) -> Tensor: ...


class Parts(NamedTuple):
    """What a unit holds of each tensor, int64: its ``width`` in bytes, the ``address`` of that of unit 0 and
    how far ``apart`` those of others are; the address of that of place 0 ``beside`` the device, and how far
    apart those are of other places (``far``). ``joins``: nothing lies between on either side."""

    width: Int64s
    address: Int64s
    apart: Int64s
    beside: Int64s
    far: Int64s
    joins: bool

    def rows(self, units: Int32s, places: Int32s) -> tuple[Int64s, Int64s, Int64s]:
        """Addresses on the device and beside it, and bytes, of what crosses as one, of at least one unit:
        that of units which follow each other on both sides is, if it ``joins``."""
        firsts = self._firsts(units, places)
        counts = np.diff(firsts, append=len(units))
        here = self.address + units[firsts, None].astype(np.int64) * self.apart
        there = self.beside + places[firsts, None].astype(np.int64) * self.far
        return here.ravel(), there.ravel(), (counts[:, None] * self.width).ravel()

    def mean(self, units: Int32s, places: Int32s) -> float:
        """Bytes of one of the ``rows``."""
        return float(self.width.mean()) * len(units) / len(self._firsts(units, places))

    def _firsts(self, units: Int32s, places: Int32s) -> Int64s:
        """Where each of the ``rows`` of a tensor begins."""
        if not self.joins:
            return np.arange(len(units))
        return np.flatnonzero(np.append(True, (np.diff(units) != 1) | (np.diff(places) != 1)))

    def staged(self, half: Tensor, places: Int32s) -> tuple[Int64s, Int64s, Int64s]:
        """As ``rows``, where what is staged lies as beside the device: tensor by tensor."""
        address = half.data_ptr() + len(places) * (self.width.cumsum() - self.width)
        units = np.arange(len(places), dtype=np.int32)
        return self._replace(address=address, apart=self.width, joins=True).rows(units, places)


class Section(NamedTuple):
    """What crosses of some layers of a cache group: ``memory`` on the device, ``beside`` uint8[places, bytes
    of a unit]; ``parts``: where both lie, if rows may cross by themselves. ``split``: there, and where it is
    staged, not what a unit holds lies together, but what all hold of a tensor."""

    group: int
    band: int
    memory: list[Tensor]
    beside: Tensor
    parts: Parts | None
    split: bool

    def mean_row(self, units: Int32s, places: Int32s) -> float:
        """Bytes of one that crosses by itself, on average; 0.0: there are none."""
        return self.parts.mean(units, places) if self.parts is not None and len(units) else 0.0


class HostTier:
    """``memory``: of each cache group, on the device (``kv.memory_of``); ``rooms``: of each, room for units
    whose numbers begin with 1, as a rule in the host's memory. What a unit holds in all layers lies together
    there, or in those of each of ``bands``, which cross one after the other; with ``split``, where rows may
    cross by themselves, what units hold of each tensor, so that those which follow each other are one row.
    What is loaded does not wait for what is saved.

    A copy to the device that has ``slack`` is told of before it ends. From then on steps may read its units:
    who launches one asks ``awaited`` whether it does, and has it wait for its layers."""

    def __init__(
        self,
        memory: Sequence[Sequence[Tensor]],
        rooms: Sequence[Room],
        staging: Tensor,
        bands: int = 1,
        split: bool = False,
    ) -> None:
        """``staging``: uint8[2, HALVES, STAGED]"""
        self._rooms = rooms  # which keep their memory
        self._band_of: dict[int, int] = {}  # of the layers whose tensors lie there
        sections = []
        for group, (tensors, room) in enumerate(zip(memory, rooms)):
            flat, width = room.bytes.flatten(), _width(tensors)
            places, at = len(flat) // max(1, width), 0
            for band in range(bands):
                own = tensors[len(tensors) * band // bands : len(tensors) * (band + 1) // bands]
                self._band_of |= {tensor.data_ptr(): band for tensor in own}
                size = places * _width(own)
                beside = flat[at : at + size].view(places, _width(own))
                parts, joined = _parts(own, beside, split), _joined(_wide(own))
                sections.append(Section(group, band, joined, beside, parts, split and parts is not None))
                at += size
        self._sections = sorted(sections, key=lambda section: section.band)
        self.toll = Toll()
        inward = Route(self._cross_in, self._scatter, TOLL_IN, partial(self._rows, inward=True), ROWS_IN)
        outward = Route(self._gather, self._cross_out, TOLL_OUT, partial(self._rows, inward=False), ROWS_OUT)
        self._in, self._out = Lane(staging[0], inward, self.toll), Lane(staging[1], outward, self.toll)
        self._early: list[Crossing] = []  # that have been told of, and that no step has waited for
        self._unended: list[Crossing] = []  # that have been told of

    @property
    def under_way(self) -> bool:
        return self._in.under_way or self._out.under_way

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""
        inward = copy.target == "device"
        units, places = (copy.targets, copy.sources) if inward else (copy.sources, copy.targets)
        here, there = [column(u) for u in units], [column(p) for p in places]
        # What leaves may be of units that are still to come, or go to places that are still read.
        behind = [] if inward else list(self._unended)
        crossing = Crossing(copy.transfer, copy.slack, here, behind)
        chunks = list(self._parted(here, there, PIECE if inward else STAGED))
        crossing.bands = sum(chunk.closes for chunk in chunks)
        crossing.total = sum(chunk.nbytes for chunk in chunks)
        first = next(i for i, chunk in enumerate(chunks) if chunk.closes)
        crossing.firsts = sum(chunk.nbytes for chunk in chunks[: first + 1])
        (self._in if inward else self._out).add(crossing, chunks)

    def _parted(self, units: Sequence[Int32s], places: Sequence[Int32s], piece: int) -> Iterator[Chunk]:
        """At least one, which may be empty. Places that follow each other cross at once. ``piece``: bytes of
        what is never staged."""
        orders = [np.argsort(there, kind="stable") for there in places]
        ends = [(here[order], there[order]) for here, there, order in zip(units, places, orders)]
        parts = list[tuple[int, Int32s, Int32s, bool]]()
        for number, section in enumerate(self._sections):
            (here, there), width = ends[section.group], section.beside.shape[1]
            never_staged = section.mean_row(here, there) >= NEVER_STAGED
            most = max(1, (piece if never_staged else STAGED) // max(1, width))
            for at in range(0, len(here) if width else 0, most):
                parts.append((number, here[at : at + most], there[at : at + most], never_staged))
        parts = parts or [(0, units[0][:0], places[0][:0], False)]
        bands = [self._sections[number].band for number, *_ in parts]
        for (number, here, there, never_staged), band, after in zip(parts, bands, [*bands[1:], -1]):
            section = self._sections[number]
            rows = 0 if section.parts is None or not len(here) else len(section.parts.width)
            is_long, width = section.mean_row(here, there) >= LONG, section.beside.shape[1]
            yield Chunk(number, here, there, width, rows, is_long, never_staged, closes=band != after)

    def awaited(self, plan: StepPlan) -> list[Crossing]:
        """Those told of that have units which the step reads or writes: what its new rows have, or others
        get."""
        if not self._early:
            return []
        touched: list[list[Int32s]] = [[] for _ in self._early[0].units]
        for columns in (plan.page_ids, plan.zeroed, *(new.pages for new in plan.new)):
            for group, ids in zip(touched, columns):
                group.append(column(ids))
        touched[-1] += [column(plan.state_reads)[1::2], column(plan.checkpoints)[1::3]]
        units = [np.concatenate(found) if found else column(b"") for found in touched]
        return [crossing for crossing in self._early if _meet(crossing, units)]

    def wait(self, crossings: Sequence[Crossing], kept: Sequence[Tensor] = ()) -> None:
        """Have the current stream wait until what a layer keeps has come; or for all of these copies: then
        nothing that is launched later has to."""
        bands = [band for x in kept if (band := self._band_of.get(x.data_ptr())) is not None]
        if kept and not bands:
            return
        band = max(bands, default=len(self._sections))
        for crossing in crossings:
            torch.cuda.current_stream().wait_event(self._in.queue(crossing, band))
        if not kept:
            self._early = [crossing for crossing in self._early if crossing not in crossings]

    def settle(self) -> None:
        """All that is launched from now on comes behind what has been told of."""
        self.wait(self._early)

    def settle_for(self, copies: Sequence[Copy]) -> None:
        """``settle`` what ``copies`` of other tiers read or write. Those of this one know by themselves."""
        for copy in copies if self._early else ():
            units = copy.targets if copy.target == "device" else copy.sources
            if "host" not in (copy.source, copy.target) and "device" in (copy.source, copy.target):
                self.wait([c for c in self._early if _meet(c, [column(u) for u in units])])

    def _cross_in(self, chunk: Chunk, index: Tensor, half: Tensor) -> None:
        if self._fits(chunk, half):
            self._cross(chunk, half, True)

    def _scatter(self, chunk: Chunk, index: Tensor, half: Tensor) -> None:
        if not self._fits(chunk, half):
            self._direct(chunk, True)
            return
        for tensor, part in self._pairs(chunk, half):
            tensor.index_copy_(0, index, part)

    def _gather(self, chunk: Chunk, index: Tensor, half: Tensor) -> None:
        if not self._fits(chunk, half):
            return
        for tensor, part in self._pairs(chunk, half):
            torch.index_select(tensor, 0, index, out=part)

    def _cross_out(self, chunk: Chunk, index: Tensor, half: Tensor) -> None:
        if self._fits(chunk, half):
            self._cross(chunk, half, False)
        else:
            self._direct(chunk, False)

    def _cross(self, chunk: Chunk, half: Tensor, inward: bool) -> None:
        """Between where it is staged and its places beside the device."""
        section = self._sections[chunk.section]
        if section.split and section.parts is not None:
            _copy_rows(section.parts.staged(half, chunk.places), inward)
            return
        rows = _rows_of(half, section, len(chunk.units))
        for first, count, place in runs_of(chunk.places.tolist()):
            _copy(rows[first : first + count], section.beside[place : place + count], inward)

    def _rows(self, chunk: Chunk, inward: bool) -> None:
        """Between the device and beside it, at once."""
        parts = self._sections[chunk.section].parts
        assert parts is not None
        _copy_rows(parts.rows(chunk.units, chunk.places), inward)

    def _fits(self, chunk: Chunk, half: Tensor) -> bool:
        """There are units, and room for them where they are staged."""
        return len(chunk.units) > 0 and self._sections[chunk.section].beside.shape[1] <= len(half)

    def _direct(self, chunk: Chunk, inward: bool) -> None:
        """Units that are large: each part crosses by itself."""
        section = self._sections[chunk.section]
        if section.split and len(chunk.units):
            self._rows(chunk, inward)
            return
        for unit, place in zip(chunk.units.tolist(), chunk.places.tolist()):
            beside = parts_of(section.beside[place : place + 1], section.memory)
            for tensor, part in zip(section.memory, beside):
                for here, there in zip(tensor[unit], part[0]):
                    _copy(here, there, inward)

    def _pairs(self, chunk: Chunk, half: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Memory on the device, and what is staged of it, as ``[n, parts, width]``."""
        section, n = self._sections[chunk.section], len(chunk.units)
        if not section.split:
            return zip(section.memory, parts_of(_rows_of(half, section, n), section.memory))
        return zip(section.memory, split_of(half, section.memory, n))

    def drop(self, transfer: int) -> None: ...

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call, or whose layers will be there when a step comes to
        them."""
        come = self._in.go_on()
        told = [crossing for crossing in come if not crossing.over]
        self._early = [crossing for crossing in self._early + told if not crossing.over]
        self._unended = [crossing for crossing in self._unended + told if not crossing.over]
        return [Moved(crossing.transfer, ok=True) for crossing in come + self._out.go_on()]

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
        return Tier("host", units), HostTier(tensors, host, staging, BANDS, split=True)
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


def split_of(staged: Tensor, tensors: Sequence[Tensor], n: int) -> list[Tensor]:
    """``parts_of``, where what ``n`` units hold of each part lies together."""
    parts, at = [], 0
    for tensor in tensors:
        _, count, width = tensor.shape
        size = n * count * width * tensor.itemsize
        parts.append(staged[at : at + size].view(tensor.dtype).view(count, n, width).transpose(0, 1))
        at += size
    return parts


def _copy(here: Tensor, there: Tensor, inward: bool) -> None:
    target, source = (here, there) if inward else (there, here)
    target.copy_(source, non_blocking=True)


def _copy_rows(rows: tuple[Int64s, Int64s, Int64s], inward: bool) -> None:
    """``rows``: as ``Parts.rows`` has them."""
    here, there, sizes = rows
    target, source = (here, there) if inward else (there, here)
    copy_rows(target, source, sizes)


def _rows_of(half: Tensor, section: Section, n: int) -> Tensor:
    """Room for ``n`` units: uint8[n, bytes of a unit]"""
    width = section.beside.shape[1]
    return half[: n * width].view(n, width)


def _meet(crossing: Crossing, units: Sequence[Int32s]) -> bool:
    """Whether some of ``units`` of each cache group are to come."""
    return any(bool(np.isin(own, coming).any()) for own, coming in zip(units, crossing.units))


def _parts(tensors: Sequence[Tensor], beside: Tensor, split: bool) -> Parts | None:
    """``tensors``: uint8[units, bytes]. None: they cannot cross row by row, or not without harm."""
    width, address, apart = (
        np.array([(x.shape[1], x.data_ptr(), x.stride(0)) for x in tensors], np.int64).reshape(-1, 3).T
    )
    if beside.is_cuda or not in_batches() or width.min(initial=ROW) < ROW:
        return None
    places, unit = beside.shape
    first = beside.data_ptr() + (width.cumsum() - width) * (places if split else 1)
    far = width if split else np.full_like(width, unit)
    return Parts(width, address, apart, first, far, split and np.array_equal(apart, width))


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


def batch_of(nbytes: int) -> int:
    """Units of so many bytes that a thread takes at a time."""
    return max(1, BATCH // max(1, nbytes))


def thread_bytes(widths: Sequence[int]) -> int:
    """Of the GPU, and as many of the host's memory, that the threads of a tier of files take at most, where
    units of the cache groups have such ``widths``."""
    return ABREAST * sum(batch_of(nbytes) * nbytes for nbytes in widths)


class UnitRoom(NamedTuple):
    """A thread's: room for units in pinned memory, ``rows``, and on the GPU, ``staged`` uint8[batch, bytes of
    a unit]; which they are, int64[batch]; and what they cross by."""

    rows: Rows
    pinned: Tensor
    staged: Tensor
    units: Tensor
    numbers: Tensor
    stream: torch.cuda.Stream


class GpuMemory:
    """Units of one cache group, ``nbytes`` each, for threads that bring them to files and back."""

    def __init__(self, tensors: Sequence[Tensor], begin_thread: Callable[[], None]) -> None:
        """``tensors``: see ``HostTier``; ``begin_thread``: of one that uses the GPU."""
        self._tensors, self._begin = _joined(_wide(tensors)), begin_thread
        self.nbytes = sum(tensor.shape[1] for tensor in tensors)
        self.batch = batch_of(self.nbytes)
        self._own = threading.local()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def room(self, count: int) -> Rows:
        return self._room().rows[:count]

    @torch.inference_mode()
    def read(self, units: Sequence[int]) -> Rows:
        room, count = self._room(), len(units)
        with self._indexed(room, units) as index:
            for tensor, part in zip(self._tensors, parts_of(room.staged[:count], self._tensors)):
                torch.index_select(tensor, 0, index, out=part)
            room.pinned[:count].copy_(room.staged[:count], non_blocking=True)
        return room.rows[:count]

    @torch.inference_mode()
    def write(self, units: Sequence[int], rows: Rows) -> None:
        """``rows``: this thread's room, or others."""
        room, count = self._room(), len(units)
        if rows.ctypes.data != room.rows.ctypes.data:
            room.rows[:count] = rows
        with self._indexed(room, units) as index:
            room.staged[:count].copy_(room.pinned[:count], non_blocking=True)
            for tensor, part in zip(self._tensors, parts_of(room.staged[:count], self._tensors)):
                tensor.index_copy_(0, index, part)

    @contextmanager
    def _indexed(self, room: UnitRoom, units: Sequence[int]) -> Iterator[Tensor]:
        """The units' numbers on the GPU; what is launched meanwhile is done then."""
        index = room.numbers[: len(units)]
        room.units[: len(units)] = torch.tensor(units)
        with torch.cuda.stream(room.stream):
            index.copy_(room.units[: len(units)], non_blocking=True)
            yield index
        room.stream.synchronize()

    def _room(self) -> UnitRoom:
        if not hasattr(self._own, "room"):
            self._begin()
            stream = torch.cuda.Stream()
            pinned = torch.empty(self.batch, self.nbytes, dtype=torch.uint8, pin_memory=True)
            units = torch.empty(self.batch, dtype=torch.int64, pin_memory=True)
            with torch.cuda.stream(stream):  # what steps have given up may still be written to on theirs
                staged = torch.empty(pinned.shape, dtype=torch.uint8, device="cuda")
                index = torch.empty(units.shape, dtype=torch.int64, device="cuda")
            self._own.room = UnitRoom(pinned.numpy(), pinned, staged, units, index, stream)
        room: UnitRoom = self._own.room
        return room

"""What the prefix tree loses on a GPU: a tier in the host's memory, and what tiers of files need."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.errors import OutOfMemory
from sgla.messages import CacheGroup, Copy, Moved, Tier
from sgla.worker.device_state import upload
from sgla.worker.lent import Segment
from sgla.worker.memory import mib, tier_units
from sgla.worker.pinned import Pinned
from sgla.worker.state import Int32s, column

STAGED = 32 << 20  # bytes that are gathered on the GPU and cross in one piece, in each direction
AHEAD = 3  # pieces that are queued
ABREAST = 8  # units of a copy that threads read or write at a time


def staging() -> Tensor:
    """Where what crosses is gathered, for both directions: uint8[2, STAGED]"""
    return torch.empty(2, STAGED, dtype=torch.uint8, device="cuda")


class Chunk(NamedTuple):
    """Units of a group that cross together, and their places on the host. ``last`` of a transfer."""

    group: int
    units: Int32s
    places: Int32s
    transfer: int
    last: bool


class Lane:
    """Copies of one direction, on a stream of their own, behind the steps that had been launched when each
    was told of. A few chunks are queued at a time, so that to queue much does not hold up steps.
    ``staging``: uint8[STAGED]"""

    def __init__(self, staging: Tensor) -> None:
        self.staging = staging
        self._stream = torch.cuda.Stream()
        self._waiting: deque[tuple[Chunk, torch.cuda.Event]] = deque()
        self._queued: deque[tuple[Chunk, torch.cuda.Event]] = deque()

    @property
    def under_way(self) -> bool:
        return bool(self._waiting or self._queued)

    def add(self, chunks: Iterable[Chunk]) -> None:
        begin = torch.cuda.Event()
        begin.record()
        self._waiting += ((chunk, begin) for chunk in chunks)

    def go_on(self, copy: Callable[[Chunk, Tensor], None]) -> list[int]:
        """Queue what is next. Returns the transfers that have ended since the last call."""
        ended = []
        while self._queued and self._queued[0][1].query():
            chunk, _ = self._queued.popleft()
            ended += [chunk.transfer] if chunk.last else []
        while self._waiting and len(self._queued) < AHEAD:
            chunk, begin = self._waiting.popleft()
            end = torch.cuda.Event()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(begin)
                copy(chunk, self.staging)
                end.record()
            self._queued.append((chunk, end))
        return ended


class HostTier:
    """``memory``: of each cache group, on the device (``kv.memory_of``); ``host``: of each, room for units
    whose numbers begin with 1. What a unit holds in all layers lies together there. What is loaded does not
    wait for what is saved."""

    def __init__(self, memory: Sequence[Sequence[Tensor]], host: Sequence[Pinned], staging: Tensor) -> None:
        """``staging``: uint8[2, STAGED]"""
        self._memory = [_joined(_wide(tensors)) for tensors in memory]
        self._pinned = host
        widths = [_width(tensors) for tensors in memory]
        self._host = [
            pinned.bytes[: len(pinned.bytes) // max(1, width) * width].view(-1, width)
            for pinned, width in zip(host, widths)
        ]
        self._in, self._out = Lane(staging[0]), Lane(staging[1])

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
            width = self._host[g].shape[1]
            most = max(1, STAGED // width) if width else 0
            for at in range(0, len(here) if most else 0, most):
                some = True
                yield g, here[at : at + most], there[at : at + most]
        if not some:
            yield 0, units[0][:0], places[0][:0]

    def _load(self, chunk: Chunk, staging: Tensor) -> None:
        self._copy(chunk, staging, True)

    def _save(self, chunk: Chunk, staging: Tensor) -> None:
        self._copy(chunk, staging, False)

    def _copy(self, chunk: Chunk, staging: Tensor, inward: bool) -> None:
        if not len(chunk.units):
            return
        if self._host[chunk.group].shape[1] > len(staging):
            self._direct(chunk.group, chunk.units.tolist(), chunk.places.tolist(), inward)
        else:
            self._staged(chunk, staging, inward)

    def _direct(self, g: int, units: list[int], places: list[int], inward: bool) -> None:
        """Units that are large: each part crosses by itself."""
        for unit, place in zip(units, places):
            for tensor, part in zip(self._memory[g], self._parts(g, self._host[g][place : place + 1])):
                for here, there in zip(tensor[unit], part[0]):
                    ends = (here, there) if inward else (there, here)
                    ends[0].copy_(ends[1], non_blocking=True)

    def _staged(self, chunk: Chunk, staging: Tensor, inward: bool) -> None:
        host = self._host[chunk.group]
        index, there = upload(chunk.units).long(), chunk.places.tolist()
        rows = staging[: len(there) * host.shape[1]].view(len(there), host.shape[1])
        pairs = list(zip(self._memory[chunk.group], self._parts(chunk.group, rows)))
        if inward:
            for first, count, place in _runs(there):
                rows[first : first + count].copy_(host[place : place + count], non_blocking=True)
            for tensor, part in pairs:
                tensor.index_copy_(0, index, part)
        else:
            for tensor, part in pairs:
                torch.index_select(tensor, 0, index, out=part)
            for first, count, place in _runs(there):
                host[place : place + count].copy_(rows[first : first + count], non_blocking=True)

    def _parts(self, g: int, rows: Tensor) -> list[Tensor]:
        return parts_of(rows, self._memory[g])

    def drop(self, transfer: int) -> None: ...

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call."""
        done = self._in.go_on(self._load) + self._out.go_on(self._save)
        return [Moved(transfer, ok=True) for transfer in done]

    def close(self) -> None: ...


def open_host(
    config: Config,
    ranks: int,
    groups: Sequence[CacheGroup],
    tensors: Sequence[Sequence[Tensor]],
    staging: Tensor,
) -> tuple[Tier, HostTier]:
    """The tier of ``--kv-host-bytes``, of which each of ``ranks`` has its part. ``tensors``: of each cache
    group (``kv.memory_of``); ``staging``: see ``HostTier``. Raises OutOfMemory."""
    assert config.kv_host_bytes is not None
    nbytes = [_width(found) for found in tensors]
    room = config.kv_host_bytes // ranks
    units = tier_units(room, [group.pages for group in groups], nbytes)
    if not all(units):
        raise OutOfMemory(
            f"--kv-host-bytes {config.kv_host_bytes} has no room for one page; raise it, or leave it out",
            param="kv_host_bytes",
        )
    try:
        host = [Pinned(max(1, (count + 1) * n)) for count, n in zip(units, nbytes)]
        return Tier("host", units), HostTier(tensors, host, staging)
    except RuntimeError as error:  # of pages that cannot be locked
        raise OutOfMemory(
            f"the host's memory ran out while {mib(room)} for prefixes were taken ({error}); lower "
            "--kv-host-bytes",
            param="kv_host_bytes",
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
    return HostTier(tensors, [Pinned(memory=s.whole, begin=s.begin) for s in segments], staging)


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

"""Memory that goes and comes back at the same addresses, so that CUDA graphs, tensor maps and tables of
pointers stay right meanwhile.

CUDA's virtual memory management: an address range is reserved for good, and physical memory is mapped into
it. That is the driver's own interface, called through ctypes: torch's allocator can give memory back
(expandable segments, ``MemPool``) only where no tensor is left, and a hook into it would call Python while it
holds its lock.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from ctypes import byref, c_int, c_size_t, c_uint64
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.kernels.cuda.build import check, driver

ALIGNED = 512  # bytes, as torch has it
GROWN = 32 << 20  # bytes that a region grows by, at least
PIECE = 256 << 20  # that come back at a time: some are filled while others are mapped
LARGE = 4 << 30  # the same of memory that is not filled: fewer calls of the driver, of which each takes long
_VIRTUAL = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class VirtualMemory(Protocol):
    """Where a region has its addresses and its bytes. All raise RuntimeError."""

    granule: int  # of which sizes are multiples

    def reserve(self, size: int) -> int: ...

    def create(self, size: int) -> int:
        """A handle on new memory, whose bytes are not set. Any thread may call it."""
        ...

    def release(self, handle: int) -> None:
        """Give memory back that is mapped nowhere."""

    def map(self, at: int, size: int, handle: int) -> None: ...

    def unmap(self, at: int, size: int, handle: int) -> None: ...

    def free(self, at: int, size: int) -> None:
        """Of addresses where nothing is mapped."""

    def wait(self) -> None:
        """Until nothing that has been launched reads or writes it."""

    def view(self, at: int, size: int, owner: object) -> Tensor:
        """uint8[size], which keeps its ``owner``."""
        ...


_alive: weakref.WeakSet[Region] = weakref.WeakSet()


def let_go() -> None:
    """Free the regions of a runner before in this process: later it might be while graphs are captured."""
    if _alive:
        gc.collect()


class Piece(NamedTuple):
    at: int
    size: int
    handle: int


class Region:
    """Tensors behind each other. ``size``: bytes that are mapped, or were before they went."""

    def __init__(self, memory: VirtualMemory, limit: int, piece: int = PIECE) -> None:
        """``limit``: of addresses, which cost nothing; ``piece``: bytes that are mapped at a time, at the
        start as later, so that the driver has no more to do the first time. Raises RuntimeError."""
        self._memory, self._limit, self._piece = memory, _rounded(limit, memory.granule), piece
        self._base = memory.reserve(self._limit)
        self._pieces: list[Piece] = []
        self._used = self.size = 0
        given = memory, self._base, self._limit, self._pieces
        weakref.finalize(self, _free, *given).atexit = False
        _alive.add(self)

    @property
    def mapped(self) -> bool:
        return bool(self._pieces) or not self.size

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises RuntimeError."""
        count = prod(shape) * dtype.itemsize
        if not count:
            return torch.empty(*shape, dtype=dtype)
        start = _rounded(self._used, ALIGNED)
        if (missing := start + count - self.size) > 0:
            granule = self._memory.granule
            grown = _rounded(max(missing, min(GROWN, self._limit - self.size)), granule)
            list(self._grow(grown))
        self._used = start + count
        return self.part(start, start + count).view(dtype).view(*shape)

    def part(self, start: int, stop: int) -> Tensor:
        """uint8[stop - start]"""
        return self._memory.view(self._base + start, stop - start, self)

    def unmap(self) -> None:
        """Nobody reads or writes it any more. What is in it is lost."""
        _unmap(self._memory, self._pieces)

    def map(self) -> Iterator[tuple[int, int]]:
        """Where the parts that come back begin and end, each as soon as it is there, with anything in it.
        Raises RuntimeError; then nothing is mapped."""
        size, self.size = self.size, 0
        try:
            yield from self._grow(size)
        except BaseException:
            self.unmap()
            raise
        finally:
            self.size = size

    def _grow(self, by: int) -> Iterator[tuple[int, int]]:
        """Where each piece begins and ends that has been mapped behind what there is."""
        end = self.size + by
        bounds = [(start, min(start + self._piece, end)) for start in range(self.size, end, self._piece)]
        with closing(created(self._memory, [stop - start for start, stop in bounds])) as handles:
            for (start, stop), handle in zip(bounds, handles):
                at, size = self._base + start, stop - start
                try:
                    self._memory.map(at, size, handle)
                except RuntimeError:
                    self._memory.release(handle)
                    raise
                self._pieces.append(Piece(at, size, handle))
                self.size = stop
                yield start, stop


def created(memory: VirtualMemory, sizes: Sequence[int]) -> Generator[int]:
    """Handles on memory of these sizes. A thread has the next one while the caller maps one and fills it: the
    driver needs as long for the first as for the second. Raises RuntimeError."""
    if len(sizes) < 2:
        yield from map(memory.create, sizes)
        return
    with ThreadPoolExecutor(1, "gpu-memory") as thread:
        coming: Future[int] | None = thread.submit(memory.create, sizes[0])
        try:
            for size in (*sizes[1:], 0):
                assert coming is not None
                handle, coming = coming.result(), None
                if size:
                    coming = thread.submit(memory.create, size)
                yield handle
        finally:
            if coming is not None:
                with suppress(RuntimeError):
                    memory.release(coming.result())


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to


def _unmap(memory: VirtualMemory, pieces: list[Piece]) -> None:
    while pieces:
        memory.unmap(*pieces.pop())


def _free(memory: VirtualMemory, base: int, limit: int, pieces: list[Piece]) -> None:
    memory.wait()
    _unmap(memory, pieces)
    memory.free(base, limit)


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("number", c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("kind", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", c_uint64),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", c_int))


class CudaMemory:
    """Of the GPU ``number``."""

    def __init__(self, number: int) -> None:
        self._number, here = number, _Location(1, number)
        self._properties, self._access = _Properties(1, 0, here, None, 0), _Access(here, _READ_WRITE)
        granule = c_size_t()
        code = driver().cuMemGetAllocationGranularity(byref(granule), byref(self._properties), 0)
        check(code, "the granule of GPU memory")
        self.granule = granule.value

    def reserve(self, size: int) -> int:
        at = c_uint64()
        code = driver().cuMemAddressReserve(byref(at), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        check(code, f"{size} bytes of addresses")
        return at.value

    def create(self, size: int) -> int:
        torch.cuda.set_device(self._number)  # of this thread
        handle = c_uint64()
        code = driver().cuMemCreate(byref(handle), c_size_t(size), byref(self._properties), c_uint64(0))
        check(code, f"{size} bytes of GPU memory")
        return handle.value

    def release(self, handle: int) -> None:
        check(driver().cuMemRelease(c_uint64(handle)), "giving GPU memory back")

    def map(self, at: int, size: int, handle: int) -> None:
        place, count = c_uint64(at), c_size_t(size)
        code = driver().cuMemMap(place, count, c_size_t(0), c_uint64(handle), c_uint64(0))
        check(code, "mapping GPU memory")
        code = driver().cuMemSetAccess(place, count, byref(self._access), c_size_t(1))
        check(code, "access to GPU memory")

    def unmap(self, at: int, size: int, handle: int) -> None:
        check(driver().cuMemUnmap(c_uint64(at), c_size_t(size)), "unmapping GPU memory")
        self.release(handle)

    def free(self, at: int, size: int) -> None:
        check(driver().cuMemAddressFree(c_uint64(at), c_size_t(size)), "giving addresses back")

    def wait(self) -> None:
        torch.cuda.synchronize()

    def view(self, at: int, size: int, owner: object) -> Tensor:
        told = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 2}
        holder = SimpleNamespace(__cuda_array_interface__=told, owner=owner)
        return torch.as_tensor(holder, device="cuda")


@cache
def gpu_memory(number: int) -> VirtualMemory | None:
    """None: this GPU has memory at fixed addresses alone, as some virtual ones do."""
    has = c_int()
    check(driver().cuDeviceGetAttribute(byref(has), _VIRTUAL, number), "what the GPU can do")
    return CudaMemory(number) if has.value else None

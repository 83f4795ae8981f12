"""Units in the memory of a GPU that a prefill server lends to decode servers of its host (CUDA IPC): these
copy them out of it by whatever joins their GPUs, over NVLink where there is one. Token and marks lie in the
host's memory, as in ``lent``."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint, c_uint64
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.cuda.build import check, driver
from sgla.peers import Lent
from sgla.worker.lent import Segment, shared, sharing

HANDLE = 64  # bytes: CU_IPC_HANDLE_SIZE
GRANULE = 2 << 20  # bytes: of such memory nothing is shared that belongs to others
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE),)


class GpuSegment(Segment):
    """``bytes`` uint8[units + 1, bytes of a unit], on a GPU that this process reaches; ``handle``: by which
    another one opens it."""

    def __init__(self, memory: mmap.mmap, fd: int | None, bytes_: Tensor, begin: Callable[[], None]) -> None:
        """``begin``: of a thread that uses the GPU."""
        super().__init__(memory, len(bytes_) - 1, 0, fd)
        self.bytes = bytes_
        self._begin, self._own = begin, threading.local()

    @torch.inference_mode()
    def content(self, place: int) -> NDArray[np.uint8]:
        own = self._own
        if not hasattr(own, "stream"):
            self._begin()
            own.stream = torch.cuda.Stream()
        with torch.cuda.stream(own.stream):
            found: NDArray[np.uint8] = self.bytes[place].cpu().numpy()
        return found


class GpuLending(NamedTuple):
    """``lent.Lending`` of a GPU's memory. ``begin``: of a thread that uses the GPU."""

    begin: Callable[[], None]

    def lend(self, units: int, nbytes: int, token: bytes) -> Segment:
        """Raises RuntimeError."""
        memory, fd = shared(units, 0, token)
        at, size = c_uint64(), -(-(units + 1) * nbytes // GRANULE) * GRANULE
        check(
            driver().cuMemAlloc_v2(byref(at), c_size_t(size)), f"{size} bytes of GPU memory for other servers"
        )
        segment = GpuSegment(memory, fd, _tensor(at.value, units, nbytes), self.begin)
        weakref.finalize(segment, _free, at.value).atexit = False
        handle = _Handle()
        check(driver().cuIpcGetMemHandle(byref(handle), at), "GPU memory for other servers")
        segment.handle = bytes(handle.reserved)
        return segment

    def borrow(self, lent: Lent, group: int, nbytes: int) -> Segment | None:
        """None as well where no way leads from GPU to GPU."""
        units = lent.units[group]
        memory = sharing(lent.pid, lent.fds[group], lent.token, units, 0)
        if memory is None or len(lent.handles[group]) != HANDLE:
            return None
        self.begin()
        torch.cuda.mem_get_info()  # the driver's calls want the context that this makes
        at, handle = c_uint64(), _Handle.from_buffer_copy(lent.handles[group])
        check(
            driver().cuIpcOpenMemHandle_v2(byref(at), handle, c_uint(_LAZY_PEER_ACCESS)),
            "reading the other server's GPU memory",
        )
        segment = GpuSegment(memory, None, _tensor(at.value, units, nbytes), self.begin)
        weakref.finalize(segment, _close, at.value).atexit = False
        return segment


def _tensor(at: int, units: int, nbytes: int) -> Tensor:
    """uint8[units + 1, nbytes]. Torch takes it for memory of this process's own GPU, which it can read as
    such, wherever it lies."""
    here = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(at, here, (units + 1) * nbytes)
    return torch.empty(0, dtype=torch.uint8, device=here).set_(storage).view(units + 1, nbytes)


def _free(at: int) -> None:
    torch.cuda.synchronize()
    driver().cuMemFree_v2(c_uint64(at))


def _close(at: int) -> None:
    torch.cuda.synchronize()
    driver().cuIpcCloseMemHandle(c_uint64(at))

"""Much memory of the host that a GPU copies from and to by itself."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from sgla.worker.region import PIECE

TOUCHERS = 8  # threads that have the system find pages


class Pinned:
    """``bytes`` uint8[size], in large pages if the system has them; or those of ``memory`` uint8[*], from
    ``begin`` on. Torch's allocator would take a power of two, and have the pages found one by one. Raises
    RuntimeError."""

    def __init__(self, size: int = 0, memory: NDArray[np.uint8] | None = None, begin: int = 0) -> None:
        if memory is None:
            whole = self._found(size)
        else:
            whole, size = torch.from_numpy(memory), len(memory)
        self.bytes, base = whole[begin:], whole.data_ptr()
        if error := int(torch.cuda.cudart().cudaHostRegister(base, size, 0)):
            raise RuntimeError(f"the host's memory cannot be pinned: CUDA error {error}")
        weakref.finalize(self, _unpin, base).atexit = False

    @staticmethod
    def _found(size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a system without
            memory.madvise(mmap.MADV_HUGEPAGE)
        found = torch.frombuffer(memory, dtype=torch.uint8)
        with ThreadPoolExecutor(TOUCHERS) as threads:
            list(threads.map(partial(_touch, found.data_ptr()), *zip(*pieces(size))))
        return found


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """Where they begin and end."""
    return ((start, min(size, start + PIECE)) for start in range(0, size, PIECE))


def _touch(base: int, start: int, stop: int) -> None:
    ctypes.memset(base + start, 0, stop - start)


def _unpin(pointer: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(pointer)

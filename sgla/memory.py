"""Memory that was freed goes back to the system:
glibc's allocator keeps it, hundreds of MB after one large request."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE = 4 << 20  # bytes of a block that is mapped by itself, and so goes back when it is freed
ARENAS = 4  # heaps that threads share

_libc = ctypes.CDLL(None)
CAN = hasattr(_libc, "malloc_trim")


def return_memory_early() -> None:
    """Have glibc return large blocks to the system as soon as they are freed, and keep few heaps.
    Call it once. Without it, glibc takes larger and larger blocks from its heaps."""
    if CAN:
        _libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        _libc.mallopt(M_TRIM_THRESHOLD, LARGE)
        _libc.mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return what was freed, some ms for each 100 MB; other threads of Python go on."""
    if CAN:
        _libc.malloc_trim(0)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")

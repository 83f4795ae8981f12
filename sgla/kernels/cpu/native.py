"""The C interface of the native CPU kernels:
structures (mirrors of csrc/cpu/program.h), library, thread team."""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.build import BuildError, Built, OnFile, build, find, level


class Opcode(IntEnum):
    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    ADD = 3
    LINEAR = 4
    ROPE_STORE = 5
    ATTENTION = 6
    ACT_MUL = 7
    GATHER = 8
    TO_BF16 = 9
    SELF_ATTENTION = 10
    LAYER_NORM = 11
    ACTIVATE = 12
    DRAW = 13
    CAUSAL_CONV = 14
    GATED_DELTA = 15
    SELECTIVE_SCAN = 16
    PYTHON = -1  # not an instruction: a call between native segments


class Instr(ctypes.Structure):
    _fields_ = (
        ("op", c_int32),
        ("sampled", c_int32),
        ("input", c_int64 * 2),
        ("output", c_int64 * 2),
        ("p", c_void_p * 5),
        ("n", c_int64),
        ("k", c_int64),
        ("a", c_int64 * 10),
        ("f", c_float * 4),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tokens", "rows", "sampled", "page_size", "max_pages", "table_size")),
        *(
            (name, c_void_p)
            for name in (
                "ids",
                "positions",
                "slots",
                "q_start",
                "kv_len",
                "out_loc",
                "page_table",
                "sample_rows",
            )
        ),
    )


class StateCall(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("a", "b", "c", "decay", "rate", "out", "units", "reads", "writes", "marks")
        ),
        *(
            (name, c_int64)
            for name in (
                *("a_stride", "b_stride", "c_stride", "marks_count"),
                *("heads", "group", "n", "k", "wide"),
            )
        ),
    )


DRAW = np.dtype(
    [
        ("row", np.int64),
        ("position", np.int64),
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("token", np.int64),
    ]
)


class Library:
    """The loaded kernels of one instruction-set level."""

    def __init__(self, path: Path) -> None:
        dll = ctypes.CDLL(str(path))
        dll.sgla_isa.restype = c_char_p
        dll.sgla_team.restype = c_void_p
        dll.sgla_team.argtypes = (ctypes.c_int,)
        dll.sgla_team_free.argtypes = (c_void_p,)
        dll.sgla_run.argtypes = (c_void_p, POINTER(Instr), c_int64, POINTER(Step), c_void_p)
        dll.sgla_pack.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p)
        dll.sgla_pack_fixed.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
        dll.sgla_draw.argtypes = (
            *(c_void_p, c_void_p, c_int64),
            *(c_double, c_int64, c_double, c_double),
            *(c_uint64, c_uint64),
        )
        self.dll = dll
        self.isa: str = dll.sgla_isa().decode()


class Team:
    """Threads that run programs together: the caller and ``threads - 1`` helpers, asleep between steps."""

    def __init__(self, lib: Library, threads: int) -> None:
        self.handle: int = lib.dll.sgla_team(threads)
        weakref.finalize(self, lib.dll.sgla_team_free, self.handle).atexit = False  # a thread may run


_FOUND: list[Built | BuildError] = []


def prepare(on_file: OnFile = lambda done, of: None) -> Built | BuildError:
    """The best library for this CPU, compiled now unless it is there: ``on_file`` hears of it."""
    if not _FOUND:
        try:
            _FOUND.append(find(on_file))
        except BuildError as error:
            _FOUND.append(error)
    return _FOUND[0]


@functools.cache
def _load(path: Path) -> Library:
    return Library(path)


def library(isa: str | None = None) -> Library:
    """The best library for this CPU (or of the named level), built on first use. Raises BuildError."""
    if isa is not None:
        return _load(build(level(isa)))
    found = prepare()
    if isinstance(found, BuildError):
        raise found
    return _load(found.path)


def note() -> str:
    """What became of the native kernels on this machine, for the start-up report."""
    found = prepare()
    return f"CPU kernels in torch (slow): {found}" if isinstance(found, BuildError) else found.note


SLAB = 64 << 20
HUGE = 2 << 20


class HugePages:
    """Zeroed memory on huge pages, carved from slabs; a slab lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8[nbytes], aligned to 64 bytes."""
        nbytes = -(-nbytes // 64) * 64
        if nbytes > self._slab.numel():
            self._slab = _map(max(SLAB, nbytes))
        taken, self._slab = self._slab[:nbytes], self._slab[nbytes:]
        return taken


def _map(nbytes: int) -> Tensor:
    size = -(-nbytes // HUGE) * HUGE + HUGE
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without transparent huge pages
            pass
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + nbytes]


memory = HugePages()

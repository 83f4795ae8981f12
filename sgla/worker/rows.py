"""Rows that cross between a GPU and pinned memory by the copy engine, many at a call: no kernel runs, and no
byte passes the GPU's memory but once."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgla.kernels.cuda.build import check, driver

Int64s = NDArray[np.int64]
_STREAM, _OVERLAP = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):  # CUmemcpyAttributes
    _fields_ = (("order", c_int), ("source", c_int * 2), ("target", c_int * 2), ("flags", c_uint))


@cache
def in_batches() -> bool:
    """Whether the driver takes many copies at a call: since CUDA 12.8."""
    try:
        driver().cuMemcpyBatchAsync  # noqa: B018
    except (AttributeError, OSError):
        return False
    return True


def copy_rows(targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
    """``sizes`` bytes each, from addresses to addresses, on the current stream, which is not the default
    one, where the driver takes ``in_batches``. Raises RuntimeError."""
    if not len(sizes):
        return
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    attributes, first, failed = _Attributes(order=_STREAM, flags=_OVERLAP), c_size_t(0), c_size_t(0)
    columns = [np.ascontiguousarray(column, np.int64) for column in (targets, sources, sizes)]
    given: list[Any] = [c_void_p(column.ctypes.data) for column in columns]
    given += [c_size_t(len(targets)), byref(attributes), byref(first), c_size_t(1)]
    check(driver().cuMemcpyBatchAsync(*given, byref(failed), stream), "copies beside steps")

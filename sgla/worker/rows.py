"""Rows that lie at equal distances in the memory of a GPU and of the host, copied by the copy engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from typing import NamedTuple

import torch

from sgla.kernels.cuda.build import check, driver

_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Copy(ctypes.Structure):  # CUDA_MEMCPY2D
    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_kind", c_uint),
        ("source_host", c_void_p),
        ("source_device", c_uint64),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("target_x", c_size_t),
        ("target_y", c_size_t),
        ("target_kind", c_uint),
        ("target_host", c_void_p),
        ("target_device", c_uint64),
        ("target_array", c_void_p),
        ("target_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Part(NamedTuple):
    """Rows of ``width`` bytes: the ``address`` of the first and the ``pitch`` by which others follow, on the
    GPU; where they begin ``within`` a row of the host's memory."""

    address: int
    pitch: int
    within: int
    width: int


def copy_rows(parts: Sequence[Part], first: int, count: int, host: int, pitch: int, inward: bool) -> None:
    """``count`` rows from the ``first`` on of each part, to or from whole rows at ``host``, an address of
    pinned memory, on the current stream; ``inward``: to the GPU. Raises RuntimeError."""
    made, call = _Copy(height=count), driver().cuMemcpy2DAsync_v2
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    if inward:
        made.source_kind, made.source_pitch, made.target_kind = _HOST, pitch, _DEVICE
        for address, apart, within, width in parts:
            made.source_host, made.target_device = host + within, address + first * apart
            made.target_pitch, made.width = apart, width
            check(call(byref(made), stream), "a copy to the GPU")
        return
    made.source_kind, made.target_kind, made.target_pitch = _DEVICE, _HOST, pitch
    for address, apart, within, width in parts:
        made.source_device, made.target_host = address + first * apart, host + within
        made.source_pitch, made.width = apart, width
        check(call(byref(made), stream), "a copy from the GPU")

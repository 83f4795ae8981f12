"""Launcher of ``act_mul.cu``."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel

KINDS = "silu", "gelu_tanh"
THREADS = 256


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("eights", ctypes.c_longlong),
        ("each", ctypes.c_int),
    )


@cache
def _kernel(tanh: bool) -> Kernel:
    return Kernel("act_mul.cu", "act_mul", {"GELU": int(tanh)})


def takes(x: Tensor, kind: str) -> bool:
    return x.dtype == torch.bfloat16 and x.shape[1] % 16 == 0 and x.is_contiguous() and kind in KINDS


def act_mul(x: Tensor, kind: str) -> Tensor:
    """``ops.act_mul`` of bf16 ``[m, 2 f]``, contiguous: the bits that products give which do it themselves,
    behind gate and up that they have rounded."""
    rows, f = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, f)
    eights = rows * f // 8
    if eights:
        params = _Params(x.data_ptr(), out.data_ptr(), eights, f // 8)
        _kernel(kind == "gelu_tanh").launch(-(-eights // THREADS), THREADS, params)
    return out

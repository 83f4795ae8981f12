"""Launcher of ``thresholds.cu``."""

from __future__ import annotations

import ctypes
from functools import cache

from torch import Tensor

from sgla.kernels.cuda.build import Kernel


class _Params(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ["logits", "slots", "temperature", "top_k", "top_p", "min_p", "thresholds"]
        ),
        ("vocab", ctypes.c_int),
    )


@cache
def _kernel() -> Kernel:
    return Kernel("thresholds.cu", "find_thresholds", {})


def find_thresholds(
    logits: Tensor, slots: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """As ``kernels/triton/sampling.py: find_thresholds``, which is its oracle. Logits closer than 5e-6 of the
    temperature count as equal."""
    thresholds = logits.new_empty(logits.shape[0])
    tensors = (logits, slots, temperatures, top_ks, top_ps, min_ps, thresholds)
    params = _Params(*(t.data_ptr() for t in tensors), logits.shape[1])
    _kernel().launch(logits.shape[0], 1024, params, dependent=False)
    return thresholds

"""Launcher of ``router.cu``:
from the attention's output to the chosen experts, for the rows of a decode batch."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel

MAX_ROWS = 512
CLUSTER, ROWS = 8, 16
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "residual", "norm", "router", "live")),
        *((name, P) for name in ("normed", "probabilities", "ids", "done")),
        *((name, ctypes.c_int) for name in ("m", "top_k", "normalize", "places")),
        ("eps", ctypes.c_float),
    )


class RoutedExperts(NamedTuple):
    """The normed rows bf16 ``[m, d]``, probabilities float32 ``[m, top_k]``, experts int32 ``[m, top_k]``,
    and int32 zeros if they were wanted."""

    x: Tensor
    probabilities: Tensor
    ids: Tensor
    done: Tensor | None = None


def refuses(experts: int, d: int) -> str | None:
    """Why ``experts`` of a model of the width ``d`` cannot be chosen among, or None."""
    if experts not in (32, 64, 128, 256):
        return f"it takes 32, 64, 128 or 256 experts, not {experts}"
    if d % 256 or d > 4096 or (d // 64) % (experts // 16):
        return f"a width of {d} does not divide among the warps of {experts} experts"
    return None


@cache
def _kernel(experts: int, d: int, add: bool, norm: bool) -> Kernel:
    defines = {"WARPS": experts // 16, "PIECES": d // 256, "ADD": int(add), "NORM": int(norm)}
    return Kernel("router.cu", "router", defines, cluster=CLUSTER)


def route(
    x: Tensor,
    router: Tensor,
    top_k: int,
    normalize: bool,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    places: int = 0,
    live: Tensor | None = None,
) -> RoutedExperts:
    """The best ``top_k`` experts of each row of x bf16 ``[m, d]``:
    router bf16 ``[experts, d]``, see ``refuses``.

    With ``norm`` float32[d] of x's RMSNorm; with ``residual`` x is added into that in place first.
    ``places``: how many zeros are wanted for ``experts.py``. ``live`` int32[m]: rows with 0 choose no expert.
    """
    m, d = x.shape
    experts = router.shape[0]
    normed = x if norm is None else torch.empty_like(x)
    ids = torch.empty(m, top_k, dtype=torch.int32, device=x.device)
    probabilities = torch.empty(m, top_k, dtype=torch.float32, device=x.device)
    done = torch.empty(places, dtype=torch.int32, device=x.device)
    params = _Params(
        x.data_ptr(), residual.data_ptr() if residual is not None else None,
        norm.data_ptr() if norm is not None else None,
        router.data_ptr(), live.data_ptr() if live is not None else None,
        normed.data_ptr(), probabilities.data_ptr(), ids.data_ptr(), done.data_ptr(),
        m, top_k, int(normalize), places, eps,
    )  # fmt: skip
    kernel = _kernel(experts, d, residual is not None, norm is not None)
    kernel.launch(-(-m // ROWS) * CLUSTER, experts * 2, params)
    return RoutedExperts(normed, probabilities, ids, done)

"""Launcher of ``experts.cu``: both products of a mixture of experts, for the rows of a decode batch."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.router import RoutedExperts
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map

MAX_PAIRS, MAX_EXPERTS = 2304, 1024
TILE, STAGES = 128, 8  # weight rows of a tile; chunks of 64 of their columns in shared memory
PAIRS, SHARED = 32, 64  # of a place; of an expert, on average, at most
X_STAGES, X_PITCH = 3, 528  # pieces of activations in shared memory, and bytes of a row of one
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        ("gate_up", TensorMap),
        ("down", TensorMap),
        *((name, P) for name in ("x", "ids", "inner", "y", "done")),
        *((name, ctypes.c_int) for name in ("pairs", "top_k", "f", "d", "guess")),
        ("pad", ctypes.c_int),  # tensor maps are aligned to 64 bytes
    )


def refuses(pairs: int, f: int, d: int, experts: int) -> str | None:
    """Why experts of the inner width ``f`` in a model of the width ``d`` cannot be multiplied, or None."""
    if pairs > MAX_PAIRS:
        return f"it takes at most {MAX_PAIRS} pairs of token and expert"
    if pairs > SHARED * experts:
        return f"it reads weights again for each {PAIRS} pairs, which pays up to {SHARED} pairs an expert"
    if f % 64 or d % TILE:
        return f"it needs widths that are multiples of 64 (inner) and {TILE} (outer)"
    return f"it takes at most {MAX_EXPERTS} experts" if experts > MAX_EXPERTS else None


def places(experts: int) -> int:
    """How many zeros ``RoutedExperts.done`` must have:
    a count for each place, and one of the tiles that are taken."""
    return experts + MAX_PAIRS // PAIRS + 1


@cache
def _kernel(experts: int, gelu: bool) -> Kernel:
    shared = STAGES * (TILE * 128 + 32) + X_STAGES * (PAIRS * X_PITCH + 16) + 1024
    return Kernel("experts.cu", "experts", {"EXPERTS": experts, "GELU": int(gelu)}, shared)


def forward(routed: RoutedExperts, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """``down_e(act(gate_e(x)) * up_e(x))`` of every pair of row and expert: gate_up bf16 ``[E * 2 f, d]``,
    down bf16 ``[E * d, f]`` -> bf16 ``[m * top_k, d]``. ``routed.done`` is used up."""
    x, _, ids, done = routed
    assert done is not None
    (m, d), f, pairs = x.shape, down.shape[1], ids.numel()
    experts = down.shape[0] // d
    assert refuses(pairs, f, d, experts) is None
    inner = torch.empty(pairs, f, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, d, dtype=x.dtype, device=x.device)
    params = _Params(
        *_maps(gate_up.data_ptr(), down.data_ptr(), experts, f, d),
        x.data_ptr(), ids.data_ptr(), inner.data_ptr(), y.data_ptr(), done.data_ptr(),
        pairs, pairs // m, f, d, int(pairs >= 4 * experts),
    )  # fmt: skip
    kernel = _kernel(experts, activation == "gelu_tanh")
    kernel.launch(processors(), TILE * 2 + 64, params)
    return y


@lru_cache(1 << 12)
def _maps(
    gate_up: int, down: int, experts: int, f: int, d: int
) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_uint64]]:
    row = 2 * d
    interleaved = tensor_map(
        gate_up, (d, 8, 2, f // 8, experts), (row, row * f, row * 8, row * 2 * f), (64, 8, 2, TILE // 16, 1)
    )
    return interleaved, tensor_map(down, (f, experts * d), (2 * f,), (64, TILE))

"""Launcher of ``grouped_gemm.cu``: the products of a mixture of experts, for prompts."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from torch import Tensor

from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map
from sgla.kernels.triton.moe import Groups

ROWS = 256  # of a block of pairs, at most
TILE, STAGES = 128, 4  # weight rows of a tile; chunks of 64 of their columns in shared memory
BOX = 32  # rows of x in one copy


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        *((name, ctypes.c_void_p) for name in ("rows", "order", "blocks", "out")),
        *((name, ctypes.c_int) for name in ("count", "tiles", "n", "k", "top_k")),
        ("pad", ctypes.c_int * 3),  # tensor maps are aligned to 64 bytes
    )


def refuses(f: int, d: int) -> str | None:
    """Why experts of the inner width ``f`` in a model of the width ``d`` cannot be multiplied, or None."""
    aligned = f % 64 == 0 and d % TILE == 0
    return None if aligned else f"it needs widths that are multiples of 64 (inner) and {TILE} (outer)"


@cache
def _kernel(gated: bool, gelu: bool) -> Kernel:
    shared = STAGES * ((TILE + ROWS) * 128 + 16) + TILE * (128 if gated else 256) + 1024
    defines = {"GATED": int(gated), "GELU": int(gelu), "STAGES": STAGES}
    return Kernel("grouped_gemm.cu", "grouped_gemm", defines, shared)


def product(x: Tensor, w: Tensor, n: int, groups: Groups, activation: str | None = None) -> Tensor:
    """As ``moe.experts`` in bf16, with groups of ``ROWS``."""
    order, blocks, top_k, rows = groups
    pairs, k, gated = order.numel(), x.shape[1], activation is not None
    experts = w.shape[0] // (2 * n if gated else n)
    assert rows == ROWS
    assert x.is_contiguous()
    out = x.new_empty(pairs, n)
    count, tiles = blocks.shape[0], n * (2 if gated else 1) // TILE
    params = _Params(
        _weight_map(w.data_ptr(), experts, n, k, gated),
        TensorMap() if gated else tensor_map(x.data_ptr(), (k, pairs), (2 * k,), (64, BOX)),
        x.data_ptr(), order.data_ptr(), blocks.data_ptr(), out.data_ptr(), count, tiles, n, k, top_k,
    )  # fmt: skip
    kernel = _kernel(gated, activation == "gelu_tanh")
    kernel.launch(min(processors(), count * tiles), 2 * TILE + 128, params)
    return out


@lru_cache(1 << 12)
def _weight_map(data: int, experts: int, n: int, k: int, gated: bool) -> ctypes.Array[ctypes.c_uint64]:
    row = 2 * k
    if not gated:
        return tensor_map(data, (k, experts * n), (row,), (64, TILE))
    strides = row, row * n, row * 8, row * 2 * n
    return tensor_map(data, (k, 8, 2, n // 8, experts), strides, (64, 8, 2, TILE // 16, 1))

"""Launcher of ``grouped_gemm.cu``: the products of a mixture of experts, for prompts."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map
from sgla.kernels.integers import BLOCK, Integers
from sgla.kernels.triton.moe import Groups

ROWS = 256  # of a block of pairs, at most
TILE, STAGES = 128, 4  # weight rows of a tile; chunks of 64 of their columns in shared memory
MOST_STAGES = 12  # with integers
BOX = 32  # rows of x in one copy


class _Params(ctypes.Structure):
    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        *((name, ctypes.c_void_p) for name in ("rows", "order", "blocks", "out", "constants")),
        *((name, ctypes.c_int) for name in ("count", "tiles", "n", "k", "top_k")),
        ("pad", ctypes.c_int),  # tensor maps are aligned to 64 bytes
    )


def refuses(f: int, d: int) -> str | None:
    """Why experts of the inner width ``f`` in a model of the width ``d`` cannot be multiplied, or None."""
    aligned = f % 64 == 0 and d % TILE == 0
    return None if aligned else f"it needs widths that are multiples of 64 (inner) and {TILE} (outer)"


def refuses_integers(bits: int, group: int) -> str | None:
    """Why experts in such integers are not multiplied, or None."""
    return None if (bits, group) == (4, 128) else "it was measured with 4 bits in groups of 128"


def rows_for(mean: float) -> int | None:
    """Of a block, with integers, where an expert has so many pairs on average; None: of so few Triton's
    kernels unpack faster."""
    if mean <= 24:
        return None
    return 64 if mean <= 40 else 128 if mean <= 96 else ROWS


@cache
def _kernel(gated: bool, gelu: bool, rows: int, packing: tuple[tuple[str, int], ...]) -> Kernel:
    defines = {"GATED": int(gated), "GELU": int(gelu)} | dict(packing)
    stage, more = (TILE * (64 if packing else 128) + rows * 128 + 16), TILE * (128 if gated else 256) + 1024
    stages = min(MOST_STAGES, (SHARED[0] - more) // stage) if packing else STAGES
    defines |= {"STAGES": stages, "ROWS": rows}
    return Kernel("grouped_gemm.cu", "grouped_gemm", defines, stages * stage + more)


def product(x: Tensor, w: Tensor | Integers, n: int, groups: Groups, activation: str | None = None) -> Tensor:
    """As ``moe.experts`` in bf16, with groups of ``ROWS``; of integers also with groups of 64 or 128."""
    order, blocks, top_k, rows = groups
    pairs, k, gated = order.numel(), x.shape[1], activation is not None
    each, made = 2 * n if gated else n, tuple[tuple[str, int], ...]()
    if isinstance(w, Tensor):
        assert rows == ROWS
        experts, data, constants, width = w.shape[0] // each, w.data_ptr(), None, k
    else:
        words, of_groups = w.tensors
        experts, data, constants = w.n // each, words.data_ptr(), of_groups.data_ptr()
        width = -(-k // BLOCK) * 32
        made = ("BITS", w.bits), ("GROUP", w.group), ("WHOLE", int(w.whole))
    assert x.is_contiguous()
    out = x.new_empty(pairs, n)
    count, tiles = blocks.shape[0], each // TILE
    params = _Params(
        _weight_map(data, experts, n, width, gated, 32 if made else 64),
        TensorMap() if gated else tensor_map(x.data_ptr(), (k, pairs), (2 * k,), (64, BOX)),
        x.data_ptr(), order.data_ptr(), blocks.data_ptr(), out.data_ptr(), constants,
        count, tiles, n, k, top_k,
    )  # fmt: skip
    kernel = _kernel(gated, activation == "gelu_tanh", rows, made)
    kernel.launch(min(processors(), count * tiles), 2 * TILE + 128, params)
    return out


@lru_cache(1 << 12)
def _weight_map(
    data: int, experts: int, n: int, width: int, gated: bool, box: int
) -> ctypes.Array[ctypes.c_uint64]:
    """Rows of ``width`` times 2 bytes, of which a stage has ``box``."""
    row = 2 * width
    if not gated:
        return tensor_map(data, (width, experts * n), (row,), (box, TILE))
    strides = row, row * n, row * 8, row * 2 * n
    return tensor_map(data, (width, 8, 2, n // 8, experts), strides, (box, 8, 2, TILE // 16, 1))

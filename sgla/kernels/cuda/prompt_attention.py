"""Launcher of ``prompt_attention.cu``: causal attention of prompt rows over the pages."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from sgla.kernels.cuda.build import Kernel
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map

ROWS = 128  # of a tile: pairs of token and query head
KEYS, STAGES = 128, 3  # of a stage; in shared memory
THREADS = 384
LOG2E = 1.4426950408889634
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        ("q", TensorMap),
        ("k", TensorMap),
        ("v", TensorMap),
        *((name, P) for name in ("out", "page_table", "tiles")),
        *((name, ctypes.c_int) for name in ("table_stride", "kv_heads", "page_size")),
        ("scale", ctypes.c_float),
        ("pad", ctypes.c_int * 6),  # tensor maps are aligned to 64 bytes
    )


def supported(dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> str | None:
    """None, or why this kernel cannot be used."""
    if torch.cuda.get_device_capability()[0] != 9:
        return "it needs compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"it needs a bfloat16 KV cache, not {dtype}"
    if head_dim not in (64, 128):
        return f"it needs a head dimension of 64 or 128, not {head_dim}"
    if group > 16:
        return f"it takes at most 16 query heads a KV head, not {group}"
    if page_size % 16:
        return "it needs a page size that is a multiple of 16"
    return None


def tile_tokens(group: int) -> int:
    """Tokens of a tile, where ``group`` query heads share a KV head."""
    return ROWS // group


@cache
def _kernel(head_dim: int, group: int) -> Kernel:
    shared = ROWS * head_dim * 2 + STAGES * (4 * KEYS * head_dim + 24) + 8 + 1024
    defines = {"HD": head_dim, "GROUP": group, "STAGES": STAGES}
    return Kernel("prompt_attention.cu", "prompt_attention", defines, shared)


def attend(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, tiles: Tensor, scale: float, out: Tensor
) -> None:
    """q bf16 ``[T, Hq * hd]`` -> ``out``, the same shape, contiguous; k, v bf16 ``[pages, page_size, Hkv, hd]`` whose tokens of one page and head are
    contiguous. ``tiles`` int32[n, 4]: slot, first token in q, its position, how many tokens (0: none, at most
    ``tile_tokens``); long histories should come first. Tokens that are in no tile are left as they are."""
    tokens, (pages, page_size, kv_heads, dim) = q.shape[0], k.shape
    heads = q.shape[1] // dim
    assert k.stride() == (kv_heads * page_size * dim, dim, page_size * dim, 1) == v.stride()
    assert q.stride(1) == 1
    assert out.is_contiguous()
    params = _Params(
        tensor_map(q.data_ptr(), (dim, heads, tokens), (2 * dim, 2 * q.stride(0)), (64, heads // kv_heads, tile_tokens(heads // kv_heads))),
        *(_pages(x.data_ptr(), pages * kv_heads * page_size, dim) for x in (k, v)),
        out.data_ptr(), page_table.data_ptr(), tiles.data_ptr(),
        page_table.stride(0), kv_heads, page_size, scale * LOG2E,
    )  # fmt: skip
    _kernel(dim, heads // kv_heads).launch(tiles.shape[0] * kv_heads, THREADS, params)


@lru_cache(1 << 10)
def _pages(data: int, rows: int, dim: int) -> ctypes.Array[ctypes.c_uint64]:
    return tensor_map(data, (dim, rows), (2 * dim,), (64, 16))

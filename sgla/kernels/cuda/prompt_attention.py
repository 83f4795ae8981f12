"""Launcher of ``prompt_attention.cu``:
causal attention of prompts, over pages and over what lies beside q."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.device import Device
from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map

ROWS = 128  # of a tile: pairs of token and query head
KEYS, STAGES = 128, 3  # of a stage; in shared memory
THREADS = 384
LOG2E = 1.4426950408889634
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, TensorMap) for name in ("q", "k", "v", "k_beside", "v_beside")),
        *((name, P) for name in ("out", "page_table", "tiles")),
        *((name, ctypes.c_int) for name in ("tile_count", "table_stride", "kv_heads", "page_size")),
        ("scale", ctypes.c_float),
        ("pad", ctypes.c_int * 5),  # tensor maps are aligned to 64 bytes
    )


class Pages(NamedTuple):
    """``k``, ``v`` bf16 ``[pages, page_size, Hkv, hd]``, whose tokens of one page and head are contiguous;
    ``table`` int32 ``[slots, pages of a row]``."""

    k: Tensor
    v: Tensor
    table: Tensor


class Beside(NamedTuple):
    """``k``, ``v`` bf16 ``[T, Hkv, hd]`` of the tokens of q, whose heads are contiguous."""

    k: Tensor
    v: Tensor


def refuses(device: Device, dtype: torch.dtype, head_dim: int, group: int, page_size: int) -> str | None:
    """Why this kernel cannot be used, or None."""
    if not device.wgmma:
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
    shared = ROWS * head_dim * 2 + STAGES * (4 * KEYS * head_dim + 32) + 16 + 1024
    defines = {"HD": head_dim, "GROUP": group, "STAGES": STAGES}
    return Kernel("prompt_attention.cu", "prompt_attention", defines, shared)


def attend(
    q: Tensor, pages: Pages | None, beside: Beside | None, tiles: Tensor, scale: float, out: Tensor
) -> None:
    """q bf16 ``[T, Hq * hd]`` -> ``out``, the same shape, contiguous. ``tiles`` int32[n, 4]: slot (-1: keys
    and values are in ``beside``, else in ``pages``), first token in q, its position, how many tokens (at most
    ``tile_tokens``; 0: this tile and those behind it are not there); long histories should come first. Tokens
    that are in no tile are left as they are."""
    there = beside or pages
    assert there is not None
    tokens, (kv_heads, dim) = q.shape[0], there.k.shape[-2:]
    heads = q.shape[1] // dim
    group = heads // kv_heads
    assert q.stride(1) == 1
    assert out.is_contiguous()
    table, stride, page_size = None, 0, 1
    if pages is not None:
        count, page_size = pages.k.shape[:2]
        assert pages.k.stride() == (kv_heads * page_size * dim, dim, page_size * dim, 1) == pages.v.stride()
        in_pages = [
            _map(x.data_ptr(), (dim, count * kv_heads * page_size), (2 * dim,), (64, 16)) for x in pages[:2]
        ]
        table, stride = pages.table.data_ptr(), pages.table.stride(0)
    if beside is not None:
        assert beside.k.stride()[1:] == (dim, 1) == beside.v.stride()[1:]
        in_rows = [
            _map(x.data_ptr(), (kv_heads * dim, tokens), (2 * x.stride(0),), (64, KEYS)) for x in beside
        ]
    params = _Params(
        _map(q.data_ptr(), (dim, heads, tokens), (2 * dim, 2 * q.stride(0)), (64, group, ROWS // group)),
        *(in_rows if pages is None else in_pages),
        *(in_pages if beside is None else in_rows),
        out.data_ptr(), table, tiles.data_ptr(),
        tiles.shape[0], stride, kv_heads, page_size, scale * LOG2E,
    )  # fmt: skip
    _kernel(dim, group).launch(min(processors(), tiles.shape[0] * kv_heads), THREADS, params)


_map = lru_cache(1 << 10)(tensor_map)

"""Launcher of ``latent_attention.cu``: attention of decode rows over latents."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from sgla.device import Device
from sgla.kernels.cuda.build import Kernel
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map
from sgla.kernels.ops import Part
from sgla.kernels.triton import latent

TOKENS, STAGES, PIECE = 64, 2, 16  # of a stage, and of a copy
MOST_HEADS = 32  # of a block
LOG2E = 1.4426950408889634
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        ("q", TensorMap),
        ("k", TensorMap),
        *((name, P) for name in ("page_table", "slots", "kv_len", "out", "part", "part_ml", "told")),
        *((name, ctypes.c_int) for name in ("table_stride", "page_size", "heads", "splits", "ranks", "rank")),
        ("scale", ctypes.c_float),
        ("pad", ctypes.c_int * 11),  # tensor maps are aligned to 64 bytes
    )


def refuses(device: Device, dtype: torch.dtype, dim: int, content: int, page_size: int) -> str | None:
    """Why this kernel cannot be used, or None."""
    if not device.wgmma:
        return "it needs compute capability 9.0"
    if dtype != torch.bfloat16:
        return f"it needs a bfloat16 KV cache, not {dtype}"
    if dim % 64 or content % 64 or content > 512 or dim - content > 64:
        return f"it takes up to 512 + 64 values of a latent, in parts of 64, not {content} + {dim - content}"
    if page_size % PIECE:
        return f"it needs a page size that is a multiple of {PIECE}"
    return None


def heads_of_block(heads: int) -> int:
    return 16 if heads <= 16 else MOST_HEADS


def splits_for(rows: int, heads: int, processors: int) -> int:
    """Shares of a history so that a small batch has a block for each multiprocessor: at most 32, a power of
    two."""
    each = processors // (rows * -(-heads // heads_of_block(heads)))
    return min(32, 1 << max(0, each.bit_length() - 1))


@cache
def _kernel(heads: int, content: int, rotated: int, early: bool) -> Kernel:
    width = content + rotated
    shared = 2 * width * (STAGES * TOKENS + heads) + heads * 128 + 32 * heads + 16 * STAGES + 8 + 1024
    defines = {"HEADS": heads, "CONTENT": content, "ROTATED": rotated, "EARLY": int(early)}
    return Kernel("latent_attention.cu", "latent_attention", defines, shared)


def decode(
    q: Tensor,
    k: Tensor,
    content: int,
    page_table: Tensor,
    slots: Tensor,
    kv_len: Tensor,
    scale: float,
    splits: int,
    own: Part | None = None,
) -> Tensor:
    """See ``triton.latent.decode``; ``splits`` from ``splits_for``."""
    rows, (pages, page_size, _, dim) = slots.shape[0], k.shape
    q = q.contiguous()
    heads = q.shape[1] // dim
    block, told = heads_of_block(heads), 0 if own is None else own.told.data_ptr()
    ranks, rank = (1, 0) if own is None else own[:2]
    out = q.new_empty(q.shape[0], heads * content)
    several = rows * heads * splits if splits > 1 else 0
    part = q.new_empty(several, content, dtype=torch.float32)
    part_ml = q.new_empty(several, 2, dtype=torch.float32)
    params = _Params(
        _map(q.data_ptr(), (dim, heads, q.shape[0]), (2 * dim, 2 * dim * heads), (64, block, 1)),
        _map(k.data_ptr(), (dim, page_size, pages), (2 * k.stride(1), 2 * k.stride(0)), (64, PIECE, 1)),
        page_table.data_ptr(), slots.data_ptr(), kv_len.data_ptr(), out.data_ptr(), part.data_ptr(),
        part_ml.data_ptr(), told, page_table.stride(0), page_size, heads, splits, ranks, rank, scale * LOG2E,
    )  # fmt: skip
    # What other rows of the step store, a row may read.
    kernel = _kernel(block, content, dim - content, early=len(q) == rows == 1)
    kernel.launch(rows * -(-heads // block) * splits, 160, params)
    if splits > 1:
        latent.merge(part, part_ml, out, rows, own=own)
    return out


_map = lru_cache(1 << 10)(tensor_map)

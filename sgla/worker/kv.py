"""The KV pages of all layers."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from sgla.kernels.ops import KVLayer
from sgla.model.base import KVSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def allocate_kv(spec: KVSpec, pages: int, page_size: int, dtype: str) -> list[KVLayer]:
    """Zeros: an attention that reads and masks places nobody has written must not find NaN there."""
    shape = (pages, page_size, spec.kv_heads, spec.head_dim)
    return [KVLayer(_zeros(shape, DTYPES[dtype]), _zeros(shape, DTYPES[dtype])) for _ in range(spec.layers)]


def zero_pages(kv: list[KVLayer], pages: Tensor) -> None:
    """``pages`` int64[n], on the device of the KV."""
    for x in (x for layer in kv for x in (layer.k, layer.v)):
        (x.view(torch.uint8) if x.itemsize == 1 else x).index_fill_(0, pages, 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Unlike ``torch.zeros`` this touches nothing: the system gives memory to a place when it is first written."""
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

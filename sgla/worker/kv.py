"""The KV pages of all layers, in cache groups: layers that keep the same tokens share page numbers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sgla.kernels.ops import KVLayer
from sgla.model.state import KVGroup, LayerState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def allocate_kv(
    state: Sequence[LayerState], groups: Sequence[KVGroup], pages: Sequence[int], page_size: int, dtype: str
) -> list[KVLayer]:
    """``pages`` of each group.
    Zeros: an attention that reads and masks places nobody has written must not find NaN there."""
    group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
    layers = []
    for i, layer in enumerate(state):
        shape = (pages[group_of[i]], page_size, layer.kv_heads, layer.head_dim)
        k, v = _zeros(shape, DTYPES[dtype]), _zeros(shape, DTYPES[dtype])
        layers.append(KVLayer(k, v, group=group_of[i]))
    return layers


def zero_pages(kv: list[KVLayer], pages: Sequence[Tensor]) -> None:
    """``pages`` int64[n] of each cache group, on the device of the KV."""
    for layer in kv:
        for x in (layer.k, layer.v):
            x = x.view(torch.uint8) if x.itemsize == 1 else x
            x.index_fill_(0, pages[layer.group], 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Unlike ``torch.zeros`` this touches nothing:
    the system gives memory to a place when it is first written."""
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

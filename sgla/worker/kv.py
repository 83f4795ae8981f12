"""The KV pages of all layers, in cache groups: layers that keep the same tokens share page numbers."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from sgla.kernels.ops import BothLayer, KVLayer, Layer, StateLayer
from sgla.layers.spec import StateTensor
from sgla.model.sharing import Slab
from sgla.model.state import KVGroup, LayerState, Stored, scaled, unit_dtype
from sgla.quant.weight import Make

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
ALIGNED = 256  # bytes

# (pages, tokens of a page, shape of a token, type) -> zeros [pages, tokens, *shape]
Zeros = Callable[[int, int, tuple[int, ...], torch.dtype], Tensor]


def allocate_kv(
    state: Sequence[LayerState],
    groups: Sequence[KVGroup],
    pages: Sequence[int],
    page_size: int,
    dtype: str,
    zeros: Zeros | None = None,
    slab: Slab | None = None,
    by_heads: bool = False,
) -> list[Layer]:
    """``pages`` of each group, or units of that of states. ``slab``: of the memory that groups share, where
    tokens of one page and head lie together if it is ``by_heads``.
    Zeros: an attention that reads and masks places nobody has written must not find NaN there."""
    plain = zeros or untouched
    memory = None if slab is None else SharedMemory(slab, pages, plain)

    def zeros_of(group: int) -> Zeros:
        return plain if memory is None else partial(memory.zeros, group, by_heads)

    group_of = {layer: g for g, group in enumerate(groups) if not group.unit_bytes for layer in group.layers}
    layers: list[Layer] = []
    for i, layer in enumerate(state):
        if layer.reads is not None:
            kept = tokens_of(layers[layer.reads])
            assert kept is not None
            layers.append(replace(kept))
        elif not layer.unit:
            own = page_size // layer.holders
            layers.append(_tokens(layer.tensors, group_of[i], pages, own, dtype, zeros_of(group_of[i])))
        else:
            units = _states(layer.unit, pages[-1], dtype, plain)
            if layer.tensors:
                tokens = _tokens(layer.tensors, group_of[i], pages, page_size, dtype, plain)
                layers.append(BothLayer(tokens, units))
            else:
                layers.append(units)
    return layers


def _tokens(
    tensors: Sequence[StateTensor],
    group: int,
    pages: Sequence[int],
    page_size: int,
    dtype: str,
    zeros: Zeros,
) -> KVLayer:
    made, scales = {}, {}
    for tensor in tensors:
        heads, width = tensor.shape
        stored = Stored.of(tensor, dtype)
        shape = heads, width // stored.together
        made[tensor.name] = zeros(pages[group], page_size, shape, DTYPES[stored.dtype])
    assert made.keys() <= {"k", "v"}, "KVLayer has no other tensors"
    for tensor in tensors:
        if (stored := Stored.of(tensor, dtype)).scales:
            shape = tensor.shape[0], stored.scales * page_size
            scales[tensor.name] = zeros(pages[group], 1, shape, DTYPES[stored.scale])[:, 0]
    k = made["k"] if made else zeros(pages[group], page_size, (0, 0), DTYPES[dtype])
    v = made.get("v", k[..., :0])
    return KVLayer(k, v, group=group, k_scales=scales.get("k"), v_scales=scales.get("v"))


def _states(tensors: Sequence[StateTensor], units: int, dtype: str, zeros: Zeros) -> StateLayer:
    made = {
        tensor.name: zeros(units, 1, tensor.shape, DTYPES[unit_dtype(tensor, dtype)])[:, 0]
        for tensor in tensors
    }
    assert made.keys() <= {"conv", "memory"}, "StateLayer has no other tensors"
    conv = made["conv"] if "conv" in made else made["memory"].new_zeros(units, 0, 0)
    return StateLayer(conv, made["memory"] if "memory" in made else conv.new_zeros(units, 0, 0, 0).float())


def tokens_of(layer: Layer) -> KVLayer | None:
    """Where a layer keeps tokens."""
    if isinstance(layer, BothLayer):
        return layer.tokens
    return layer if isinstance(layer, KVLayer) else None


def state_of_layer(layer: Layer) -> StateLayer | None:
    """Where a layer keeps a state."""
    state = layer.state if isinstance(layer, BothLayer) else layer
    return state if isinstance(state, StateLayer) else None


def paged(kv: Sequence[Layer]) -> list[KVLayer]:
    """Where the layers keep tokens that do."""
    return [kept for layer in kv if (kept := tokens_of(layer)) is not None]


def zero_pages(kv: Sequence[Layer], pages: Sequence[Tensor]) -> None:
    """``pages`` int64[n] of each cache group of pages, on the device of the KV. States need that not: a row
    that begins without one reads none."""
    for layer in paged(kv):
        for x in layer.tensors:
            x = x.view(torch.uint8) if x.itemsize == 1 else x
            x.index_fill_(0, pages[layer.group], 0)


def memory_of(kv: Sequence[Layer], groups: int) -> list[list[Tensor]]:
    """Of each cache group, what its units take: uint8[units, bytes] of each tensor, in the memory's order."""
    tensors: list[dict[int, Tensor]] = [{} for _ in range(groups)]
    for layer in kv:
        if (kept := tokens_of(layer)) is not None:
            tensors[kept.group] |= {x.data_ptr(): x for x in kept.tensors if x.numel()}
        if (state := state_of_layer(layer)) is not None:
            tensors[-1] |= {x.data_ptr(): x for x in (state.conv, state.memory) if x.numel()}
    return [[_in_order(x).view(len(x), -1).view(torch.uint8) for x in found.values()] for found in tensors]


def forget(kv: Sequence[Layer], groups: int) -> None:
    """Give the memory that ``untouched`` has mapped back to the system: all of it is zero then."""
    libc = ctypes.CDLL(None)
    for tensor in (tensor for found in memory_of(kv, groups) for tensor in found):
        memory = tensor.untyped_storage()
        start, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes())
        libc.madvise(start, size, mmap.MADV_DONTNEED)


def _in_order(x: Tensor) -> Tensor:
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute([0, *(dim for dim in order if dim)])


def untouched(pages: int, page_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Unlike ``torch.zeros`` this touches nothing:
    the system gives memory to a place when it is first written."""
    size = (pages, page_size, *shape)
    memory = mmap.mmap(-1, max(1, prod(size)) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)[: prod(size)].view(size)


class SharedMemory:
    """One tensor that cache groups share. In a page tensors follow each other; pages of a group lie as far
    apart as its stride is, and page 1 of each begins the first slab."""

    def __init__(self, slab: Slab, pages: Sequence[int], zeros: Zeros) -> None:
        self._strides = slab.strides
        self._memory = zeros(slab.total(pages), 1, (1,), torch.uint8).flatten()
        self._begins = [slab.dummy - stride for stride in slab.strides]  # of the next tensor of page 0

    def zeros(
        self,
        group: int,
        by_heads: bool,
        pages: int,
        page_size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """``by_heads``: tokens of one page and head lie together."""
        begin, stride = self._begins[group], self._strides[group] // dtype.itemsize
        self._begins[group] += page_size * prod(shape) * dtype.itemsize
        memory, (heads, *width) = self._memory[begin:].view(dtype), shape
        inner = (heads, page_size, *width) if by_heads else (page_size, heads, *width)
        steps = [prod(inner[i + 1 :]) for i in range(len(inner))]
        found = memory.as_strided((pages, *inner), (stride, *steps))
        return found.transpose(1, 2) if by_heads else found


class Arena:
    """One tensor of ``nbytes`` on a GPU, and so much that all parts are aligned, which are given away.
    Tokens of one page and head lie together, so that a kernel reads them in one go."""

    def __init__(self, nbytes: int, tensors: int, make: Make | None = None) -> None:
        """``make``: where it lies; None: where torch has it."""
        size, kind = nbytes + ALIGNED * tensors, torch.uint8
        made = torch.empty(size, dtype=kind, device="cuda") if make is None else make((size,), kind)
        self._left = made.zero_()

    def zeros(self, pages: int, page_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        heads, *width = shape
        size = pages * page_size * prod(shape) * dtype.itemsize
        part, self._left = self._left[:size], self._left[-(-size // ALIGNED) * ALIGNED :]
        return part.view(dtype).view(pages, heads, page_size, *width).transpose(1, 2)


def allocate_on_gpu(
    state: Sequence[LayerState],
    groups: Sequence[KVGroup],
    pages: Sequence[int],
    page_size: int,
    dtype: str,
    make: Make | None = None,
    slab: Slab | None = None,
) -> list[Layer]:
    """``allocate_kv`` in one ``Arena``."""
    nbytes = sum(group.page_bytes(page_size) * count for group, count in zip(groups, pages))
    if slab is not None:
        nbytes = slab.total(pages)
    parts = (layer.tensors + layer.unit + tuple(scaled(layer.tensors, dtype)) for layer in state)
    arena = Arena(nbytes, sum(map(len, parts)), make)
    return allocate_kv(state, groups, pages, page_size, dtype, arena.zeros, slab, by_heads=True)

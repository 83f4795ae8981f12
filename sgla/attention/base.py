"""What an attention backend is: one kernel for decode rows, one for rows with several query tokens, and a
batch that says which rows are which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer

Int32s = NDArray[np.int32]


class Shape(NamedTuple):
    """Everything that decides whether a kernel can be used. ``windows``: of all layers, 0 is full attention;
    ``context_len``: tokens of the longest history, which only deterministic kernels want to know."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windows: frozenset[int]
    softcap: float
    max_rows: int
    fp8_kv: bool = False
    deterministic: bool = False
    context_len: int = 0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class ExtendRows(NamedTuple):
    """The rows with several query tokens, on the host: lengths int32[R], and the page table they index by
    ``slots``. It is best if rows with a history come before those without."""

    slots: Int32s
    q_lens: Int32s
    kv_lens: Int32s  # after this step
    page_table: Int32s


class DevicePrefixes(NamedTuple):
    """What decode rows share, on the GPU: see ``cascade.Prefixes``;
    ``valid`` int32[1] of the ``items`` are there."""

    valid: Tensor
    items: Tensor
    order: Tensor
    skip: Tensor
    first: Tensor


@dataclass(slots=True)
class DeviceBatch(ForwardBatch):
    """Rows ``[0, decode_rows)`` have one token each, the others are in
    ``extend``. All tensors are on the GPU.

    ``cum[window]`` int32[decode_rows + 1]: tiles of KV that the rows before each row read (see
    ``kernels/cuda``), for window 0 without those that ``prefixes`` cover.
    """

    decode_rows: int = 0
    cum: dict[int, Tensor] = field(default_factory=dict)
    extend: ExtendRows | None = None
    prefixes: DevicePrefixes | None = None


class Decode(Protocol):
    name: str
    cascades: bool  # honours ``DeviceBatch.prefixes``, which are given only then

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        """q ``[T, Hq * hd]``, at least that of ``decode_rows`` -> the same shape, of which only those rows
        are written. Capturable: lengths, pages and ``cum`` are read on the device."""


class Extend(Protocol):
    name: str

    def plan(self, batch: DeviceBatch) -> None:
        """Host work for the batch's ``extend`` rows, once a step."""

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: DeviceBatch,
        scale: float,
        window: int,
        softcap: float,
        out: Tensor,
    ) -> None:
        """q ``[tokens - decode_rows, Hq * hd]`` of the batch's last rows; ``out``: the same shape."""


class Prompts(Protocol):
    """``Extend`` whose plan lies on the device, so that it can be captured:
    tiles of at most ``tile`` tokens (``cut``)."""

    tile: int

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        page_table: Tensor,
        tiles: Tensor,
        scale: float,
        window: int,
        softcap: float,
        out: Tensor,
    ) -> None:
        """q ``[T, Hq * hd]``; ``out``, the same shape, is written for the tokens that are in a tile."""


def cut(slots: Int32s, starts: Int32s, q_lens: Int32s, first: int, tile: int) -> Int32s:
    """int32[n, 4]: slot, token in q (``first`` is that of the first row), its position, and how many tokens.
    The longest histories come first, for an even finish."""
    counts = -(-q_lens // tile)
    row = np.repeat(np.arange(len(counts)), counts)
    offset = (np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)) * tile
    begin, start = first + (q_lens.cumsum() - q_lens)[row] + offset, starts[row] + offset
    count = np.minimum(tile, q_lens[row] - offset)
    tiles = np.stack([slots[row], begin, start, count], 1).astype(np.int32)
    return tiles[np.argsort(-start - count, kind="stable")]


def beside(q: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """k and v ``[T, Hkv, hd]`` that follow q in each row of the projection's output."""
    width = shape.kv_heads * shape.head_dim
    assert q.stride(0) == q.shape[1] + 2 * width
    at, size = q.storage_offset() + q.shape[1], (q.shape[0], shape.kv_heads, shape.head_dim)
    strides = (q.stride(0), shape.head_dim, 1)
    return q.as_strided(size, strides, at), q.as_strided(size, strides, at + width)


@dataclass(slots=True)
class Attention:
    """A backend: its parts may come from different libraries (a hybrid). ``captures``: steps can be graphs,
    where ``prompts`` stands for ``extend``."""

    decode: Decode
    extend: Extend
    prompts: Prompts
    captures: bool = True

    @property
    def in_place(self) -> bool:
        """Whether ``extend`` wants q in the projection's output ``[T, (Hq + 2 Hkv) * hd]``,
        with k and v beside it."""
        return getattr(self.extend, "ragged", False)

    @property
    def name(self) -> str:
        return f"{self.decode.name} decode, {self.extend.name} prefill"

    def plan(self, batch: DeviceBatch) -> None:
        if batch.extend is not None:
            self.extend.plan(batch)

    def __call__(
        self, q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        assert isinstance(batch, DeviceBatch)
        n = batch.decode_rows
        if batch.extend is None:
            return self.decode.forward(q, kv, batch, scale, window, softcap)
        out = q.new_empty(q.shape)
        if n:
            out[:n] = self.decode.forward(q[:n], kv, batch, scale, window, softcap)
        self.extend.forward(q[n:], kv, batch, scale, window, softcap, out[n:])
        return out

"""What an attention backend is: one kernel for decode rows, one for rows with several query tokens, and a
batch that says which rows are which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, Scoring, outcome

if TYPE_CHECKING:
    from sgla.device import Device
    from sgla.kernels.cuda.decode_attention import Projection
    from sgla.kernels.cuda.prompt_attention import Units
    from sgla.kernels.gpu.ops import FusedDecode

Int32s = NDArray[np.int32]
PARTS = "ranks share out the tokens of a page"
RISING = "scores rise with places (ALiBi)"
P = TypeVar("P")
B = TypeVar("B", bound="Backend")


class Heads(NamedTuple):
    """By what layers are told apart whose attention another kernel may serve."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int


class AttentionShape(NamedTuple):
    """Everything that decides whether a kernel can be used for layers with the same heads. ``windows``: of
    these layers, 0 is full attention; ``kv_dtype``: fp8, int8 or int4, of pages that are not of ``dtype``;
    ``context_len``: tokens of the longest history, which only deterministic kernels want to know; ``v_dim``
    0: as ``head_dim``; ``scale``: of scores; ``sinks``: some of the layers have them; ``alone``: all layers
    of the model have these heads; ``latent``: v is the beginning of k (multi-head latent attention);
    ``together``: tokens of a picture see each other (``Media.until``); ``chunked``: windows of some layers
    are chunks; ``rising``: scores of some rise with places (ALiBi);
    ``parts``: ranks share out the tokens of a page (``ops.Part``)."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windows: frozenset[int]
    softcap: float
    max_rows: int
    kv_dtype: str = ""
    deterministic: bool = False
    context_len: int = 0
    v_dim: int = 0
    scale: float = 1.0
    sinks: bool = False
    alone: bool = True
    latent: bool = False
    together: bool = False
    chunked: bool = False
    rising: bool = False
    parts: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def uneven(self) -> str | None:
        """Why kernels for k and v of one width cannot serve it, or None."""
        if self.v_dim in (0, self.head_dim):
            return None
        return f"k has {self.head_dim} values a head and v has {self.v_dim}"

    @property
    def mixed(self) -> str | None:
        """Why kernels cannot serve it that want the same heads in all layers, or None."""
        return self.uneven if self.alone else "layers have several kinds of heads"

    @property
    def width(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.head_dim, self.v_dim or self.head_dim)


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
    ``kernels/cuda``), for window 0 without those that ``prefixes`` cover. ``turned``: ``positions``, which
    keys and queries are turned by, may be others than the numbers of the tokens. ``units``: what decode
    attention that is cut into chunks has made of the lengths, with the first layer of the step. ``ends``
    int32[decode_rows]: where rows may be leaves (``kernels/triton/drafts.py: place``), the position behind
    each. A row then sees what stands before its position, and itself, which is the last of ``kv_len``.
    """

    decode_rows: int = 0
    cum: dict[int, Tensor] = field(default_factory=dict)
    extend: ExtendRows | None = None
    prefixes: DevicePrefixes | None = None
    turned: bool = False
    units: Units | None = None
    ends: Tensor | None = None


class Unusable(Exception):
    """Kernels that take a shape, as far as one can tell, do not work here."""


class Backend(Protocol):
    """What all kernels say of themselves. A class makes one for a shape: ``kind(shape, device)``."""

    name: str
    captured: bool  # lengths are read on the device, so that steps can be graphs
    grows: bool  # its memory grows with the histories

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        """Why it cannot serve these layers, or None."""


class Decode(Backend, Protocol):
    cascades: bool  # honours ``DeviceBatch.prefixes``, which are given only then
    leaves: bool  # honours ``DeviceBatch.ends``, which is given only then

    @property
    def fused(self) -> FusedDecode | None:
        """Itself, if it does the work of ``ops.qk_norm_rope_store`` too."""

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        """q ``[T, Hq * hd]``, at least that of ``decode_rows`` -> ``[T, Hq * vd]``, of which only those rows
        are written. ``captured``: lengths, pages and ``cum`` are read on the device."""


class Extend(Backend, Protocol):
    """Rows with several query tokens: prompts, or their parts. The host plans them for every step."""

    narrow: bool  # reads an 8-bit KV cache

    @property
    def in_place(self) -> bool:
        """After ``plan``: whether it wants q in the projection's output ``[T, (Hq + 2 Hkv) * hd]``, with k
        and v beside it."""

    def plan(self, batch: DeviceBatch) -> None:
        """Host work for the batch's ``extend`` rows, once a step."""

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        """q ``[tokens - decode_rows, Hq * hd]`` of the batch's last rows; ``out``: ``[.., Hq * vd]``. It
        honours ``Media.until`` unless it refuses shapes that are ``together``."""


class Splits(Protocol):
    """Prompt rows in a captured step whose histories are split, so that few tokens behind long ones keep a
    GPU busy. Their plan of ``room`` rows, int32[room, 4], lies on the device. Up to ``tiles`` can all be
    split."""

    @property
    def room(self) -> int: ...

    @property
    def tiles(self) -> int: ...

    def plan(self, tiles: Int32s) -> Int32s | None:
        """Of tiles (``cut``). None: they are too many, or need not be split."""

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        """As ``Prompts.forward``, with a plan in the place of ``tiles``."""


class Prompts(Protocol):
    """The same rows in a captured step, where the host cannot plan: their plan lies on the device, as tiles
    of at most ``tile`` tokens (``cut``). ``splits``: None where no history can be split."""

    @property
    def tile(self) -> int: ...

    @property
    def splits(self) -> Splits | None: ...

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        """q ``[T, Hq * hd]``; ``out``, the same shape, is written for the tokens that are in a tile."""

    def lost(self, tiles: Int32s) -> float:
        """Microseconds of a layer by which ``Extend``, which may split histories, is faster; inf: unknown."""


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


def kv_beside(q: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """k and v ``[T, Hkv, hd]`` that follow q in each row of the projection's output."""
    width = shape.kv_heads * shape.head_dim
    assert q.stride(0) >= q.shape[1] + 2 * width
    at, size = q.storage_offset() + q.shape[1], (q.shape[0], shape.kv_heads, shape.head_dim)
    strides = (q.stride(0), shape.head_dim, 1)
    return q.as_strided(size, strides, at), q.as_strided(size, strides, at + width)


@dataclass(slots=True)
class Attention:
    """Attention of layers with the same heads: its parts may come from different libraries (a hybrid).
    In graphs ``prompts`` stands for ``extend``; None: its bits would differ where they must not."""

    decode: Decode
    extend: Extend
    prompts: Prompts | None

    @property
    def captures(self) -> bool:
        """Steps can be graphs."""
        return self.decode.captured and self.extend.captured

    @property
    def grows(self) -> bool:
        return self.decode.grows or self.extend.grows

    @property
    def in_place(self) -> bool:
        """See ``Extend.in_place``."""
        return self.extend.in_place

    @property
    def name(self) -> str:
        return f"{self.decode.name} decode, {self.extend.name} prefill"

    def plan(self, batch: DeviceBatch) -> None:
        if batch.extend is not None:
            self.extend.plan(batch)

    def __call__(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        n = batch.decode_rows
        if batch.extend is None:
            return self.decode.forward(q, kv, batch, scoring)
        out = outcome(q, kv)
        if n:
            out[:n] = self.decode.forward(q[:n], kv, batch, scoring)
        self.extend.forward(q[n:], kv, batch, scoring, out[n:])
        return out


class InGraph(NamedTuple):
    """Attention of a captured step, whose prompts lie on the device as ``tiles`` int32[n, 4] (``cut``), or as
    a plan of ``Splits``."""

    attention: Attention
    tiles: Tensor
    split: bool = False

    @property
    def in_place(self) -> bool:
        return False

    def __call__(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        decode, whole = self.attention.decode, self.attention.prompts
        assert whole is not None
        prompts = whole.splits if self.split else whole
        assert prompts is not None
        rows = batch.decode_rows > 0
        out = decode.forward(q, kv, batch, scoring) if rows else outcome(q, kv)
        prompts.forward(q, kv, batch.pages(kv.group), self.tiles, scoring, out)
        return out


class _Parts(Generic[P]):
    """What each kind of layers has of a backend, told apart by their heads."""

    def __init__(self, parts: Mapping[Heads, P]) -> None:
        self._parts = parts

    def of(self, q: Tensor, kv: KVLayer, beside: int = 0) -> P:
        """``beside``: heads of k and v that lie behind q."""
        kv_heads, head_dim = kv.k.shape[2:]
        return self._parts[Heads(q.shape[1] // head_dim - beside, kv_heads, head_dim, kv.v_dim)]


class _Backends(_Parts[B]):
    def __init__(self, parts: Mapping[Heads, B]) -> None:
        super().__init__(parts)
        self.name = "; ".join(f"{x.name} of {h.heads} heads of {h.head_dim}" for h, x in parts.items())
        self.captured = all(part.captured for part in parts.values())
        self.grows = any(part.grows for part in parts.values())

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        """Each part has been asked for its layers."""
        return None


class DecodeByLayer(_Backends[Decode]):
    cascades = leaves = False

    @property
    def fused(self) -> FusedDecode | None:
        return self if any(part.fused is not None for part in self._parts.values()) else None

    def fuses(self, kv: KVLayer) -> bool:
        width = *kv.k.shape[2:], kv.v_dim
        parts = [part for heads, part in self._parts.items() if heads[1:] == width]
        return bool(parts) and all(part.fused is not None for part in parts)

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: DeviceBatch,
        scoring: Scoring,
        projection: Projection | None = None,
    ) -> Tensor:
        if projection is None:
            return self.of(q, kv).forward(q, kv, batch, scoring)
        decode = self.of(q, kv, 2 * kv.k.shape[2]).fused
        assert decode is not None
        return decode.forward(q, kv, batch, scoring, projection)


class ExtendByLayer(_Backends[Extend]):
    narrow, in_place = True, False  # every part reads the pages

    def plan(self, batch: DeviceBatch) -> None:
        for part in self._parts.values():
            part.plan(batch)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        self.of(q, kv).forward(q, kv, batch, scoring, out)


class PromptsByLayer(_Parts[Prompts]):
    splits = None

    @property
    def tile(self) -> int:
        """One that all take."""
        return min(part.tile for part in self._parts.values())

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        self.of(q, kv).forward(q, kv, page_table, tiles, scoring, out)

    def lost(self, tiles: Int32s) -> float:
        return max(part.lost(tiles) for part in self._parts.values())


def by_layer(parts: Mapping[Heads, Attention]) -> Attention:
    """Attention of a model whose layers have several kinds of heads."""
    prompts = {heads: part.prompts for heads, part in parts.items() if part.prompts is not None}
    return Attention(
        DecodeByLayer({heads: part.decode for heads, part in parts.items()}),
        ExtendByLayer({heads: part.extend for heads, part in parts.items()}),
        PromptsByLayer(prompts) if len(prompts) == len(parts) else None,
    )

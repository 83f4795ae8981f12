"""Launcher of ``prompt_attention.cu``:
causal attention of prompts, over pages and over what lies beside q, and of whole texts."""

from __future__ import annotations

import ctypes
import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgla.device import Device
from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.tensor_map import TensorMap, tensor_map

ROWS = 128  # of a tile: pairs of token and query head
KEYS, STAGES = 128, 3  # of a stage; in shared memory
FP8_STAGES, RAW = 2, 2  # the same with pages of 8 bits, and stages of these as they are
THREADS = 384
MERGERS, SHARES = 256, 4  # threads of a block of ``merge_parts``; blocks that share the rows of a tile
PART = 2  # blocks of keys that take as long as what a part costs besides
MOST = 16  # parts of a tile
LONG = 1 << 20  # more parts than there are
CACHED = 1 << 15  # keys of a head, with their values, that the L2 cache keeps while tiles read them
BLOCK = 1.7  # microseconds of a block of keys of 128 values: 650 TFLOP/s
LOG2E = 1.4426950408889634
P = ctypes.c_void_p
Int32s = npt.NDArray[Any]


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, TensorMap) for name in ("q", "k", "v", "k_beside", "v_beside")),
        *((name, P) for name in ("out", "page_table", "tiles", "parts", "order", "sums")),
        *((name, ctypes.c_int) for name in ("tile_count", "table_stride", "kv_heads", "page_size")),
        ("scale", ctypes.c_float),
        ("chunk", ctypes.c_int),
        ("v_scale", ctypes.c_float),
        ("turns", ctypes.c_int),
        ("page_rows", ctypes.c_int),
        ("pad", ctypes.c_int * 11),  # tensor maps are aligned to 64 bytes
    )


class Pages(NamedTuple):
    """``k``, ``v`` bf16 or e4m3 ``[pages, page_size, Hkv, hd]``, whose tokens of one page and head are
    contiguous; ``table`` int32 ``[slots, pages of a row]``. ``v_scale``: of v; that of k belongs to
    ``scale``."""

    k: Tensor
    v: Tensor
    table: Tensor
    v_scale: float = 1.0

    @property
    def fp8(self) -> bool:
        return self.k.dtype == torch.float8_e4m3fn


class Cuts(NamedTuple):
    """Tiles that are cut into ``parts``, int32[n, 4]: the first and the last block of ``KEYS`` keys of each
    tile, its part (-1: it has all keys), 0. ``merges`` int32[m, 4]: first token in q, tokens, first part,
    parts. ``total``: of parts."""

    parts: Tensor
    merges: Tensor
    total: int


class Chunks(NamedTuple):
    """Where all keys are cut, so that results do not depend on what else there is: every ``blocks`` blocks of
    ``KEYS`` keys. ``kept`` float32: see ``kept_by_blocks``."""

    blocks: int
    kept: Tensor


class Units(NamedTuple):
    """Chunks of decode rows, as ``triton/units.py`` makes them: ``tiles`` as those of ``attend``, ``parts``
    and ``merges`` as those of ``Cuts``, all on the GPU. ``most``: chunks of a row."""

    tiles: Tensor
    parts: Tensor
    merges: Tensor
    most: int


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


def parts_of(tiles: Int32s, kv_heads: int, processors: int, most_parts: int = LONG) -> Int32s | None:
    """Into how many parts each of the ``tiles`` (see ``attend``) is cut, ``most_parts`` in all, so that few
    with long histories keep all ``processors`` busy. None: none is."""
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // KEYS)
    ideal = int(blocks.sum()) * kv_heads / processors
    if len(tiles) * kv_heads >= 8 * processors or ideal == 0:
        return None
    counts = np.ones_like(blocks)
    best, found = 0.95 * _last_end(blocks, counts, kv_heads, processors), None
    for pieces in range(1, MOST + 1):  # of the longest
        most = max(8, math.ceil(blocks.max() / pieces))
        counts = np.minimum(-(-blocks // most), MOST)
        if int(counts.sum()) > most_parts:
            break
        end = _last_end(blocks, counts, kv_heads, processors)
        if end < best:
            best, found = end, counts
    return found


def lost(tiles: Int32s, kv_heads: int, head_dim: int, processors: int) -> float:
    """Microseconds, about, that the ``tiles`` take longer than if they were cut into ``parts_of`` them."""
    counts = parts_of(tiles, kv_heads, processors)
    if counts is None:
        return 0.0
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // KEYS)
    whole, cut = (_last_end(blocks, n, kv_heads, processors) for n in (np.ones_like(blocks), counts))
    return BLOCK * head_dim / 128 * (whole - cut)


def _last_end(blocks: Int32s, counts: Int32s, kv_heads: int, processors: int) -> int:
    """When the last processor has done its blocks of keys, where each goes through the list to and fro."""
    units = np.sort(np.repeat(-(-blocks // counts) + PART * (counts > 1), counts))[::-1].repeat(kv_heads)
    rounds = np.pad(units, (0, -len(units) % processors)).reshape(-1, processors)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return int(rounds.sum(0).max())


def order_of(tiles: Int32s, kv_heads: int, processors: int) -> Int32s | None:
    """For ``attend``: which of the ``tiles``, the longest first, each processor takes when, where heads whose
    keys are too many for the L2 cache are to be read one behind the other, or a few. None: all heads of a
    tile at once, which ends no later."""
    blocks = -(-(tiles[:, 2] + tiles[:, 3]) // KEYS)
    if len(tiles) * kv_heads < processors or blocks[0] * KEYS * kv_heads <= CACHED:
        return None
    found, best = None, 1.01 * _last_end(blocks, np.ones_like(blocks), kv_heads, processors)
    for together in (1 << n for n in range(kv_heads.bit_length())):
        if kv_heads % together == 0 and (together == 1 or blocks[0] * KEYS * together <= CACHED):
            order, end = _dealt(blocks, kv_heads, together, processors)
            if end < best:
                found, best = order, end
    return found


def _dealt(blocks: Int32s, kv_heads: int, together: int, processors: int) -> tuple[Int32s, int]:
    """An order of ``attend`` in which so many heads are read ``together``, and when its last processor has
    done its blocks of keys. In each turn who has done least gets the longest tile."""
    tile = np.arange(len(blocks))[None, :, None] * kv_heads
    items = (tile + np.arange(kv_heads).reshape(-1, 1, together)).reshape(-1)
    turns = np.concatenate([np.full(-len(items) % processors, -1), items]).reshape(-1, processors)
    long = np.where(turns < 0, 0, blocks[turns // kv_heads])
    ends = np.zeros(processors, np.int64)
    for turn, lengths in zip(turns, long):
        to, given = np.argsort(ends, kind="stable"), np.argsort(-lengths, kind="stable")
        turn[to], ends[to] = turn[given], ends[to] + lengths[given]
    late = turns[0] < 0  # these have nothing in the first turn
    turns[:, late] = np.roll(turns[:, late], -1, 0)
    return np.ascontiguousarray(turns, np.int32), int(ends.max())


class Cut(NamedTuple):
    """Tiles, of which some have parts: see ``Cuts``."""

    tiles: Int32s
    parts: Int32s
    merges: Int32s


def cut(tiles: Int32s, counts: Int32s) -> Cut:
    """Each of the ``tiles`` in so many parts, the longest first."""
    blocks, row = -(-(tiles[:, 2] + tiles[:, 3]) // KEYS), np.repeat(np.arange(len(tiles)), counts)
    number = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)  # of a tile's parts
    first, behind = number * blocks[row] // counts[row], (number + 1) * blocks[row] // counts[row]
    many = counts > 1
    ids = np.where(many[row], np.arange(len(row)), -1)
    parts = np.stack([first, behind - 1, ids, np.zeros_like(ids)], 1)
    begins = (counts.cumsum() - counts)[many]
    merges = np.stack([tiles[many, 1], tiles[many, 3], begins, counts[many]], 1)
    order = np.argsort(first - behind, kind="stable")
    return Cut(*(np.ascontiguousarray(x, np.int32) for x in (tiles[row][order], parts[order], merges)))


@cache
def _kernel(head_dim: int, group: int, kind: str = "") -> Kernel:
    """Of tiles. ``kind``: CHUNKED, DECODE, WHOLE, FP8, or none of them."""
    rows, width = ROWS // 2 if kind == "DECODE" else ROWS, -(-head_dim // 64) * 64
    stages, raw = (FP8_STAGES, RAW) if kind == "FP8" else (STAGES, 0)
    rings = stages * (4 * KEYS * width + 32) + raw * (2 * KEYS * head_dim + 32)
    shared = rows * width * 2 + rings + 16 + 1024
    return Kernel("prompt_attention.cu", "prompt_attention", _defines(head_dim, group, kind), shared)


@cache
def _merging(head_dim: int, group: int, kind: str = "") -> Kernel:
    """Of what merges their parts."""
    return Kernel("prompt_attention.cu", "merge_parts", _defines(head_dim, group, kind))


def _defines(head_dim: int, group: int, kind: str) -> dict[str, int]:
    stages = FP8_STAGES if kind == "FP8" else STAGES
    return {"HD": head_dim, "GROUP": group, "STAGES": stages} | ({kind: 1} if kind else {})


def kept_by_blocks(head_dim: int) -> int:
    """Floats that the blocks of ``attend`` with ``chunks`` keep of the chunks of a tile that they have been
    through."""
    return processors() * (THREADS - 128) * (head_dim // 2 + 4)


def sums_of(rows: int, most: int, heads: int, head_dim: int) -> int:
    """Floats that ``attend_one`` needs for so many rows of ``most`` chunks."""
    return rows * most * heads * (head_dim + 2)


def attend(
    q: Tensor,
    pages: Pages | None,
    beside: Beside | None,
    tiles: Tensor,
    scale: float,
    out: Tensor,
    cuts: Cuts | None = None,
    chunks: Chunks | None = None,
    order: Tensor | None = None,
) -> None:
    """q bf16 ``[T, Hq * hd]`` -> ``out``, the same shape, contiguous. ``tiles`` int32[n, 4]: slot (-1: keys
    and values are in ``beside``, else in ``pages``), first token in q, its position, how many tokens (at most
    ``tile_tokens``; 0: this tile and those behind it are not there); long histories should come first. Tokens
    that are in no tile are left as they are. With ``chunks`` a token's result depends on nothing but it and
    what is before it; ``cuts`` must be None then. With pages of e4m3 all tiles are of ``pages``.
    ``order`` int32[turns, blocks]: what each block does in each turn, the number of a tile times KV heads and
    a KV head, or -1 from some turn on; each must be there once."""
    dim, group = _heads(q, pages, beside)
    sums = None
    if cuts is not None:
        floats = cuts.total * (q.shape[1] // group // dim) * ROWS * (dim + 2)
        sums = q.new_empty(floats, dtype=torch.float32)
    if chunks is not None:
        assert cuts is None
        assert pages is None or not pages.fp8
        sums = chunks.kept
    params = _params(q, pages, beside, tiles, scale, out, sums, ROWS)
    params.parts = None if cuts is None else cuts.parts.data_ptr()
    params.chunk = 0 if chunks is None else chunks.blocks
    grid = min(processors(), tiles.shape[0] * params.kv_heads)
    if order is not None:
        assert cuts is None
        params.order, (params.turns, grid) = order.data_ptr(), order.shape
    kind = "FP8" if pages is not None and pages.fp8 else "" if chunks is None else "CHUNKED"
    assert kind != "FP8" or beside is None
    kernel = _kernel(dim, group, kind)
    kernel.launch(grid, THREADS, params)
    if cuts is not None:
        params.tiles = cuts.merges.data_ptr()
        _merging(dim, group).launch(len(cuts.merges) * params.kv_heads * SHARES, MERGERS, params)


def attend_one(
    q: Tensor, pages: Pages, units: Units, rows: int, scale: float, out: Tensor, sums: Tensor
) -> None:
    """Decode rows, the first ``rows`` of q and ``out``: the same bits as ``attend`` with ``chunks`` where
    ``units`` are cut. ``sums``: see ``sums_of``."""
    params = _params(q, pages, None, units.tiles, scale, out, sums, 0)
    params.parts, params.tile_count = units.parts.data_ptr(), rows * units.most
    dim, group = _heads(q, pages, None)
    kernel = _kernel(dim, group, "DECODE")
    kernel.launch(min(processors(), params.tile_count * params.kv_heads), THREADS - 128, params)
    if units.most > 1:
        params.tiles = units.merges.data_ptr()
        _merging(dim, group, "DECODE").launch(rows * params.kv_heads, MERGERS, params)


def takes_whole(device: Device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether ``attend_whole`` may be used."""
    return device.wgmma and dtype == torch.bfloat16 and head_dim % 8 == 0 and 48 < head_dim <= 128


def tiles_of(ends: Tensor, tokens: int) -> Tensor:
    """For ``attend_whole``, on the device: ``ends`` int[N + 1]: where each of N texts begins, and where the
    last one ends, of so many ``tokens`` -> int32[n, 4]: keys, first token, its place in its text, tokens."""
    begins, lengths = ends[:-1], ends.diff()
    counts = (lengths + ROWS - 1) // ROWS
    until = counts.cumsum(0)
    number = torch.arange(-(-tokens // ROWS) + len(lengths), device=ends.device)
    text = torch.searchsorted(until, number, right=True).clamp(max=len(lengths) - 1)
    start = (number - until[text] + counts[text]) * ROWS
    count = (lengths[text] - start).clamp(min=0, max=ROWS)
    tiles: Tensor = torch.stack([lengths[text], begins[text] + start, start, count], 1).int()
    return tiles


def attend_whole(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
    """Every token sees all of its text. q, k, v bf16 ``[T, H, hd]``, whose heads are contiguous and whose
    tokens lie equally far apart -> contiguous; ``tiles``: see ``tiles_of``."""
    tokens, heads, dim = q.shape
    assert q.stride() == k.stride() == v.stride()
    assert q.stride()[1:] == (dim, 1)
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    maps = [
        _map(x.data_ptr(), (dim, heads, tokens), (2 * dim, 2 * q.stride(0)), (64, 1, ROWS)) for x in (q, k, v)
    ]
    params = _Params(
        *maps, *maps[1:], out.data_ptr(), None, tiles.data_ptr(), None, None, None,
        tiles.shape[0], 0, heads, 1, scale * LOG2E, 0, 1.0,
    )  # fmt: skip
    grid = min(processors(), tiles.shape[0] * heads)
    _kernel(dim, 1, "WHOLE").launch(grid, THREADS, params)
    return out


def _heads(q: Tensor, pages: Pages | None, beside: Beside | None) -> tuple[int, int]:
    """Values of a head, and query heads of a KV head."""
    there = beside or pages
    assert there is not None
    kv_heads, dim = there.k.shape[-2:]
    return dim, q.shape[1] // dim // kv_heads


def _params(
    q: Tensor,
    pages: Pages | None,
    beside: Beside | None,
    tiles: Tensor,
    scale: float,
    out: Tensor,
    sums: Tensor | None,
    rows: int,
) -> _Params:
    """``rows`` of a tile; 0: those of one token."""
    tokens, (dim, group) = q.shape[0], _heads(q, pages, beside)
    heads = q.shape[1] // dim
    kv_heads = heads // group
    assert q.stride(1) == 1
    assert out.is_contiguous()
    table, stride, page_size, page_rows = None, 0, 1, 0
    if pages is not None:
        count, page_size = pages.k.shape[:2]
        assert pages.k.stride() == pages.v.stride()
        assert pages.k.stride()[1:] == (dim, page_size * dim, 1)
        page_rows, rest = divmod(pages.k.stride(0), dim)
        assert not rest, "pages begin within a row"
        rows_there = (count - 1) * page_rows + kv_heads * page_size
        wide, size = (dim, 1) if pages.fp8 else (64, 2)
        in_pages = [
            _map(x.data_ptr(), (dim, rows_there), (size * dim,), (wide, 16), pages.fp8)
            for x in (pages.k, pages.v)
        ]
        table, stride = pages.table.data_ptr(), pages.table.stride(0)
    if beside is not None:
        assert beside.k.stride()[1:] == (dim, 1) == beside.v.stride()[1:]
        in_rows = [
            _map(x.data_ptr(), (kv_heads * dim, tokens), (2 * x.stride(0),), (64, KEYS)) for x in beside
        ]
    box = (64, group, max(1, rows // group))
    return _Params(
        _map(q.data_ptr(), (dim, heads, tokens), (2 * dim, 2 * q.stride(0)), box),
        *(in_rows if pages is None else in_pages),
        *(in_pages if beside is None else in_rows),
        out.data_ptr(), table, tiles.data_ptr(), None, None, None if sums is None else sums.data_ptr(),
        tiles.shape[0], stride, kv_heads, page_size, scale * LOG2E, 0,
        1.0 if pages is None else pages.v_scale, 0, page_rows,
    )  # fmt: skip


_map = lru_cache(1 << 10)(tensor_map)

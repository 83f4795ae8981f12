"""Which tokens decode rows share, and how to attend to them once for all:
planned on the host when the set of rows changes.

Rows whose page tables begin alike form a tree. A node of it is worth a segment of its own if reading its
tokens once and joining the results costs less than reading them for every row; else its tokens fall to the
nodes below, and at last to the rows. So a system prompt under several documents becomes two levels, or one,
whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.attention.base import Attention, AttentionShape, DevicePrefixes
from sgla.device import Device
from sgla.kernels.device import this_device
from sgla.kernels.triton.cascade import ITEM, tile_rows

Int32s = NDArray[np.int32]

# Measured on an H200.
# What rows share comes from the L2 cache all but once, so a plain step reads it fast, too.
READ, JOIN = 9.0e6, 3.0e6  # bytes a microsecond, of KV and of partial results
MULTIPLY = 2.7e8  # FLOP a microsecond
FIXED = 20.0  # microseconds a layer, for the kernels that a plain step does not need
LEVELS = 6  # of the tree, at most
PARTS = 4  # partial results a row, on average over as many rows as there may be; levels that are segments
CHUNK = 256  # tokens of an item, at least


class Prefixes(NamedTuple):
    """What rows share, on the host. ``items`` and ``first``: see ``kernels/triton/cascade.py``. ``skip``
    int32[R]: tokens of each row that the items cover; ``order`` int32[R]: the rows, those that share lie
    together."""

    items: Int32s
    order: Int32s
    skip: Int32s
    first: Int32s
    gain: float  # microseconds a layer that this is estimated to save


class _Segment(NamedTuple):
    begin: int  # tokens
    end: int
    place: int  # in the order
    rows: int


class Cascade:
    """Plans for batches of ``shape``. ``processors``: multiprocessors of the GPU."""

    def __init__(self, shape: AttentionShape, processors: int) -> None:
        self._shape, self._processors = shape, processors
        self._token_bytes = (
            2 * shape.kv_heads * shape.head_dim * (1 if shape.kv_dtype else shape.dtype.itemsize)
        )
        self._known: tuple[bytes, int, int] | None = None
        self._plan: Prefixes | None = None

    @classmethod
    def of(
        cls, shapes: Sequence[AttentionShape], backend: Attention, device: Device | None = None
    ) -> Cascade | None:
        """None where the backend does not take prefixes, no layer sees all tokens, or layers have several
        kinds of heads."""
        shape = shapes[0]
        if not backend.decode.cascades or 0 not in shape.windows or len(shapes) > 1:
            return None
        return cls(shape, (device or this_device()).multiprocessors)

    def plan(
        self, slots: Int32s, starts: Int32s, page_table: Int32s, admissions: int, batch: int
    ) -> Prefixes | None:
        """None if sharing does not pay. ``starts``: positions of the tokens to compute. ``admissions``
        changes when a slot gets another request; else pages are only appended, and the plan stays as it is.
        ``batch``: rows with padding."""
        key = (slots.tobytes(), admissions, batch)
        if key != self._known:
            tile = tile_rows(batch, self._shape.group, self._shape.head_dim)
            self._known, self._plan = key, self._make(slots, starts, page_table, tile)
        return self._plan

    def _make(self, slots: Int32s, starts: Int32s, page_table: Int32s, tile_rows: int) -> Prefixes | None:
        whole = starts // self._shape.page_size  # pages that are full before this step
        order = np.argsort(np.where(whole > 0, page_table[slots, 0], -1), kind="stable").astype(np.int32)
        tree = _Tree(
            page_table[slots[order], : max(1, int(whole.max()))],
            whole[order],
            self._gain,
            self._shape.page_size,
            tile_rows,
        )
        tree.split(0, len(order), 0, 0, 0, 0)
        if tree.gain <= FIXED:
            return None
        order, skip = order[tree.order], np.zeros(len(order), np.int32)
        for segment in tree.segments:  # parents come before their children
            skip[order[segment.place : segment.place + segment.rows]] = segment.end
        items, first = self._items(tree.segments, slots, order, tile_rows)
        return Prefixes(items, order, skip, first, tree.gain)

    def _gain(self, rows: int, tokens: int, tiles: int) -> float:
        """Microseconds a layer that a segment saves."""
        shape = self._shape
        saved = (rows - 1) * tokens * self._token_bytes / READ
        flops = 4 * tokens * tiles * 128 * shape.kv_heads * shape.head_dim
        return saved - flops / MULTIPLY - 2 * rows * shape.heads * shape.head_dim * 4 / JOIN

    def _items(
        self, segments: list[_Segment], slots: Int32s, order: Int32s, tile_rows: int
    ) -> tuple[Int32s, Int32s]:
        """Cut segments into tiles of rows and chunks of tokens,
        about as many as there are multiprocessors."""
        tiles = [-(-s.rows // tile_rows) for s in segments]
        work = sum(t * (s.end - s.begin) for t, s in zip(tiles, segments)) * self._shape.kv_heads
        chunk = max(CHUNK, work // self._processors)
        while True:
            steps = [_even(s.end - s.begin, chunk) for s in segments]
            cuts = [-(-(s.end - s.begin) // step) for s, step in zip(segments, steps)]
            parts = sum(c * s.rows for c, s in zip(cuts, segments))
            count = sum(c * t for c, t in zip(cuts, tiles))
            if parts <= PARTS * self._shape.max_rows and count <= most_items(self._shape.max_rows):
                break  # at the latest when no segment is cut
            chunk *= 2
        items: list[tuple[int, ...]] = []
        counts = np.zeros(len(order), np.int32)
        for segment, step, cut in zip(segments, steps, cuts):
            members = order[segment.place : segment.place + segment.rows]
            slot, part = int(slots[members[0]]), int(counts[members[0]])
            counts[members] += cut
            for i, begin in enumerate(range(segment.begin, segment.end, step)):
                end = min(begin + step, segment.end)
                for place in range(0, segment.rows, tile_rows):
                    rows = min(tile_rows, segment.rows - place)
                    items.append((slot, begin, end, segment.place + place, rows, part + i))
        items.sort(key=lambda item: item[1] - item[2])
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return np.array(items, np.int32), first


def _even(tokens: int, chunk: int) -> int:
    """About ``chunk``, so that parts of ``tokens`` are equal."""
    return -(-tokens // max(1, round(tokens / chunk)) // 64) * 64


class _Tree:
    """``pages`` [R, P] sorted by their first column, of which each row may share ``whole`` [R]."""

    def __init__(
        self,
        pages: Int32s,
        whole: Int32s,
        gain: Callable[[int, int, int], float],
        page_size: int,
        tile_rows: int,
    ) -> None:
        self._pages, self._whole, self._gain = pages, whole, gain
        self._page_size, self._tile_rows = page_size, tile_rows
        self.order = np.arange(len(pages))
        self.segments: list[_Segment] = []
        self.gain = 0.0

    def split(self, low: int, high: int, depth: int, begin: int, level: int, parts: int) -> None:
        """Rows ``order[low:high]`` share ``depth`` pages, of which ``parts`` segments cover ``begin``."""
        members = self.order[low:high]
        whole = self._whole[members]
        here = self._pages[members, depth] if depth < self._pages.shape[1] else np.full(len(members), -1)
        here = np.where(whole > depth, here, -1)
        if depth:
            rank = np.argsort(here, kind="stable")
            self.order[low:high], here = members[rank], here[rank]
        edges = np.flatnonzero(np.diff(here)) + 1
        for a, b in zip([0, *edges.tolist()], [*edges.tolist(), high - low]):
            if b - a > 1 and here[a] >= 0:
                self._visit(low + a, low + b, depth, begin, level, parts)

    def _visit(self, low: int, high: int, depth: int, begin: int, level: int, parts: int) -> None:
        """A node of the tree: rows that share the page at ``depth``."""
        members = self.order[low:high]
        part = self._pages[members, depth : int(self._whole[members].min())]
        same = (part == part[0]).all(0)
        depth += len(same) if same.all() else int(same.argmin())
        rows, tokens = high - low, (depth - begin) * self._page_size
        gain = self._gain(rows, tokens, -(-rows // self._tile_rows))
        if gain > 0 and parts < PARTS:
            self.gain += gain
            parts += 1
            self.segments.append(_Segment(begin * self._page_size, depth * self._page_size, low, rows))
            begin = depth
        if level < LEVELS:
            self.split(low, high, depth, begin, level + 1, parts)


def most_items(rows: int) -> int:
    """Room for items in batches of at most ``rows``."""
    return max(1024, PARTS * rows)


def pack(prefixes: Prefixes | None, rows: int, items: int = 0) -> Int32s:
    """One array for ``unpack``, of ``rows`` rows,
    the last of which may be padding, with room for ``items``."""
    items = max(items, len(prefixes.items) if prefixes is not None else 0)
    flat = np.zeros(1 + items * ITEM + 3 * rows + 1, np.int32)
    if prefixes is not None:
        n = len(prefixes.skip)
        order = 1 + items * ITEM
        flat[0] = len(prefixes.items)
        flat[1 : 1 + prefixes.items.size] = prefixes.items.ravel()
        flat[order : order + n] = prefixes.order
        flat[order + rows : order + rows + n] = prefixes.skip
        flat[order + 2 * rows : order + 2 * rows + n + 1] = prefixes.first
        flat[order + 2 * rows + n + 1 :] = prefixes.first[-1]
    return flat


def unpack(flat: Tensor, rows: int) -> DevicePrefixes:
    valid, items, order, skip, first = flat.split([1, len(flat) - 2 - 3 * rows, rows, rows, rows + 1])
    return DevicePrefixes(valid, items, order, skip, first)


def workspace(shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """``part`` and ``part_ml`` of the kernel."""
    size = (PARTS * shape.max_rows, shape.heads)
    return torch.empty(*size, shape.head_dim, device="cuda"), torch.empty(*size, 2, device="cuda")

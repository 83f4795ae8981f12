"""Our CUDA kernels:
lengths and pages are read on the device and work is cut evenly, so a graph replays them as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.attention import cascade
from sgla.attention.base import RISING, AttentionShape, DeviceBatch, Int32s, cut, kv_beside
from sgla.device import Device
from sgla.kernels.cuda import decode_attention, prompt_attention
from sgla.kernels.cuda.decode_attention import PrefixParts, Projection
from sgla.kernels.cuda.prompt_attention import Beside, Pages
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton.cascade import attend_prefixes

TILE = decode_attention.TILE
# Of a captured step that splits histories: its parts, at most; and those of all KV heads, each of which has
# 66 KB of sums where heads have 128 values.
SPLIT, SPLIT_HEADS = 256, 512


class NativeDecode:
    name, captured, grows, leaves = "native", True, False, True

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._kernel = decode_attention.DecodeAttention(
            shape.max_rows, shape.kv_heads, shape.group, shape.head_dim
        )
        self._processors = device.multiprocessors
        self.cascades = shape.alone and shape.kv_dtype not in ("int8", "int4")
        self._parts = cascade.workspace(shape) if self.cascades else None

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        """Why this kernel cannot be used, or None."""
        if shape.uneven:
            return shape.uneven
        if shape.chunked:
            return "windows of layers are chunks"
        if shape.rising:
            return RISING
        return decode_attention.refuses(
            device, shape.dtype, shape.head_dim, shape.group, shape.page_size, shape.max_rows
        )

    @property
    def fused(self) -> NativeDecode:
        return self

    def fuses(self, kv: KVLayer) -> bool:
        return True

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        batch: DeviceBatch,
        scoring: Scoring,
        projection: Projection | None = None,
    ) -> Tensor:
        """With ``projection``, q is the output of the q, k, v projection: see the kernel."""
        n, prefix = batch.decode_rows, None
        positions = batch.positions[:n] if batch.turned and projection is not None else None
        ends = batch.ends if projection is None else None
        if batch.prefixes is not None and not scoring.window:
            valid, items, order, skip, first = batch.prefixes
            assert projection is None, "the prefixes' kernel wants q"
            assert self._parts is not None
            attend_prefixes(
                q, kv.k, kv.v, batch.pages(kv.group), items, valid, order, first, *self._parts,
                scoring.scale * kv.k_scale, scoring.softcap, self._processors
            )  # fmt: skip
            prefix = PrefixParts(skip, first, *self._parts)
        return self._kernel(
            q, kv.k, kv.v, batch.pages(kv.group), batch.slots[:n], batch.kv_len[:n],
            batch.cum[scoring.window],
            scoring.scale, scoring.window, scoring.softcap, projection, prefix, (kv.k_scale, kv.v_scale),
            scoring.sinks, kv.scales, positions, ends,
        )  # fmt: skip


class NativePrompts:
    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self.tile = prompt_attention.tile_tokens(shape.group)
        self._shape, self._processors = shape, device.multiprocessors
        self.splits = NativeSplits(shape, device)

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        """Why this kernel cannot be used, or None."""
        return no_pages(shape) or NativeExtend.refuses(shape, device)

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        pages = Pages(kv.k, kv.v, page_table, kv.v_scale)
        prompt_attention.attend(q, pages, None, tiles, scoring.scale * kv.k_scale, out)

    def lost(self, tiles: Int32s) -> float:
        return prompt_attention.lost(tiles, self._shape.kv_heads, self._shape.head_dim, self._processors)


class NativeSplits:
    """The plan: tiles, their parts, and what is merged of these, as ``prompt_attention.Cuts`` has them."""

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._shape, self._processors = shape, device.multiprocessors
        self._parts = max(2, min(SPLIT, SPLIT_HEADS // shape.kv_heads))
        self.tiles = self._parts // 2
        self._lengths = [self._parts, self._parts, self.tiles]
        self.room = sum(self._lengths)

    def plan(self, tiles: Int32s) -> Int32s | None:
        counts = prompt_attention.parts_of(tiles, self._shape.kv_heads, self._processors, self._parts)
        if counts is None:
            return None
        plan = np.zeros((self.room, 4), np.int32)
        for rows, made in zip(
            np.split(plan, np.cumsum(self._lengths)[:-1]), prompt_attention.cut(tiles, counts)
        ):
            rows[: len(made)] = made
        return plan

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        tiles, parts, merges = tiles[: self.room].split(self._lengths)
        cuts = prompt_attention.Cuts(parts, merges, self._parts)
        pages = Pages(kv.k, kv.v, page_table, kv.v_scale)
        prompt_attention.attend(q, pages, None, tiles, scoring.scale * kv.k_scale, out, cuts)


def no_pages(shape: AttentionShape) -> str | None:
    """Why the kernel of prompts cannot read pages of this kind, or None."""
    return None if shape.kv_dtype in ("", "fp8") else f"the KV cache is {shape.kv_dtype}"


class NativeExtend:
    """Reads whole prompts as the projection left them, and others from the pages."""

    name, captured, grows, narrow = "native", True, False, False
    beside = True  # whether it reads whole prompts there

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._shape, self._tile = shape, prompt_attention.tile_tokens(shape.group)
        self.in_place = False  # whether some rows are whole prompts
        self._paged = False  # whether some are not
        self._tiles, self._processors = torch.empty(0), device.multiprocessors
        self._cuts: prompt_attention.Cuts | None = None
        self._order: Tensor | None = None

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        """Why this kernel cannot be used, or None."""
        if shape.mixed:
            return shape.mixed
        if shape.sinks:
            return "layers have sinks"
        if shape.rising:
            return RISING
        if shape.windows != {0}:
            return "layers have a sliding window"
        if shape.together:
            return "tokens of a picture see each other"
        if shape.softcap:
            return "scores have a soft cap"
        return prompt_attention.refuses(device, shape.dtype, shape.head_dim, shape.group, shape.page_size)

    def plan(self, batch: DeviceBatch) -> None:
        rows = batch.extend
        assert rows is not None
        starts = rows.kv_lens - rows.q_lens
        whole = (starts == 0) & self.beside
        self.in_place, self._paged = bool(whole.any()), not whole.all()
        tiles = cut(np.where(whole, -1, rows.slots), starts, rows.q_lens, 0, self._tile)
        counts = prompt_attention.parts_of(tiles, self._shape.kv_heads, self._processors)
        self._cuts = self._order = None
        if counts is None:
            order = prompt_attention.order_of(tiles, self._shape.kv_heads, self._processors)
            if order is None:
                self._tiles = to_gpu(tiles)
                return
            sent = to_gpu(np.concatenate([tiles.reshape(-1), order.reshape(-1)]))
            self._tiles = sent[: tiles.size].view(tiles.shape)
            self._order = sent[tiles.size :].view(order.shape)
            return
        made = prompt_attention.cut(tiles, counts)
        sent = to_gpu(np.concatenate(made))
        self._tiles, parts, merges = sent.split([len(part) for part in made])
        self._cuts = prompt_attention.Cuts(parts, merges, int(counts.sum()))

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        pages = Pages(kv.k, kv.v, batch.pages(kv.group), kv.v_scale) if self._paged else None
        rows = Beside(*kv_beside(q, self._shape)) if self.in_place else None
        scale = scoring.scale * (kv.k_scale if self._paged else 1.0)
        prompt_attention.attend(q, pages, rows, self._tiles, scale, out, self._cuts, order=self._order)


class PagedExtend(NativeExtend):
    """Reads all prompts from the pages, which may have 8 bits."""

    name, narrow, beside = "native paged", True, False

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return no_pages(shape) or NativeExtend.refuses(shape, device)


def to_gpu(numbers: Any) -> Tensor:
    return torch.from_numpy(numbers).pin_memory().to("cuda", non_blocking=True)

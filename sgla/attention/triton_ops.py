"""The portable backend: Triton kernels for every head size up to ``HEAD_DIM``, window and soft cap."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgla.attention.base import AttentionShape, DeviceBatch, Int32s, cut
from sgla.attention.torch_ops import until_of
from sgla.device import Device
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import attention, turning

HEAD_DIM = 512  # beyond, not even the smallest tiles fit into the shared memory of a block


def refuses(shape: AttentionShape, device: Device) -> str | None:
    """Why the kernels cannot be used, or None."""
    if (values := max(shape.head_dim, shape.v_dim)) > HEAD_DIM:
        return f"heads of {values} values, and it ends at {HEAD_DIM}"
    turns = shape.kv_dtype in ("int8", "int4")
    if turns and turning.shared(shape.head_dim, shape.dtype.itemsize) > device.shared:
        return f"keys of {shape.head_dim} values in int8 need more shared memory than {device.name} has"
    return None


class TritonDecode:
    name, captured, grows, cascades, leaves, fused = "triton", True, False, False, True, None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._kv_heads, self._device = shape.kv_heads, device

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape, device)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        n = batch.decode_rows
        splits = attention.splits_for(n, self._kv_heads, self._device.multiprocessors)
        return attention.decode(
            q, kv.k, kv.v, batch.pages(kv.group), batch.slots[:n], batch.kv_len[:n],
            scoring.scale * kv.k_scale, scoring.window, scoring.softcap, splits, kv.v_scale,
            self._device.shared, scoring.sinks, kv.scales, scoring.chunked, scoring.slopes, batch.ends,
        )  # fmt: skip


class TritonPrompts:
    splits = None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._cut = attention.extend_cut(
            max(shape.head_dim, shape.v_dim), shape.dtype.itemsize, device.shared
        )
        self.tile = self._cut.m

    def forward(
        self,
        q: Tensor,
        kv: KVLayer,
        page_table: Tensor,
        tiles: Tensor,
        scoring: Scoring,
        out: Tensor,
        until: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> None:
        """``until``, ``origin`` int64[T]: see ``Media`` and ``Canvas``."""
        attention.extend(
            q,
            kv.k,
            kv.v,
            page_table,
            tiles,
            scoring.scale * kv.k_scale,
            out,
            self._cut,
            scoring.window,
            scoring.softcap,
            kv.v_scale,
            scoring.sinks,
            kv.scales,
            until,
            scoring.chunked,
            scoring.slopes,
            origin,
        )

    def lost(self, tiles: Int32s) -> float:
        return math.inf


class TritonExtend:
    name, captured, grows, narrow, in_place = "triton", True, False, True, False
    kind: Callable[[AttentionShape, Device], Any] = TritonPrompts

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._tiles = torch.empty(0)
        self._prompts = self.kind(shape, device)

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape, device)

    def plan(self, batch: DeviceBatch) -> None:
        rows = batch.extend
        assert rows is not None
        tiles = cut(rows.slots, rows.kv_lens - rows.q_lens, rows.q_lens, 0, self._prompts.tile)
        self._tiles = torch.from_numpy(tiles).pin_memory().to(batch.ids.device, non_blocking=True)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        more: tuple[Tensor, ...] = () if (until := until_of(batch)) is None else (until,)
        if (canvas := batch.canvas) is not None:
            more = canvas.until[batch.decode_rows :], canvas.origin[batch.decode_rows :]
        self._prompts.forward(q, kv, batch.pages(kv.group), self._tiles, scoring, out, *more)

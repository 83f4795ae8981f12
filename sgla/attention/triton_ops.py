"""The portable backend: Triton kernels for every head size, window and soft cap."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.attention.base import DeviceBatch, Shape, cut
from sgla.device import Device
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import attention


class TritonDecode:
    name = "triton"
    cascades = False

    def __init__(self, shape: Shape, device: Device) -> None:
        self._kv_heads, self._device = shape.kv_heads, device

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        n = batch.decode_rows
        splits = attention.splits_for(n, self._kv_heads, self._device.multiprocessors)
        return attention.decode(
            q, kv.k, kv.v, batch.page_table, batch.slots[:n], batch.kv_len[:n],
            scale * kv.k_scale, window, softcap, splits, kv.v_scale, self._device.shared,
        )  # fmt: skip


class TritonExtend:
    name = "triton"

    def __init__(self, shape: Shape, device: Device) -> None:
        self._tiles = torch.empty(0)
        self._prompts = TritonPrompts(shape, device)

    def plan(self, batch: DeviceBatch) -> None:
        rows = batch.extend
        assert rows is not None
        tiles = cut(rows.slots, rows.kv_lens - rows.q_lens, rows.q_lens, 0, self._prompts.tile)
        self._tiles = torch.from_numpy(tiles).pin_memory().to(batch.ids.device, non_blocking=True)

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
        self._prompts.forward(q, kv, batch.page_table, self._tiles, scale, window, softcap, out)


class TritonPrompts:
    def __init__(self, shape: Shape, device: Device) -> None:
        self._cut = attention.extend_cut(shape.head_dim, shape.dtype.itemsize, device.shared)
        self.tile = self._cut.m

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
        attention.extend(
            q, kv.k, kv.v, page_table, tiles, scale * kv.k_scale, out, self._cut, window, softcap, kv.v_scale
        )

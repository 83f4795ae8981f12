"""The portable backend: Triton kernels for every head size, window and soft cap."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.attention.base import DeviceBatch, Shape
from sgla.attention.torch_ops import rows_of
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import attention


class TritonDecode:
    name = "triton"
    cascades = False

    def __init__(self, shape: Shape) -> None:
        self._kv_heads = shape.kv_heads
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        n = batch.decode_rows
        splits = attention.splits_for(n, self._kv_heads, self._processors)
        return attention.decode(
            q, kv.k, kv.v, batch.page_table, batch.slots[:n], batch.kv_len[:n],
            scale * kv.k_scale, window, softcap, splits, kv.v_scale,
        )  # fmt: skip


class TritonExtend:
    name = "triton"

    def __init__(self) -> None:
        self._tiles = torch.empty(0)
        self._part: DeviceBatch | None = None

    def plan(self, batch: DeviceBatch) -> None:
        assert batch.extend is not None
        tiles = attention.extend_tiles(batch.extend.q_lens.tolist(), "cpu").pin_memory()
        self._tiles = tiles.to(batch.ids.device, non_blocking=True)
        self._part = rows_of(batch, batch.decode_rows, batch.rows)

    def forward(
        self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        part = self._part
        assert part is not None
        return attention.extend(
            q, kv.k, kv.v, batch.page_table, part.slots, part.q_start, part.kv_len, self._tiles,
            scale * kv.k_scale, window, softcap, kv.v_scale,
        )  # fmt: skip

"""Multi-head latent attention: what ``triton_ops.py`` is to other heads, and decode rows by a CUDA kernel."""

from __future__ import annotations

import math

from torch import Tensor

from sgla.attention.base import AttentionShape, DeviceBatch, Int32s
from sgla.attention.triton_ops import TritonExtend
from sgla.device import Device
from sgla.kernels.cuda import latent_attention
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import attention, latent

CONTENT = 512  # values of a latent without those that are rotated; beyond, sums do not fit into registers


def refuses(shape: AttentionShape) -> str | None:
    """Why the kernels cannot be used, or None."""
    if shape.v_dim > CONTENT:
        return f"latents of {shape.v_dim} values, and it ends at {CONTENT}"
    if shape.windows != {0} or shape.softcap or shape.sinks:
        return "latents with a window, a soft cap or sinks"
    return None


class LatentDecode:
    name, captured, grows, cascades, leaves, fused = "triton", True, False, False, False, None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._device = device

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        n, heads = batch.decode_rows, q.shape[1] // kv.k.shape[3]
        blocks = -(-heads // latent.MOST_HEADS)
        return latent.decode(
            q,
            kv.k,
            kv.v.shape[3],
            batch.pages(kv.group),
            batch.slots[:n],
            batch.kv_len[:n],
            scoring.scale,
            attention.splits_for(n, blocks, self._device.multiprocessors),
            kv.k_scale,
            self._device.shared,
            own=kv.part,
        )


class NativeLatentDecode:
    name, captured, grows, cascades, leaves, fused = "native", True, False, False, False, None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._device = device

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        if shape.kv_dtype:
            return f"the KV cache is {shape.kv_dtype}"
        return refuses(shape) or latent_attention.refuses(
            device, shape.dtype, shape.head_dim, shape.v_dim, shape.page_size
        )

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        n, heads = batch.decode_rows, q.shape[1] // kv.k.shape[3]
        return latent_attention.decode(
            q,
            kv.k,
            kv.v.shape[3],
            batch.pages(kv.group),
            batch.slots[:n],
            batch.kv_len[:n],
            scoring.scale,
            latent_attention.splits_for(n, heads, self._device.multiprocessors),
            kv.part,
        )


class LatentPrompts:
    splits = None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._cut = latent.extend_cut(shape.head_dim, shape.v_dim, shape.dtype.itemsize, device.shared)
        self.tile = self._cut.m

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        content = kv.v.shape[3]
        latent.extend(q, kv.k, content, page_table, tiles, scoring.scale, out, self._cut, kv.k_scale, kv.part)

    def lost(self, tiles: Int32s) -> float:
        return math.inf


class LatentExtend(TritonExtend):
    kind = LatentPrompts

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        super().forward(q, kv.behind(batch.decode_rows), batch, scoring, out)

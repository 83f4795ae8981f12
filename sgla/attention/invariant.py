"""Attention whose results for a token are the same bits in every batch:
see ``kernels/triton/invariant.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from sgla.attention.base import RISING, AttentionShape, DeviceBatch
from sgla.attention.torch_ops import rows_of
from sgla.device import Device
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import invariant

HEAD_DIM = 256
CHUNK, CHUNKS = 512, 32  # tokens of a chunk, at least; chunks of the longest history, at most


def chunk_of(shape: AttentionShape) -> int:
    """Tokens of a chunk: it depends on nothing that changes while the server runs."""
    return CHUNK * max(1, -(-shape.context_len // (CHUNK * CHUNKS)))


class InvariantDecode:
    name, captured, grows, cascades, leaves, fused = "invariant", True, False, False, False, None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._chunk = chunk_of(shape)
        size = (shape.max_rows, shape.heads, -(-shape.context_len // self._chunk))
        self._parts = (
            torch.empty(*size, shape.head_dim, device="cuda"),
            torch.empty(*size, 2, device="cuda"),
        )
        self._q_start = torch.arange(shape.max_rows + 1, dtype=torch.int32, device="cuda")
        self._tiles = torch.stack([self._q_start, torch.zeros_like(self._q_start)], 1)

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        n = batch.decode_rows
        return invariant.attend(
            q, kv.k, kv.v, batch.pages(kv.group), batch.slots[:n], self._q_start, batch.kv_len[:n],
            self._tiles[:n],
            scoring.scale * kv.k_scale, scoring.window, scoring.softcap, self._chunk, self._parts, kv.v_scale,
            scoring.sinks,
        )  # fmt: skip


class InvariantExtend:
    name, captured, grows, narrow, in_place = "invariant", True, False, True, False

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._chunk, self._group = chunk_of(shape), shape.group
        self._tiles = torch.empty(0)
        self._part: DeviceBatch | None = None

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape)

    def plan(self, batch: DeviceBatch) -> None:
        assert batch.extend is not None
        tiles = invariant.tiles_of(batch.extend.q_lens.tolist(), self._group, "cpu").pin_memory()
        self._tiles = tiles.to(batch.ids.device, non_blocking=True)
        self._part = rows_of(batch, batch.decode_rows, batch.rows)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        part = self._part
        assert part is not None
        y = invariant.attend(
            q, kv.k, kv.v, batch.pages(kv.group), part.slots, part.q_start, part.kv_len, self._tiles,
            scoring.scale * kv.k_scale, scoring.window, scoring.softcap, self._chunk, None, kv.v_scale,
            scoring.sinks,
        )  # fmt: skip
        out.copy_(y)


def refuses(shape: AttentionShape) -> str | None:
    """Why these kernels cannot be used, or None."""
    if shape.mixed:
        return shape.mixed
    if shape.together:
        return "tokens of a picture see each other"
    if shape.chunked:
        return "windows of layers are chunks"
    if shape.rising:
        return RISING
    if shape.kv_dtype in ("int8", "int4"):
        return f"its kernels read no KV cache in {shape.kv_dtype}"
    if shape.head_dim > HEAD_DIM:
        return f"heads of {shape.head_dim} values, and its kernels end at {HEAD_DIM}"
    if shape.group > invariant.ROWS:
        return f"they take at most {invariant.ROWS} query heads a KV head, not {shape.group}"
    return None

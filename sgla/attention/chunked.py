"""Attention whose results for a token are the same bits in every batch, by our CUDA kernel for prompts: all
histories are cut at the same places, see ``csrc/cuda/prompt_attention.cu``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgla.attention.base import AttentionShape, DeviceBatch, Int32s, cut
from sgla.attention.native import NativeExtend, to_gpu
from sgla.device import Device
from sgla.kernels.cuda import prompt_attention
from sgla.kernels.cuda.prompt_attention import KEYS, Chunks, Pages
from sgla.kernels.ops import KVLayer, Scoring
from sgla.kernels.triton import units

CHUNK, CHUNKS = 1024, 32  # tokens of a chunk, at least; chunks of the longest history, at most


def blocks_of(shape: AttentionShape) -> int:
    """Blocks of keys of a chunk: it depends on nothing that changes while the server runs."""
    return CHUNK // KEYS * max(1, -(-shape.context_len // (CHUNK * CHUNKS)))


def chunks_of(shape: AttentionShape) -> Chunks:
    kept = torch.empty(prompt_attention.kept_by_blocks(shape.head_dim), device="cuda")
    return Chunks(blocks_of(shape), kept)


def refuses(shape: AttentionShape, device: Device) -> str | None:
    """Why these kernels cannot be used, or None."""
    if shape.kv_dtype:
        return "the KV cache has 8 bits"
    return NativeExtend.refuses(shape, device)


class ChunkedDecode:
    name, captured, grows, cascades, leaves, fused = "chunked", True, False, False, False, None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._blocks = blocks_of(shape)
        most = -(-shape.context_len // (self._blocks * KEYS))
        self._room = units.room(shape.max_rows, most)
        floats = prompt_attention.sums_of(shape.max_rows, most, shape.heads, shape.head_dim)
        self._sums = torch.empty(floats if most > 1 else 1, device="cuda")

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape, device)

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        n, out = batch.decode_rows, q.new_empty(q.shape)
        if batch.units is None:
            batch.units = units.units_of(batch.slots[:n], batch.kv_len[:n], self._blocks, self._room)
        pages = Pages(kv.k, kv.v, batch.pages(kv.group))
        prompt_attention.attend_one(q, pages, batch.units, n, scoring.scale, out, self._sums)
        return out


class ChunkedExtend:
    name, captured, grows, narrow, in_place = "chunked", True, False, False, False

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self._prompts, self._tiles = ChunkedPrompts(shape, device), torch.empty(0)

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        return refuses(shape, device)

    def plan(self, batch: DeviceBatch) -> None:
        rows = batch.extend
        assert rows is not None
        self._tiles = to_gpu(cut(rows.slots, rows.kv_lens - rows.q_lens, rows.q_lens, 0, self._prompts.tile))

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        self._prompts.forward(q, kv, batch.pages(kv.group), self._tiles, scoring, out)


class ChunkedPrompts:
    splits = None

    def __init__(self, shape: AttentionShape, device: Device) -> None:
        self.tile, self._chunks = prompt_attention.tile_tokens(shape.group), chunks_of(shape)

    def forward(
        self, q: Tensor, kv: KVLayer, page_table: Tensor, tiles: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        pages = Pages(kv.k, kv.v, page_table)
        prompt_attention.attend(q, pages, None, tiles, scoring.scale, out, chunks=self._chunks)

    def lost(self, tiles: Int32s) -> float:
        return math.inf

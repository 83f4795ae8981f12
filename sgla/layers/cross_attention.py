"""Attention to what an encoder has made of something else than the tokens: keys and values are computed once,
when a request takes its slot, and stand in a table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sgla.kernels.batch import ForwardBatch
from sgla.kernels.crossing import cross_attention
from sgla.layers.build import Build
from sgla.layers.linear import MergedColumnLinear, RowLinear
from sgla.layers.spec import AttentionSpec


class CrossAttention:
    """``[T, d] -> [T, H * hd]``, which ``out`` brings back to the width. Every head has keys and values of
    its own, and keys have no bias. ``seat`` makes the tables before the first step. ``watched``: by whom, in
    steps that are no program."""

    keys: Tensor  # [slots, H, N, hd]
    values: Tensor
    watched: Callable[[Tensor, Tensor, ForwardBatch, float], None] | None = None

    def __init__(self, build: Build, name: str, hidden: int, layer: AttentionSpec) -> None:
        self.layer, width = layer, layer.heads * layer.head_dim
        self.heads = build.shard.range(layer.heads)
        own = range(self.heads.start * layer.head_dim, self.heads.stop * layer.head_dim)
        self.q = MergedColumnLinear(build, hidden, [(f"{name}.q_proj", width, own)], True)
        parts = [(f"{name}.{part}_proj", width, own) for part in "kv"]
        self.kv = MergedColumnLinear(build, hidden, parts, (False, True))
        self.out = RowLinear(build, f"{name}.o_proj", hidden, width, own, True)

    def seat(self, slots: int, places: int, dtype: torch.dtype) -> None:
        shape = slots, len(self.heads), places, self.layer.head_dim
        self.keys, self.values = (torch.zeros(shape, dtype=dtype) for _ in range(2))

    def hear(self, slot: int, heard: Tensor) -> None:
        """``heard`` ``[N, d]``, of the type of activations: what the slot's request sees from now on."""
        for table, made in zip((self.keys, self.values), self.kv(heard).chunk(2, dim=1)):
            table[slot] = made.unflatten(1, (len(self.heads), -1)).transpose(0, 1)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        q = self.q(x)
        if self.watched is not None:
            self.watched(q, self.keys, batch, self.layer.scale)
        return cross_attention(q, self.keys, self.values, batch, self.layer.scale)

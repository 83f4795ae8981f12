"""Whisper (arXiv 2212.04356): an encoder of 30 s of sound, and a decoder that writes what it hears. Each of
the decoder's layers attends to its own tokens, then to the sound. The encoder is transformers' module
(``loading/tower.py``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import HeadNorms, SelfAttention
from sgla.layers.build import Build
from sgla.layers.cross_attention import CrossAttention
from sgla.model.base import Decoder


class Block:
    def __init__(self, model: Whisper, build: Build, name: str, index: int) -> None:
        self.input_norm = model.norm_of(build, f"{name}.input_layernorm")
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.cross_norm = model.norm_of(build, f"{name}.cross_layernorm")
        self.cross = CrossAttention(
            build, f"{name}.cross_attn", model.spec.hidden, model.spec.attention[index]
        )
        self.mlp_norm = model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp = model.mlp(build, f"{name}.mlp", index)

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        x, h = self.cross_norm.add(self.attention.out(self.attention(x, batch, kv)), h)
        x = self.cross(x, batch)
        if rows is not None:
            x, h = ops.gather(x, rows), ops.gather(h, rows)
        x, h = self.mlp_norm.add(self.cross.out(x), h)
        return self.mlp(x), h


class Whisper(Decoder):
    plain_names = ("fc1", "fc2")

    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)

    def attention(self, build: Build, name: str, index: int) -> SelfAttention:
        """Keys have no bias."""
        spec, layer = self.spec, self.spec.attention[index]
        return SelfAttention(
            build,
            name,
            spec.hidden,
            layer,
            self.angles(layer.rope, layer.head_dim),
            norms=HeadNorms("", spec.eps),
            qkv_bias=(True, False, True),
            out_bias=True,
        )

    def seat(self, slots: int, dtype: torch.dtype) -> None:
        for block in self._crossing():
            block.cross.seat(slots, self.spec.heard, dtype)

    def hear(self, slot: int, heard: Tensor) -> None:
        for block in self._crossing():
            block.cross.hear(slot, heard)

    def watch(self, taken: Callable[[int, Tensor, Tensor, ForwardBatch, float], None] | None) -> None:
        """Show queries and keys of each layer's attention to the sound, from now on; None: no more."""
        for i, block in enumerate(self._crossing()):
            block.cross.watched = None if taken is None else partial(taken, i)

    def _crossing(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

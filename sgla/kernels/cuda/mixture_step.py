"""What ``mixture_step.cu`` is compiled for:
one token of one row through a whole mixture of experts in one kernel."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

from torch import Tensor

from sgla.kernels.cuda.build import Kernel
from sgla.kernels.cuda.decode_step import BLOCKS, HEAD_DIM, MAX_LAYERS, WARPS, gpu_holds_blocks

PLACE, DEPTH = 2048, 5  # weights of a place of a warp's ring, and places
P = ctypes.c_void_p


class MixtureShape(NamedTuple):
    """What the kernel is compiled for. ``inner`` is that of an expert; heads and inner those of one of the
    ``ranks``."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    experts: int
    top_k: int
    normalize: bool
    qk_norm: bool
    page_size: int
    ranks: int = 1
    copied: bool = False  # hidden states, for who guesses

    @property
    def words(self) -> int:
        """Of the vectors that blocks exchange."""
        group = self.heads // self.kv_heads
        attention = (2 * self.heads + 2 * self.kv_heads) * HEAD_DIM + BLOCKS * group * (HEAD_DIM + 2)
        updates = self.inbox if self.ranks == 1 else 0
        return attention + updates + WARPS * self.experts + self.top_k * self.inner

    @property
    def inbox(self) -> int:
        """Words of the updates of the residual stream, which ranks tell each other."""
        return self.ranks * (self.kv_heads + 1) * self.hidden

    @property
    def warps(self) -> int:
        return WARPS

    def kernel(self) -> Kernel:
        return _kernel(self)

    def pays(self, layers: int, vocab: int) -> bool:
        """Whether the kernel takes this model on this GPU."""
        heads = self.heads * self.ranks, self.kv_heads * self.ranks
        attends = heads == (32, 4) and self.ranks <= 2 and self.page_size % 16 == 0
        widths = (512, 768) if self.ranks == 1 else (384, 512)
        chooses = (self.experts, self.top_k) == (BLOCKS, WARPS) and self.inner in widths
        # With an odd number of layers,
        # words that only long steps write could have the number of one that is awaited.
        counts = layers <= MAX_LAYERS and layers % 2 == 0
        fits = self.hidden == PLACE and vocab % 2 == 0
        return gpu_holds_blocks() and fits and attends and chooses and counts


class MixtureWeights(NamedTuple):
    """bf16 ``[n, k]``, the experts' as in ``layers/moe.py``;
    norms float32, of q and k's heads None where they have none."""

    qkv: Tensor
    out: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


@cache
def _kernel(shape: MixtureShape) -> Kernel:
    defines = {
        "HIDDEN": shape.hidden,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "INTER": shape.inner,
        "NORMALIZE": int(shape.normalize),
        "QK_NORM": int(shape.qk_norm),
        "PAGE_TILES": shape.page_size // 16,
        "MAX_LAYERS": MAX_LAYERS,
        "RANKS": shape.ranks,
        "COPIED": int(shape.copied),
    }
    group = shape.heads // shape.kv_heads
    inputs = 2 * (shape.hidden + shape.top_k * shape.inner) + 4 * shape.hidden + 8 * WARPS
    down = 4 * WARPS * shape.hidden // BLOCKS
    attention = WARPS * (group * HEAD_DIM * 4 + 64) + 2 * HEAD_DIM * (group + 2)
    layers = MAX_LAYERS * ctypes.sizeof(P) * (len(MixtureWeights._fields) + 2 + shape.copied)
    rings = WARPS * DEPTH * (2 * PLACE + 8)
    return Kernel("mixture_step.cu", "mixture_step", defines, rings + inputs + down + attention + layers)

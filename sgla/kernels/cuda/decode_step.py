"""Launcher of ``decode_step.cu`` and ``mixture_step.cu``:
one token of one row through a whole decoder in one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel
from sgla.kernels.device import this_device
from sgla.kernels.ops import KVLayer

BLOCKS, WARPS, PIECE = 128, 8, 1024  # PIECE: weights of a row that a warp reads at a time
HEAD_DIM, MAX_RANKS = 128, 8
MAX_LAYERS, LEAST_DEPTH = 64, 8
COPIES = 8  # of the words of a dense model
MOST_BYTES = 64 << 20  # of a layer's weights; beyond that reading them takes longer than all else
P = ctypes.c_void_p


def gpu_holds_blocks() -> bool:
    """Whether this GPU has the instructions, and room for all blocks at once: they wait for each other."""
    device = this_device()
    return device.tma and device.multiprocessors >= BLOCKS


class StepShape(Protocol):
    """What a kernel of a whole step is compiled for."""

    @property
    def warps(self) -> int:
        """Of a block."""

    @property
    def words(self) -> int:
        """Of the vectors that blocks exchange."""

    def kernel(self) -> Kernel: ...


class DenseShape(NamedTuple):
    """What ``decode_step.cu`` is compiled for."""

    hidden: int
    heads: int
    kv_heads: int
    inner: int
    qk_norm: bool
    page_size: int
    copied: bool = False  # hidden states, for who guesses

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def warps(self) -> int:
        return WARPS + 1  # one brings weights

    @property
    def layer_weights(self) -> int:
        return self.hidden * (self.qkv + self.heads * HEAD_DIM + 3 * self.inner)

    @property
    def words(self) -> int:
        """Of the vectors that blocks exchange."""
        parts = BLOCKS * self.group * (HEAD_DIM + 2)
        return COPIES * (self.qkv + parts + self.heads * HEAD_DIM + 2 * self.hidden + self.inner)

    @property
    def shared(self) -> int:
        """Bytes of shared memory beside the rings and their barriers."""
        inputs = 2 * (self.hidden + max(self.heads * HEAD_DIM, self.inner)) + 4 * 33 * WARPS
        attention = WARPS * (self.group * HEAD_DIM * 4 + 64) + 2 * HEAD_DIM * (self.group + 2)
        return (
            inputs
            + attention
            + MAX_LAYERS * (ctypes.sizeof(_Layer) + self.copied * ctypes.sizeof(P))
            + 4 * self.layer_weights // (BLOCKS * PIECE)
        )

    @property
    def depth(self) -> int:
        """Places of a warp's ring, each a piece and a barrier."""
        most = (SHARED[0] - self.shared) // (WARPS * (2 * PIECE + 8))
        return min(most, self.layer_weights // (BLOCKS * WARPS * PIECE))

    def kernel(self) -> Kernel:
        return _kernel(self)

    def pays(self, layers: int, vocab: int) -> bool:
        """Whether the kernel takes this model on this GPU, and is faster than one kernel after the other."""
        even = all(
            n % (BLOCKS * WARPS) == 0 for n in (self.hidden, self.qkv, self.inner, self.heads * HEAD_DIM)
        )
        attends = self.kv_heads in (4, 8, 16) and self.group <= 6 and self.page_size % 16 == 0
        small = 2 * self.layer_weights <= MOST_BYTES and layers <= MAX_LAYERS and self.depth >= LEAST_DEPTH
        return gpu_holds_blocks() and even and attends and small and vocab % 4 == 0


class LayerWeights(NamedTuple):
    """bf16 ``[n, k]``, gate above up; norms float32, of q and k's heads None where they have none."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, P) for name in (*LayerWeights._fields, "k", "v"))


POINTERS = [
    "layers",
    "embedding",
    "head",
    "norm",
    "cos_sin",
    "ids",
    "positions",
    "slots",
    "kv_len",
    "page_table",
    "logits",
    "words",
    "steps",
]


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in POINTERS),
        ("page_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("count", "vocab", "table_stride")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("last", P),
        ("inbox", P * MAX_RANKS),  # from here on only with several ranks
        ("own", P),
        ("rank", ctypes.c_int),
    )


@cache
def _kernel(shape: DenseShape) -> Kernel:
    defines = {"HIDDEN": shape.hidden, "HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "INTER": shape.inner}
    defines |= {
        "QK_NORM": int(shape.qk_norm),
        "PAGE_TILES": shape.page_size // 16,
        "MAX_LAYERS": MAX_LAYERS,
        "DEPTH": shape.depth,
        "COPIES": COPIES,
        "COPIED": int(shape.copied),
    }
    rings = WARPS * shape.depth * (2 * PIECE + 8)
    return Kernel("decode_step.cu", "decode_step", defines, rings + shape.shared)


class StepInbox(NamedTuple):
    """Where ranks tell each other what they add to the residual stream: where this one, ``rank``, sees the
    memory of each; and what all steps that use it share."""

    addresses: Any
    rank: int
    words: Tensor
    steps: Tensor


class Copies(NamedTuple):
    """Where hidden states go, bf16[hidden] each; None: nowhere. ``inputs``: of each layer, the residual
    stream in front of it; ``last``: what the last norm makes."""

    inputs: list[Tensor | None]
    last: Tensor | None


def told(words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Words of a layer that never was, int32[words], and the number of layers so far, int32[1]."""
    steps = torch.zeros(1, dtype=torch.int32, device=device)
    return torch.full((words,), -1, dtype=torch.int32, device=device), steps


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class DecodeStep:
    """The model is one that ``pays``; ``layers`` as its shape wants them. ``embedding`` and ``head`` bf16
    ``[vocab, hidden]``, ``norm`` float32[hidden], ``cos_sin`` float32 ``[positions, 128]``, ``scale`` of the
    attention scores; ``kv`` bf16, all layers with the same strides, the tokens of a page and head
    contiguous. ``inbox``: where ranks exchange what they add; ``head`` then is a part of the output
    layer, and all ranks make the same calls. ``copies``: where the shape says that there are some."""

    def __init__(
        self,
        shape: StepShape,
        layers: Sequence[tuple[Tensor | None, ...]],
        kv: list[KVLayer],
        embedding: Tensor,
        head: Tensor,
        norm: Tensor,
        cos_sin: Tensor,
        eps: float,
        scale: float,
        inbox: StepInbox | None = None,
        copies: Copies | None = None,
    ) -> None:
        k = kv[0].k
        assert k.stride(1) == HEAD_DIM, "tokens of one page and head must be contiguous"
        inputs = [()] * len(layers) if copies is None else [(x,) for x in copies.inputs]
        pointers = [
            [_address(t) for t in (*w, p.k, p.v, *x)] for w, p, x in zip(layers, kv, inputs, strict=True)
        ]
        table = torch.tensor(pointers, device=k.device)
        words, steps = told(shape.words, k.device) if inbox is None else (inbox.words, inbox.steps)
        self._inbox = () if inbox is None else (inbox.addresses, inbox.addresses[inbox.rank], inbox.rank)
        self._fixed = (table, embedding, head, norm, cos_sin), (words, steps)
        self._kept = layers, kv, copies
        self._last = 0 if copies is None else _address(copies.last)
        self._numbers = k.stride(0), k.stride(2), len(layers), head.shape[0]
        self._eps, self._scale = eps, scale * 1.4426950408889634
        self._kernel, self._threads = shape.kernel(), 32 * shape.warps

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv_len: Tensor,
        page_table: Tensor,
        logits: Tensor,
    ) -> None:
        """Logits float32 ``[1, vocab]`` behind token ``ids`` int32[1], the ``kv_len``-th of slot ``slots``,
        whose k and v are written to its page; int32[1] both. It is turned by ``positions`` int32[1].
        ``kv_len`` 0 is padding."""
        before, after = self._fixed
        tensors = (*before, ids, positions, slots, kv_len, page_table, logits, *after)
        pointers = (t.data_ptr() for t in tensors)
        numbers = *self._numbers, page_table.stride(0), self._eps, self._scale, self._last
        params = _Params(*pointers, *numbers, *self._inbox)
        assert gpu_holds_blocks(), "blocks wait for each other"
        self._kernel.launch(BLOCKS, self._threads, params)

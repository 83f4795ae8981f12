"""Launcher of ``token_experts.cu``: the experts of very few tokens."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors

WARPS = 8
MOST = 32  # pairs of token and expert
FULL = 3 << 10  # bytes of a stage of down, about, if one row is less
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "p", "ids", "w", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "experts")),
    )


class Chosen(NamedTuple):
    """``probabilities`` float32 and ``ids`` int32, both ``[T, top_k]``, of whole experts; the last ``common``
    of each token are the last of all."""

    probabilities: Tensor
    ids: Tensor
    common: int


class Cut(NamedTuple):
    """``rows`` of weights in each of the ``stages`` of a warp, and the bytes of a block's shared memory."""

    rows: int
    stages: int
    bytes: int


def cut(width: int, n: int, kept: int, down: bool) -> Cut:
    """For rows of ``width`` elements of ``n`` outputs, and ``kept`` rows of x; so that two blocks fit on a
    multiprocessor."""
    rows = 1
    while down and 2 * rows * width * 2 <= FULL and n % (2 * rows) == 0:
        rows *= 2
    stage, x = rows * width * 2, kept * width * 2
    stages = (SHARED[1] - x) // (WARPS * (stage + 8))
    return Cut(rows, stages, WARPS * stages * (stage + 8) + x)


def refuses(tokens: int, top_k: int, d: int, f: int) -> str | None:
    """Why experts of ``3 f d`` weights are not multiplied so, or None."""
    if tokens * top_k > MOST:
        return f"it takes at most {MOST} pairs of token and expert"
    if d % 8 or f % 8:
        return "rows of weights are no multiple of 16 bytes"
    if min(cut(d, f, tokens, False).stages, cut(f, d, tokens * top_k, True).stages) < 2:
        return "rows are too long for two of each warp in shared memory"
    return None


@cache
def _kernel(down: bool, width: int, outputs: int, cut: Cut, defines: tuple[tuple[str, int], ...]) -> Kernel:
    shape = {"DOWN": int(down), "WIDTH": width, "OUTPUTS": outputs, "ROWS": cut.rows, "STAGES": cut.stages}
    return Kernel("token_experts.cu", "token_experts", shape | dict(defines), cut.bytes)


def gate_up(x: Tensor, pairs: Chosen, w: Tensor, f: int, activation: str) -> Tensor:
    """As ``moe.few_gate_up``, of bf16: x ``[T, d]``, w ``[E * 2 f, d]`` -> ``[T * top_k, f]``."""
    (tokens, d), top_k = x.shape, pairs.ids.shape[1]
    out = torch.empty(tokens * top_k, f, dtype=x.dtype, device=x.device)
    made = {"TOP_K": top_k, "COMMON": pairs.common, "GELU": int(activation == "gelu_tanh")}
    kernel = _kernel(False, d, f, cut(d, f, tokens, False), tuple(made.items()))
    params = _Params(
        x.contiguous().data_ptr(), pairs.probabilities.data_ptr(), pairs.ids.data_ptr(), w.data_ptr(),
        out.data_ptr(), tokens, w.shape[0] // (2 * f),
    )  # fmt: skip
    kernel.launch(processors(), WARPS * 32, params)
    return out


def down(x: Tensor, pairs: Chosen, w: Tensor, d: int, out: Tensor | None = None) -> Tensor:
    """As ``moe.few_down``, of bf16: x ``[T * top_k, f]``, w ``[E * d, f]`` -> ``[T, d]``, added to ``out`` in
    place if it is given."""
    (tokens, top_k), f = pairs.ids.shape, x.shape[1]
    total = torch.empty(tokens, d, dtype=x.dtype, device=x.device) if out is None else out
    made = {"TOP_K": top_k, "COMMON": pairs.common, "ADD": int(out is not None)}
    kernel = _kernel(True, f, d, cut(f, d, tokens * top_k, True), tuple(made.items()))
    params = _Params(
        x.data_ptr(), None, pairs.ids.data_ptr(), w.data_ptr(), total.data_ptr(), tokens, w.shape[0] // d
    )
    kernel.launch(processors(), WARPS * 32, params)
    return total

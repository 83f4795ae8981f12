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
MOST_PARTS = 8  # of a row
LARGE = 16 << 20  # weights of an expert's matrix, at least, in e4m3: of fewer Triton's kernels are faster
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "p", "ids", "w", "scale", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "experts")),
    )


class Chosen(NamedTuple):
    """``probabilities`` float32 and ``ids`` int32, both ``[T, top_k]``, of whole experts; the last ``common``
    of each token are the last of all. ``held``: other ranks have some, whose ids are -1."""

    probabilities: Tensor
    ids: Tensor
    common: int
    held: bool = False


class Cut(NamedTuple):
    """``rows`` of weights, or one of the ``parts`` of a row, in each of the ``stages`` of a warp, and the
    bytes of a block's shared memory."""

    rows: int
    parts: int
    stages: int
    bytes: int


def cut(width: int, n: int, kept: int, down: bool, size: int = 2) -> Cut:
    """For rows of ``width`` elements of ``n`` outputs, each of so many bytes, and ``kept`` rows of x; so that
    two blocks fit on a multiprocessor. Rows of bf16 come whole: of longer ones Triton's kernels have enough
    under way."""
    rows, parts, x = 1, 1, kept * width * 2
    while down and 2 * rows * width * size <= FULL and n % (2 * rows) == 0:
        rows *= 2

    def stages() -> int:
        return max(0, SHARED[1] - x) // (WARPS * (rows * width // parts * size + 8))

    while size == 1 and parts < MOST_PARTS and stages() < 2 and width % (2 * parts * 16) == 0:
        rows, parts = 1, 2 * parts
    return Cut(rows, parts, stages(), WARPS * stages() * (rows * width // parts * size + 8) + x)


def refuses(tokens: int, top_k: int, d: int, f: int, size: int = 2) -> str | None:
    """Why experts of ``3 f d`` weights, each of so many bytes, are not multiplied so, or None."""
    if tokens * top_k > MOST:
        return f"it takes at most {MOST} pairs of token and expert"
    if d * size % 16 or f * size % 16:
        return "rows of weights are no multiple of 16 bytes"
    if size == 1 and d * f < LARGE:
        return f"of e4m3 it pays from {LARGE} weights of a matrix on"
    if min(cut(d, f, tokens, False, size).stages, cut(f, d, tokens * top_k, True, size).stages) < 2:
        return "rows are too long for two of each warp in shared memory"
    return None


@cache
def _kernel(down: bool, width: int, outputs: int, cut: Cut, defines: tuple[tuple[str, int], ...]) -> Kernel:
    shape = {"DOWN": int(down), "WIDTH": width, "OUTPUTS": outputs, "ROWS": cut.rows, "STAGES": cut.stages}
    shape |= {"PARTS": cut.parts} if cut.parts > 1 else {}
    return Kernel("token_experts.cu", "token_experts", shape | dict(defines), cut.bytes)


def gate_up(
    x: Tensor, pairs: Chosen, w: Tensor, f: int, activation: str, scale: Tensor | None = None
) -> Tensor:
    """As ``moe.few_gate_up``: x bf16 ``[T, d]``, w ``[E * 2 f, d]`` -> ``[T * top_k, f]``; with ``scale``
    float32[E * 2 f] the weights are e4m3, else bf16."""
    (tokens, d), top_k = x.shape, pairs.ids.shape[1]
    out = torch.empty(tokens * top_k, f, dtype=x.dtype, device=x.device)
    made = {"TOP_K": top_k, "GELU": int(activation == "gelu_tanh")} | _kind(pairs, scale)
    kernel = _kernel(False, d, f, cut(d, f, tokens, False, w.itemsize), tuple(made.items()))
    params = _Params(
        x.contiguous().data_ptr(), pairs.probabilities.data_ptr(), pairs.ids.data_ptr(), w.data_ptr(),
        None if scale is None else scale.data_ptr(), out.data_ptr(), tokens, w.shape[0] // (2 * f),
    )  # fmt: skip
    kernel.launch(processors(), WARPS * 32, params)
    return out


def down(
    x: Tensor, pairs: Chosen, w: Tensor, d: int, out: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """As ``moe.few_down``: x bf16 ``[T * top_k, f]``, w ``[E * d, f]`` -> ``[T, d]``, added to ``out`` in
    place if it is given. ``scale``: as that of ``gate_up``, float32[E * d]."""
    (tokens, top_k), f = pairs.ids.shape, x.shape[1]
    total = torch.empty(tokens, d, dtype=x.dtype, device=x.device) if out is None else out
    made = {"TOP_K": top_k, "ADD": int(out is not None)} | _kind(pairs, scale)
    kernel = _kernel(True, f, d, cut(f, d, tokens * top_k, True, w.itemsize), tuple(made.items()))
    params = _Params(
        x.data_ptr(), None, pairs.ids.data_ptr(), w.data_ptr(), None if scale is None else scale.data_ptr(),
        total.data_ptr(), tokens, w.shape[0] // d,
    )  # fmt: skip
    kernel.launch(processors(), WARPS * 32, params)
    return total


def _kind(pairs: Chosen, scale: Tensor | None) -> dict[str, int]:
    made = {"COMMON": pairs.common} | ({"HELD": 1} if pairs.held else {})
    return made if scale is None else made | {"E4M3": 1}

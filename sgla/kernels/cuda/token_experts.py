"""Launcher of ``token_experts.cu``: the experts of very few tokens."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors

SERVES = False  # off until a step has been timed with it (bench/gpu/few.sh)
WARPS = 8
MOST = 32  # pairs of token and expert
FULL = 3 << 10  # bytes of a stage of down, about, if one row is less
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "p", "ids", "w", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "experts")),
    )


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
def _kernel(
    down: bool,
    width: int,
    n: int,
    cut: Cut,
    top_k: int,
    common: int = 0,
    gelu: bool = False,
    add: bool = False,
) -> Kernel:
    defines = {"DOWN": int(down), "WIDTH": width, "OUTPUTS": n, "ROWS": cut.rows, "STAGES": cut.stages}
    defines |= {"TOP_K": top_k, "COMMON": common, "GELU": int(gelu), "ADD": int(add)}
    return Kernel("token_experts.cu", "token_experts", defines, cut.bytes)


def gate_up(
    x: Tensor, probabilities: Tensor, ids: Tensor, w: Tensor, f: int, activation: str, common: int = 0
) -> Tensor:
    """As ``moe.few_gate_up``, of bf16: x ``[T, d]``, w ``[E * 2 f, d]`` -> ``[T * top_k, f]``."""
    (tokens, d), top_k = x.shape, ids.shape[1]
    out = torch.empty(ids.numel(), f, dtype=x.dtype, device=x.device)
    made = cut(d, f, tokens, False)
    params = _Params(
        x.contiguous().data_ptr(), probabilities.data_ptr(), ids.data_ptr(), w.data_ptr(), out.data_ptr(),
        tokens, w.shape[0] // (2 * f),
    )  # fmt: skip
    kernel = _kernel(False, d, f, made, top_k, common, activation == "gelu_tanh")
    kernel.launch(processors(), WARPS * 32, params)
    return out


def down(x: Tensor, w: Tensor, ids: Tensor, d: int, out: Tensor | None = None) -> Tensor:
    """As ``moe.few_down``, of bf16: x ``[T * top_k, f]``, w ``[E * d, f]`` -> ``[T, d]``, added to ``out`` in
    place if it is given."""
    (tokens, top_k), f = ids.shape, x.shape[1]
    total = torch.empty(tokens, d, dtype=x.dtype, device=x.device) if out is None else out
    made = cut(f, d, tokens * top_k, True)
    params = _Params(
        x.data_ptr(), None, ids.data_ptr(), w.data_ptr(), total.data_ptr(), tokens, w.shape[0] // d
    )
    _kernel(True, f, d, made, top_k, add=out is not None).launch(processors(), WARPS * 32, params)
    return total

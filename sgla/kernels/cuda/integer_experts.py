"""Launcher of ``integer_experts.cu``: the experts of very few tokens, with weights of 4 or 8 bits."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors
from sgla.kernels.cuda.token_experts import MOST, Chosen
from sgla.kernels.integers import BLOCK, Integers

WARPS = 16
UNIT = 2  # blocks of channels in a stage
STAGES = 4  # at most
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "p", "ids", "w", "constants", "out")),
        ("tokens", ctypes.c_int),
    )


def refuses(tokens: int, top_k: int, d: int, f: int, bits: int, group: int) -> str | None:
    """Why experts of ``3 f d`` weights are not multiplied so, or None."""
    if tokens * top_k > MOST:
        return f"it takes at most {MOST} pairs of token and expert"
    if (bits, group) != (4, 128):
        return "it was measured with 4 bits in groups of 128"
    if d % 16 or f % 8:
        return "the outputs of experts fill no whole number of tiles"
    stages = _stages(tokens, d, bits, group)[0], _stages(tokens * top_k, f, bits, group)[0]
    return "x is too long for shared memory" if min(stages) < 2 else None


def _stages(rows: int, k: int, bits: int, group: int, most: int = STAGES) -> tuple[int, int]:
    """Of a warp, for ``rows`` of x, and the bytes of a block's shared memory. Those of gate and up are more
    than half of a multiprocessor's: where two such blocks fit, some get two and others none."""
    units, per = -(-k // (BLOCK * UNIT)), BLOCK // group
    stage = 16 * UNIT * (16 * bits + 4 * per)
    x = rows * units * UNIT * (2 * BLOCK + 4 * per)
    stages = min(most, (SHARED[0] - 1024 - x) // (WARPS * stage))
    return stages, WARPS * stages * stage + x


@cache
def _kernel(defines: tuple[tuple[str, int], ...], shared: int) -> Kernel:
    return Kernel("integer_experts.cu", "integer_experts", dict(defines), shared)


def _launch(
    x: Tensor, pairs: Chosen, w: Integers, rows: int, outputs: int, out: Tensor, more: dict[str, int]
) -> None:
    (tokens, top_k), k = pairs.ids.shape, x.shape[1]
    most = STAGES
    if "DOWN" in more:  # as much as a warp has to do: small blocks begin beside those of gate and up
        tiles = -(-tokens * outputs // (16 * processors()))
        most = max(2, min(most, -(-tiles * top_k * -(-k // (BLOCK * UNIT)) // WARPS)))
    stages, shared = _stages(rows, k, w.bits, w.group, most)
    per = BLOCK // w.group
    own, loaded = -(-k // BLOCK) * per, UNIT * per  # words of constants
    defines = {"BITS": w.bits, "GROUP": w.group, "WHOLE": int(w.whole), "CHANNELS": k, "OUTPUTS": outputs}
    defines |= {"TOP_K": top_k, "STAGES": stages, "WARPS": WARPS}
    defines |= {"WIDTH": next(4 * words for words in (4, 2, 1) if own % words == loaded % words == 0)}
    words, constants = w.tensors
    params = _Params(
        x.contiguous().data_ptr(), pairs.probabilities.data_ptr(), pairs.ids.data_ptr(), words.data_ptr(),
        constants.data_ptr(), out.data_ptr(), tokens,
    )  # fmt: skip
    _kernel(tuple((defines | more).items()), shared).launch(processors(), WARPS * 32, params)


def gate_up(x: Tensor, pairs: Chosen, w: Integers, f: int, activation: str) -> Tensor:
    """As ``token_experts.gate_up``: x ``[T, d]``, w ``[E * 2 f, d]`` -> ``[T * top_k, f]``."""
    out = torch.empty(pairs.ids.numel(), f, dtype=x.dtype, device=x.device)
    _launch(x, pairs, w, len(x), f, out, {"GELU": int(activation == "gelu_tanh")})
    return out


def down(x: Tensor, pairs: Chosen, w: Integers, d: int, out: Tensor | None = None) -> Tensor:
    """As ``token_experts.down``: x ``[T * top_k, f]``, w ``[E * d, f]`` -> ``[T, d]``, added to ``out`` in
    place if it is given."""
    total = torch.empty(len(pairs.ids), d, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, pairs, w, len(x), d, total, {"DOWN": 1, "ADD": int(out is not None)})
    return total

"""Launcher of ``token_experts.cu``: the experts of very few tokens."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.kernels.cuda.build import SHARED, Kernel, processors
from sgla.kernels.ops import Biases
from sgla.kernels.routing import Routing

CHOOSES = False  # whether it chooses the experts of one token, too; off until a step has been timed with it
WARPS = 8
MOST = 32  # pairs of token and expert
MANY = 512  # experts to choose from
FULL = 3 << 10  # bytes of a stage of down, about, if one row is less
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "p", "ids", "logits", "correction", "w", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "experts")),
        *((name, ctypes.c_float) for name in ("least", "scale")),
    )


class Chosen(NamedTuple):
    """``probabilities`` float32 and ``ids`` int32, both ``[T, top_k]``, of whole experts; the last ``common``
    of each token are the last of all."""

    probabilities: Tensor
    ids: Tensor
    common: int


class Logits(NamedTuple):
    """Of one token, whose experts are chosen on the way: float32 ``[1, E]``, see ``choice_refuses``."""

    logits: Tensor
    routing: Routing
    correction: Tensor | None


Pairs = Chosen | Logits


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


def choice_refuses(tokens: int, logits: int, routing: Routing, biases: Biases) -> str | None:
    """Why experts are not chosen on the way, by so many ``logits``, or None."""
    softmax = routing.score == "softmax"
    if tokens != 1 or logits > MANY:
        return f"it chooses for one token, from at most {MANY} experts"
    if routing.score not in ("softmax", "sigmoid") or routing.groups > 1 or routing.held is not None:
        return "experts are chosen by groups, another score or place"
    if softmax and (biases.correction is not None or routing.least):
        return "the softmax is corrected"
    if any(bias is not None for bias in biases._replace(correction=None)):
        return "the router or the experts have biases"
    return None


@cache
def _kernel(down: bool, width: int, outputs: int, cut: Cut, defines: tuple[tuple[str, int], ...]) -> Kernel:
    shape = {"DOWN": int(down), "WIDTH": width, "OUTPUTS": outputs, "ROWS": cut.rows, "STAGES": cut.stages}
    return Kernel("token_experts.cu", "token_experts", shape | dict(defines), cut.bytes)


def _choosing(pairs: Pairs) -> tuple[dict[str, int], list[int | None], float, float]:
    """What the kernel is made for, where it finds who is chosen, and the sums' least and the scale."""
    if isinstance(pairs, Chosen):
        made = {"TOP_K": pairs.ids.shape[1], "COMMON": pairs.common}
        return made, [pairs.probabilities.data_ptr(), pairs.ids.data_ptr(), None, None], 0.0, 1.0
    logits, routing, correction = pairs
    gated = routing.shared == "gated"
    made = {"TOP_K": routing.top_k + routing.common, "COMMON": routing.common, "GATED": int(gated)}
    made |= {"CHOICE": 2 if routing.score == "sigmoid" else 1, "EXPERTS": logits.shape[1] - gated}
    made |= {"NORMALIZE": int(routing.normalize), "CORRECTION": int(correction is not None)}
    where = [None, None, logits.data_ptr(), None if correction is None else correction.data_ptr()]
    return made, where, routing.least, routing.scale


def gate_up(x: Tensor, pairs: Pairs, w: Tensor, f: int, activation: str) -> Tensor:
    """As ``moe.few_gate_up``, of bf16: x ``[T, d]``, w ``[E * 2 f, d]`` -> ``[T * top_k, f]``."""
    tokens, d = x.shape
    made, where, least, scale = _choosing(pairs)
    out = torch.empty(tokens * made["TOP_K"], f, dtype=x.dtype, device=x.device)
    made["GELU"] = int(activation == "gelu_tanh")
    kernel = _kernel(False, d, f, cut(d, f, tokens, False), tuple(made.items()))
    experts = w.shape[0] // (2 * f)
    params = _Params(
        x.contiguous().data_ptr(), *where, w.data_ptr(), out.data_ptr(), tokens, experts, least, scale
    )
    kernel.launch(processors(), WARPS * 32, params)
    return out


def down(x: Tensor, pairs: Pairs, w: Tensor, d: int, out: Tensor | None = None) -> Tensor:
    """As ``moe.few_down``, of bf16: x ``[T * top_k, f]``, w ``[E * d, f]`` -> ``[T, d]``, added to ``out`` in
    place if it is given."""
    made, where, *_ = _choosing(pairs)
    f, tokens = x.shape[1], x.shape[0] // made["TOP_K"]
    total = torch.empty(tokens, d, dtype=x.dtype, device=x.device) if out is None else out
    made["ADD"] = int(out is not None)
    kernel = _kernel(True, f, d, cut(f, d, x.shape[0], True), tuple(made.items()))
    experts = w.shape[0] // d
    params = _Params(x.data_ptr(), *where, w.data_ptr(), total.data_ptr(), tokens, experts, 0.0, 1.0)
    kernel.launch(processors(), WARPS * 32, params)
    return total

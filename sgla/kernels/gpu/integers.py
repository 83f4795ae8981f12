"""Linear layers whose weights have 4 or 8 bits in groups: few rows, more rows, and long prompts. Few rows of
other weights of 4 bits take the same kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.cuda import integer_gemm, skinny_gemm, stationary_gemm
from sgla.kernels.device import this_device
from sgla.kernels.gpu.record import Node
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.integers import Integers, are_integers
from sgla.kernels.triton import integers

NAME = "few integers"  # of nodes that other rules look for
# Rows from which on a weight is better made bfloat16 and left to cuBLAS: what that reads and writes is then
# little beside the product.
LONG = 1025


def few_refuses(work: Work, *chain: Node) -> str | None:
    linear = chain[-1]
    if not integer_gemm.takes(linear.given["w"]):
        return OTHER
    if not work.wgmma:
        return "its kernel is made for Hopper"
    if work.rows(linear) > integer_gemm.MAX_ROWS:
        return f"it takes at most {integer_gemm.MAX_ROWS} rows"
    w, x = linear.given["w"], linear.given["x"]
    if work.record.dtypes[x.number] != torch.bfloat16:
        return "it multiplies bfloat16"
    return integer_gemm.refuses(w.n // 2, w.k)


def few(work: Work, *chain: Node) -> list[Node]:
    linear = chain[-1]
    made = {"x": linear.given["x"], "weight": linear.given["w"], "norm": None, "eps": 0.0}
    if len(chain) == 2:
        norm = chain[0].given
        made |= {"x": norm["x"], "norm": norm["weight"], "eps": norm["eps"]}
    made |= {"bias": linear.given["bias"], "epilogue": integer_gemm.STORE, "out": None}
    return [Node(NAME, _few, made, linear.results, linear.rows)]


def few_logits(work: Work, linear: Node) -> list[Node]:
    [node] = few(work, linear)
    return [node.but({"epilogue": integer_gemm.FLOAT32, "out": work.input("out")})]


def _few(x: Tensor, weight: Any, **given: Any) -> Tensor:
    x = x if skinny_gemm.aligned(x) else x.clone(memory_format=torch.contiguous_format)
    stationary = (
        stationary_gemm.refuses(x.shape[0], weight.n, weight.k, *integer_gemm.packing(weight.kind)) is None
    )
    kernel = stationary_gemm if stationary else integer_gemm
    return kernel.linear(x, weight, **given)


def many_refuses(work: Work, linear: Node) -> str | None:
    if not are_integers(linear.given["w"]):
        return OTHER
    return f"it pays up to {LONG - 1} rows" if _long(work, linear) else None


def long_refuses(work: Work, linear: Node) -> str | None:
    if not are_integers(linear.given["w"]):
        return OTHER
    return None if _long(work, linear) else f"it pays from {LONG} rows on"


def _long(work: Work, linear: Node) -> bool:
    return is_long(work.rows(linear), work.record.dtypes[linear.given["x"].number])


def is_long(m: int, dtype: torch.dtype) -> bool:
    """Whether products of ``m`` rows are left to cuBLAS."""
    return m >= LONG and dtype == torch.bfloat16


def many(work: Work, linear: Node) -> list[Node]:
    given = {name: linear.given[name] for name in ("x", "bias")} | {"weight": linear.given["w"]}
    return [Node("integers", integers.linear, given, linear.results, linear.rows)]


def unpacked(work: Work, linear: Node) -> list[Node]:
    given = {name: linear.given[name] for name in ("x", "w", "bias")}
    return [Node("integers, unpacked", _unpacked, given, linear.results, linear.rows)]


def _unpacked(x: Tensor, w: Integers, bias: Tensor | None) -> Tensor:
    return F.linear(x, integers.unpack(w, x.dtype), None if bias is None else bias.to(x.dtype))


def product(
    x: Tensor, w: Integers, bias: Tensor | None, out: Tensor | None = None, deterministic: bool = False
) -> Tensor:
    """``ops.linear`` where no rule takes it, in ``out`` of any float type if it is given."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if deterministic:
        return integers.linear(
            x, w, bias, out, integers.tile_for(1, w.n, w.k, x.itemsize, deterministic=True)
        )
    if out is None and is_long(x.shape[0], x.dtype):
        return _unpacked(x, w, bias)
    return integers.linear(x, w, bias, out)


def sizes(weights: list[Any], most: int) -> list[int]:
    """Numbers of rows up to ``most`` with which products by these take every kernel that they take."""
    shapes = {(w.n, w.k) for w in weights if are_integers(w)}
    first: dict[Any, int] = {}
    few = integer_gemm.MAX_ROWS if this_device().wgmma else 0
    for m in range(1, min(most, LONG) + 1) if shapes else ():
        for n, k in shapes:
            chosen = integer_gemm.padded(m) if m <= few else integers.tile_for(m, n, k, 2)
            first.setdefault((n, k, chosen), m)
    if shapes and most >= LONG:
        first["long"] = LONG
    return sorted(set(first.values()))

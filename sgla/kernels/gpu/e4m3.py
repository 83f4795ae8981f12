"""Weights in e4m3: what comes before the product rounds on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.triton import fp8

if TYPE_CHECKING:
    from sgla.quant.weight import Weight

NAME = "rounded norm"  # of nodes that other rules look for


def refuses(work: Work, *chain: Node) -> str | None:
    w = chain[-1].given["w"]
    if w.kind != "fp8" or w.scale is None:
        return OTHER
    return None if w.n % 16 == w.k % 16 == 0 else "the weight's sides are no multiples of 16"


def gate(work: Work, act: Node, linear: Node) -> list[Node]:
    return [_rounded(linear, act.given, _gate_rounded, ("x", "kind"))]


def _gate_rounded(x: Tensor, kind: str, w: Weight, bias: Tensor | None) -> Tensor:
    assert w.scale is not None
    return fp8.linear(fp8.act_mul_quantize(x, kind), w.data, w.scale, bias)


def norm(work: Work, linear: Node) -> list[Node]:
    maker = work.maker(linear.given["x"])
    assert maker is not None
    return [_rounded(linear, {"rounded": Ref(maker.results[2])}, _fp8_linear, ("rounded",))]


def norm_refuses(work: Work, linear: Node) -> str | None:
    maker = work.maker(linear.given["x"])
    why = refuses(work, linear)
    return why or (None if maker is not None and maker.op == NAME else "no norm comes before")


def _rounded(linear: Node, given: dict[str, Any], fn: Callable[..., Tensor], names: tuple[str, ...]) -> Node:
    found = {name: given[name] for name in names} | {name: linear.given[name] for name in ("w", "bias")}
    return Node("e4m3", fn, found, linear.results, linear.rows)


def _fp8_linear(rounded: fp8.Rounded, w: Weight, bias: Tensor | None) -> Tensor:
    assert w.scale is not None
    return fp8.linear(rounded, w.data, w.scale, bias)


def add_refuses(work: Work, total: Node) -> str | None:
    if not work.e4m3:
        return OTHER
    return "the product of few rows does the norm" if work.few_rows(total) else None


def add(work: Work, total: Node) -> list[Node]:
    return [Node(NAME, fp8.add_norm_quantize, total.given, [*total.results, work.value()], total.rows)]

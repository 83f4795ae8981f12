"""Mixtures of experts, with the norm before and the sum behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.cuda.router import MAX_ROWS
from sgla.kernels.gpu import mixture, tiles
from sgla.kernels.gpu.e4m3 import NAME as ROUNDED
from sgla.kernels.gpu.few import factor_of, norm_apart
from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.regions import TOKENS
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.ops import AddedNorm, Together
from sgla.kernels.triton import elementwise

NAME = "sum of experts"  # of nodes that other rules look for


def make(work: Work, node: Node, **more: Any) -> list[Node]:
    """The experts, and their sum apart, which may go into the residual stream."""
    outputs = work.value()
    given = {"norm": None, "eps": 0.0, "rounded": None, "residual": None} | node.given | more
    if node.rows == TOKENS:
        given["live"] = work.input("live")
    summed = Node(NAME, _sum, {"x": Ref(outputs)}, [node.results[0]], node.rows)
    return [Node("mixture", _mixture, given, [outputs], node.rows), summed]


def _mixture(
    x: Tensor, norm: Tensor | None, eps: float, rounded: Any, residual: Tensor | None, **given: Any
) -> mixture.Outputs:
    normed = None if norm is None else (norm, eps)
    return mixture.run(x, normed, rounded=rounded, residual=residual, **given)


def _sum(x: mixture.Outputs) -> Tensor:
    return x.sum()


def alone(work: Work, moe: Node) -> list[Node]:
    maker = work.maker(moe.given["x"])
    small = Ref(maker.results[2]) if maker is not None and maker.op == ROUNDED else None
    return make(work, moe, rounded=small)


def _refuses(moe: Node) -> str | None:
    return None if moe.given["routed"] is None else "the router sees something else than the experts"


def norm_refuses(work: Work, norm: Node, moe: Node) -> str | None:
    if (why := _refuses(moe)) is not None:
        return why
    return None if work.few_rows(moe) else f"the router takes at most {skinny_gemm.MAX_ROWS} rows with a norm"


def norm(work: Work, before: Node, moe: Node) -> list[Node]:
    given = before.given
    return make(work, moe, x=given["x"], norm=given["weight"], eps=given["eps"])


def add_refuses(work: Work, *chain: Node) -> str | None:
    total, moe = chain[-2:]
    if (why := _refuses(moe)) is not None:
        return why
    if work.e4m3:
        return "e4m3 weights want the norm rounded"
    if work.rows(moe) > MAX_ROWS:
        return f"the router takes at most {MAX_ROWS} rows"
    if len(chain) == 3 and work.rows(moe) <= mixture.OURS:
        return f"our kernel before the router pays up to {mixture.OURS} rows"
    return None if work.free(total.given["residual"]) else "the residual stream is read again"


def add(work: Work, *chain: Node) -> list[Node]:
    """The router adds and normalizes. With more rows our kernel's exchange of sums, in the layer before,
    would wait behind the experts' first weights: then cuBLAS does that layer."""
    total, moe = chain[-2:]
    given = total.given
    before = [tiles.by_library(chain[0])] if len(chain) == 3 else []
    made, summed = make(
        work, moe, x=given["x"], norm=given["weight"], eps=given["eps"], residual=given["residual"]
    )
    made.fn, made.overwrites = _mixture_add, given["residual"].number
    made.results.append(total.results[1])
    return [*before, made, summed]


def _mixture_add(residual: Tensor, **given: Any) -> tuple[mixture.Outputs, Tensor]:
    return _mixture(residual=residual, **given), residual


def scale_refuses(work: Work, summed: Node, scaled: Node) -> str | None:
    mixture = work.maker(summed.given["x"])
    if factor_of(scaled) is None or mixture is None:
        return OTHER
    if not work.few_rows(scaled):
        return f"the router of more than {skinny_gemm.MAX_ROWS} rows scales nothing"
    return "a shared expert is among them" if mixture.given["routing"].shared else None


def scale(work: Work, summed: Node, scaled: Node) -> list[Node]:
    """What the sum is multiplied by, the experts' weights are."""
    mixture, factor = work.maker(summed.given["x"]), factor_of(scaled)
    assert mixture is not None
    assert factor is not None
    routing = mixture.given["routing"]
    mixture.given |= {"routing": replace(routing, scale=routing.scale * factor)}
    return [summed.but({}, scaled.results)]


def sum_refuses(work: Work, summed: Node, add: Node) -> str | None:
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def sum_add(work: Work, summed: Node, add: Node) -> list[Node]:
    outputs, residual = summed.given["x"], add.given["residual"]
    given = {"outputs": outputs, "residual": residual}
    if work.few_rows(add):
        normed, total = add.results
        return [
            Node("sum, added", _sum_add, given, [total], add.rows, residual.number),
            norm_apart(normed, total, add),
        ]
    given |= {"weight": add.given["weight"], "eps": add.given["eps"]}
    return [Node("sum, added", _sum_add_norm, given, add.results, add.rows, residual.number)]


def _sum_add(outputs: mixture.Outputs, residual: Tensor) -> Tensor:
    outputs.add_to(residual)
    return residual


def _sum_add_norm(
    outputs: mixture.Outputs, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return outputs.add_norm(residual, weight, eps), residual


def scatter_norm(y: Tensor, x: Tensor, norm: AddedNorm, ranks: Together) -> Tensor:
    """``reduce_scatter`` and the norm, in place. Steps of a program differ in what each rank has."""
    if ranks.norms(y, x):
        return ranks.reduce_scatter_norm(y, x, norm)
    own, (residual, weight, eps, bias) = ranks.reduce_scatter(y, x), norm
    assert residual is not None
    if bias is None:
        return elementwise.add_rms_norm(own, residual, weight, eps, in_place=True)[0]
    return elementwise.add_layer_norm(own, residual, weight, bias, eps, in_place=True)[0]


def shared_refuses(work: Work, gated: Node, add: Node) -> str | None:
    return None if work.free(add.given["residual"]) else "the residual stream is read again"


def shared_add(work: Work, gated: Node, add: Node) -> list[Node]:
    """What every token's own MLP makes, the experts' sum and the residual stream together."""
    given = gated.given | {name: add.given[name] for name in ("residual", "weight", "eps")}
    return [Node("shared, added", _shared_add, given, add.results, add.rows, add.given["residual"].number)]


def _shared_add(residual: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    return elementwise.gated_add_norm(residual=residual, **given), residual

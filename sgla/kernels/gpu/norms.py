"""Norms around the residual stream: what joins it through a norm, and its own norms, as one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.gpu.record import Node
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.triton import elementwise

NAME = "norms of a sum"  # of nodes that other rules look for
COMPUTED = "the step computes the weights of a norm"


def add_refuses(work: Work, norm: Node, add: Node) -> str | None:
    return _refuses(norm.given, add.given)


def add(work: Work, norm: Node, add: Node) -> list[Node]:
    normed, total = add.results
    node = _node(norm, add, {"second": None, "scale": None}, [total])
    _join(node, add.given["weight"], normed)
    return [node]


def scaled_refuses(work: Work, norm: Node, add: Node) -> str | None:
    if not isinstance(norm.given["weight"], Tensor):
        return COMPUTED
    scale = add.given["scale"]
    return None if isinstance(scale, Tensor) and scale.numel() == 1 else "tokens have scales of their own"


def scaled(work: Work, norm: Node, add: Node) -> list[Node]:
    return [_node(norm, add, {"second": None, "scale": add.given["scale"]}, add.results)]


def both_refuses(work: Work, total: Node, norm: Node, add: Node) -> str | None:
    if (why := scaled_refuses(work, norm, add)) is not None:
        return why
    for part in _parts(work, total):
        if part is None:
            return "it adds up something else than two norms that nobody else reads"
        if (why := _refuses(part.given, norm.given)) is not None:
            return why
    return None


def both(work: Work, total: Node, norm: Node, add: Node) -> list[Node]:
    """Two norms, the norm of their sum, and what that is added to."""
    first, other = _parts(work, total)
    assert first is not None
    assert other is not None
    for part in (first, other):
        work.drop(part)
    second = {"second": other.given["x"], "second_norm": other.given["weight"], "both": norm.given["weight"]}
    return [_node(first, add, second | {"scale": add.given["scale"]}, add.results)]


def _parts(work: Work, total: Node) -> list[Node | None]:
    """The norms that are added up, if they can move here."""
    makers = [work.maker(total.given[name]) for name in ("x", "y")]
    return [maker if maker is not None and _moves(work, maker) else None for maker in makers]


def _moves(work: Work, norm: Node) -> bool:
    if norm.op is not ops.rms_norm or work.uses[norm.results[0]] != 1:
        return False
    return not any(work.record.memory(n) in work.overwritten for n in norm.reads)


def beside_refuses(work: Work, norm: Node) -> str | None:
    maker = work.maker(norm.given["x"])
    if maker is None or maker.op != NAME or maker.results[0] != norm.given["x"].number:
        return OTHER
    if len(maker.given["norms"]) == elementwise.NORMS:
        return f"a sum has at most {elementwise.NORMS} norms"
    return _refuses(norm.given, {"weight": maker.given["norm"], "eps": maker.given["eps"]})


def beside(work: Work, norm: Node) -> list[Node]:
    """The kernel that makes the sum makes this norm, too."""
    maker = work.maker(norm.given["x"])
    assert maker is not None
    _join(maker, norm.given["weight"], norm.results[0])
    work.made[norm.results[0]] = maker
    return []


def _refuses(norm: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Why a kernel does not do both norms, or None."""
    if not all(isinstance(one["weight"], Tensor) for one in (norm, other)):
        return COMPUTED
    if norm["eps"] != other["eps"]:
        return "eps is another"
    return None if norm["weight"].shape == other["weight"].shape else "one norm is of heads"


def _node(norm: Node, add: Node, more: dict[str, Any], results: list[int]) -> Node:
    given = {"x": norm.given["x"], "norm": norm.given["weight"], "residual": add.given["residual"]}
    given |= {"norms": [], "eps": norm.given["eps"]} | more
    return Node(NAME, _run, given, list(results), add.rows)


def _join(node: Node, weight: Tensor, result: int) -> None:
    node.given["norms"].append(weight)
    node.results.append(result)


def _run(
    x: Tensor,
    second: Tensor | None,
    second_norm: Tensor | None = None,
    both: Tensor | None = None,
    **given: Any,
) -> Any:
    other = None
    if second is not None:
        assert second_norm is not None
        assert both is not None
        other = elementwise.Second(second, second_norm, both)
    made = elementwise.norms_of_sum(x, second=other, **given)
    return made if len(made) > 1 else made[0]

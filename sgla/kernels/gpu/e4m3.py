"""Weights in e4m3 for more rows: what comes before the product rounds on the way, tiles do the gate behind
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm, integer_gemm, skinny_gemm
from sgla.kernels.device import this_device
from sgla.kernels.gpu.record import Node, Ref
from sgla.kernels.gpu.regions import OWN
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.gpu.tiles import GATES, SLOWER
from sgla.kernels.gpu.tuning import LIBRARY, Algorithm, Product, algorithm_for
from sgla.kernels.ops import Together
from sgla.kernels.rehearsal import under_way
from sgla.kernels.triton import e2m1, fp8

if TYPE_CHECKING:
    from sgla.quant.weight import Weight

MOST = 1024  # rows from which on cuts change with every tile of rows at most
MANY, LONG = 2048, 8192  # rows and channels from which on what a tile begins and ends with matters less
FEW = 64  # rows up to which a tile has room for them and for many weight rows
NAME, PRODUCT = "rounded norm", "e4m3"  # of nodes that other rules look for


def in_groups(m: int, w: Weight) -> bool:
    """Whether ``m`` rows are rounded and meet the scales of groups of channels; fewer meet weights that are
    made bfloat16."""
    least = batch_gemm.MIN_GROUPED if this_device().wgmma else skinny_gemm.MAX_ROWS + 1
    return w.kind == "fp8g128" and m >= least and w.n % 16 == w.k % 16 == 0


def refuses(work: Work, *chain: Node) -> str | None:
    w = chain[-1].given["w"]
    if in_groups(work.rows(chain[-1]), w):
        return None
    if w.kind != "fp8" or w.scale is None:
        return OTHER
    return None if w.n % 16 == w.k % 16 == 0 else "the weight's sides are no multiples of 16"


def gate(work: Work, act: Node, linear: Node) -> list[Node]:
    return [_product(linear, act.given, _gate_rounded, ("x", "kind"))]


def norm(work: Work, norm: Node, linear: Node) -> list[Node]:
    return [_product(linear, norm.given, _norm_rounded, ("x", "weight", "eps"))]


def behind_norm(work: Work, linear: Node) -> list[Node]:
    maker = work.maker(linear.given["x"])
    assert maker is not None
    return [_product(linear, {"rounded": Ref(maker.results[2])}, multiply, ("rounded",))]


def behind_norm_refuses(work: Work, linear: Node) -> str | None:
    maker = work.maker(linear.given["x"])
    why = refuses(work, linear)
    return why or (None if maker is not None and maker.op == NAME else "no norm comes before")


def tiles_refuses(work: Work, linear: Node) -> str | None:
    if why := refuses(work, linear):
        return why
    return None if _algorithm(work.rows(linear), linear.given["w"]).kernel == "tiles" else SLOWER


def tiles(work: Work, linear: Node) -> list[Node]:
    return [_product(linear, linear.given, _quantized, ("x",))]


def _product(linear: Node, given: dict[str, Any], fn: Callable[..., Tensor], names: tuple[str, ...]) -> Node:
    found = {name: given[name] for name in names} | {name: linear.given[name] for name in ("w", "bias")}
    return Node(PRODUCT, fn, found | {"epilogue": batch_gemm.STORE}, linear.results, linear.rows)


def gated_refuses(work: Work, product: Node, act: Node) -> str | None:
    if product.given["bias"] is not None:
        return "the layer has a bias"
    algorithm = _algorithm(work.rows(product), product.given["w"], gated=True)
    return None if algorithm.kernel == "tiles" else SLOWER


def gated(work: Work, product: Node, act: Node) -> list[Node]:
    return [product.but({"epilogue": GATES[act.given["kind"]]}, act.results)]


def _algorithm(m: int, w: Weight, gated: bool = False) -> Algorithm:
    """For ``m`` rows, or what the rules of few rows leave over."""
    m = max(m, skinny_gemm.MAX_ROWS + 1)
    return _tiled(m, w, gated) if by_blocks(m, w, gated) is None else LIBRARY


def _tiled(m: int, w: Weight, gated: bool) -> Algorithm:
    """Without the scales of blocks."""
    return algorithm_for(m, Product(w.n, w.k, gated, w.kind)) if this_device().wgmma else LIBRARY


def by_blocks(m: int, w: Any, gated: bool = False) -> Tensor | None:
    """The scales of a weight's blocks, if the library multiplies ``m`` rows by these. A rehearsal, which has
    no weights, takes all to be in blocks."""
    if w.kind != "fp8g128" or not blocks_faster(m, w.n, w.k, gated):
        return None
    if under_way():
        return w.scale.new_empty(w.n // fp8.GROUP, w.k // fp8.GROUP)
    found: Tensor | None = w.blocks()
    return found


def blocks_faster(m: int, n: int, k: int, gated: bool = False) -> bool:
    """Whether the library takes blocks of these sides, and is faster than our tiles. It is not where rows are
    few, where all tiles run at once with k in two parts or with 64 rows of the weight, nor where they do a
    gate on the way, which in prompts takes many rows; nor where these are many and sums long."""
    if this_device().arch[0] != 9 or not fp8.takes_blocks(torch.version.cuda):
        return False
    if n % fp8.GROUP or k % (4 * fp8.GROUP) or m <= FEW:
        return False
    if m > batch_gemm.MAX_ROWS:
        return m < MANY or not (gated or k >= LONG)
    cut = batch_gemm.grouped_config(m, n, k)
    return not gated and cut.split == 1 and cut.tile > 64


def multiply(rounded: fp8.Rounded, w: Weight, bias: Tensor | None, epilogue: int) -> Tensor:
    """By the tiles, or by others, which have no epilogue but STORE."""
    assert w.scale is not None
    m, gated = len(rounded.scale), epilogue in GATES.values()
    if not gated and (blocks := by_blocks(m, w)) is not None:
        return fp8.blocks(rounded, w.data, blocks, bias)
    config = _tiled(max(m, skinny_gemm.MAX_ROWS + 1), w, gated).config
    if not isinstance(config, batch_gemm.Config):
        product = fp8.linear if w.kind == "fp8" else fp8.grouped
        return product(rounded, w.data, w.scale, bias)
    of_w = w.scales()
    assert of_w is not None
    scales = batch_gemm.Scales(rounded.scale, of_w)
    return batch_gemm.linear(rounded.numbers, w.data, config, bias=bias, epilogue=epilogue, scales=scales)


def _quantized(x: Tensor, w: Weight, bias: Tensor | None, epilogue: int) -> Tensor:
    return multiply(fp8.quantize(x), w, bias, epilogue)


def _gate_rounded(x: Tensor, kind: str, w: Weight, bias: Tensor | None, epilogue: int) -> Tensor:
    return multiply(fp8.act_mul_quantize(x, kind), w, bias, epilogue)


def _norm_rounded(
    x: Tensor, weight: Tensor, eps: float, w: Weight, bias: Tensor | None, epilogue: int
) -> Tensor:
    return multiply(fp8.norm_quantize(x, weight, eps), w, bias, epilogue)


def add_refuses(work: Work, total: Node) -> str | None:
    if not work.e4m3:
        return OTHER
    return "the product of few rows does the norm" if work.few_rows(total) else None


def add(work: Work, total: Node) -> list[Node]:
    return [Node(NAME, fp8.add_norm_quantize, total.given, [*total.results, work.value()], total.rows)]


def gathered_refuses(work: Work, rows: Node) -> str | None:
    """Rows of all ranks, which are half as many bytes if they are rounded before."""
    readers = [node for node in work.record.nodes if rows.results[0] in node.reads]
    if not work.e4m3 or rows.rows != OWN or rows.results[0] in work.record.outputs:
        return OTHER
    if any(node.op is not ops.linear or refuses(work, node) or node.given["addend"] for node in readers):
        return "not all that reads them is a product of such weights"
    return None


def gathered(work: Work, rows: Node) -> list[Node]:
    maker = work.maker(rows.given["x"])
    there = maker is not None and maker.op == NAME
    given = rows.given | {"rounded": Ref(maker.results[2]) if maker is not None and there else None}
    return [Node(NAME, _rounded_rows, given, [*rows.results, work.value(), work.value()], rows.rows)]


def _rounded_rows(x: Tensor, ranks: Together, rounded: fp8.Rounded | None) -> tuple[None, None, fp8.Rounded]:
    """In the place of a norm and its rounded numbers, which alone are read."""
    return None, None, fp8.joined(rounded or fp8.quantize(x), ranks.gather)


def sizes(weights: list[Any], most: int) -> list[int]:
    """Numbers of rows up to ``most`` with which products by packed floating point take every kernel that they
    take."""
    shapes = {(w.n, w.k, w.kind) for w in weights if w.kind in e2m1.OTHERS}
    first: dict[Any, int] = {}
    few = integer_gemm.MAX_ROWS if this_device().wgmma else 0
    tiles = range(MOST + batch_gemm.GROUPED_ROWS, most + 1, batch_gemm.GROUPED_ROWS)
    for m in (*range(1, min(most, MOST) + 1), *tiles) if shapes else ():
        for n, k, kind in shapes:
            tile: Any = e2m1.cut(m, n, -(-k // 128))
            if kind in integer_gemm.OTHERS and m <= few:
                tile = integer_gemm.padded(m)
            if kind == "fp8g128" and m >= batch_gemm.MIN_GROUPED:
                tile = *(blocks_faster(m, n, k, gated) for gated in (False, True)), _cut_of(m, n, k)
            first.setdefault((n, k, kind, tile), m)
    return sorted(set(first.values()))


def _cut_of(m: int, n: int, k: int) -> Any:
    """What is compiled for ``m`` rows and scales of groups."""
    config = algorithm_for(max(m, skinny_gemm.MAX_ROWS + 1), Product(n, k, storage="fp8g128")).config
    if isinstance(config, batch_gemm.Config) and this_device().wgmma:
        return config, batch_gemm.rows_of(config, m)
    return fp8.tile_for(m, n, k)

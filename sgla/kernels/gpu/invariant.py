"""Linear layers whose results for a row are the same bits whatever the other rows are, by the kernels of
``batch_gemm`` and ``prompt_gemm``: a sum along k is one chain of products in both, if k is not split."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor, bfloat16, float32

from sgla.kernels.cuda import act_mul, batch_gemm, prompt_gemm
from sgla.kernels.cuda.batch_gemm import FLOAT32, MAX_ROWS, ROWS, STORE, Config
from sgla.kernels.cuda.build import SHARED, processors
from sgla.kernels.device import this_device
from sgla.kernels.gpu.record import Node
from sgla.kernels.gpu.rewrite import OTHER, Work
from sgla.kernels.gpu.tiles import GATES
from sgla.kernels.triton import invariant

TILES = 256, 192, 160, 128, 96, 64, 32  # weight rows
LONG = 128  # rows in whose multiples those beyond MAX_ROWS are counted, so that few kernels are needed
# Clocks that a block takes for 64 of k, estimates: for a row of x or of the weight to come, for the products
# of 64 rows with one, and to ask for a stage; and for all blocks for a row of the weight to come from memory.
FEED, MULTIPLY, ASK, READ = 2.9, 1.0, 300.0, 0.047


def refuses(n: int, k: int) -> str | None:
    """Why a bf16 weight ``[n, k]`` cannot be multiplied by these, or None."""
    if not this_device().wgmma:
        return "the GPU has no wgmma"
    return batch_gemm.refuses(n, k)


def serves(x: Tensor, weight: Tensor) -> bool:
    narrow = x.dtype == weight.dtype == bfloat16
    return narrow and weight.is_contiguous() and refuses(*weight.shape) is None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; ``out``: float32, bf16 if there is none."""
    if not serves(x, weight):
        return invariant.linear(x, weight, bias, out)
    (m, k), n = x.shape, weight.shape[0]
    bias = None if bias is None else bias.float()
    cut = config(m, n, k)
    if out is not None:
        assert out.dtype == float32
        cut = cut or _tiles(min(m, MAX_ROWS), n, k, False)
        return batch_gemm.linear(x.contiguous(), weight, cut, bias=bias, epilogue=FLOAT32, out=out)
    if cut is None:
        return prompt_gemm.linear(x.contiguous(), weight, bias=bias)
    return batch_gemm.linear(x.contiguous(), weight, cut, bias=bias, epilogue=STORE)


def gated(x: Tensor, weight: Tensor, epilogue: int) -> Tensor:
    """``act_mul(x @ weight.T)``, whose gate and up are rounded to bf16 in between."""
    (m, k), n = x.shape, weight.shape[0]
    cut = config(m, n, k, True)
    if cut is None:
        return prompt_gemm.linear(x.contiguous(), weight, epilogue=epilogue)
    return batch_gemm.linear(x.contiguous(), weight, cut, epilogue=epilogue, rounded=True)


def activates(x: Tensor, kind: str) -> bool:
    """Whether steps without adapters and pictures have the activation of ``x`` in a product, so that others
    must have its bits."""
    return this_device().wgmma and act_mul.takes(x, kind)


def gate_refuses(work: Work, linear: Node, act: Node) -> str | None:
    if not work.asked.deterministic:
        return OTHER
    w = linear.given["w"]
    if w.kind != "bf16":
        return OTHER
    if linear.given["bias"] is not None or linear.given.get("addend") is not None:
        return "something is added to gate and up"
    if w.n % 16 or act.given["kind"] not in act_mul.KINDS:
        return "its output width is no multiple of 16, or its activation another"
    return refuses(w.n, w.k)


def gate(work: Work, linear: Node, act: Node) -> list[Node]:
    given = {"x": linear.given["x"], "weight": linear.given["w"].data}
    given |= {"epilogue": GATES[act.given["kind"]]}
    return [Node("invariant gated", gated, given, act.results, linear.rows)]


def config(m: int, n: int, k: int, gated: bool = False) -> Config | None:
    """How ``batch_gemm`` cuts ``m`` rows and a weight ``[n, k]``; None: ``prompt_gemm`` is faster."""
    if m <= MAX_ROWS:
        return _tiles(next(size for size in ROWS if size >= m), n, k, gated)
    m = -(-m // LONG) * LONG
    if prompt_gemm.refuses(m, n, k, gated) is None and prompt_gemm.fills(m, n):
        return None
    return _tiles(m, n, k, gated)


def sizes(products: Iterable[tuple[int, int, str]], most: int) -> list[int]:
    """Numbers of rows from MAX_ROWS to ``most`` with which weights take all cuts that they take."""
    first: dict[object, int] = {}
    for n, k, kind in products:
        if kind != "bf16" or refuses(n, k) is not None:
            continue
        for m in (*range(MAX_ROWS + 1, most, LONG), most):
            for behind in (False, True):
                first.setdefault((behind, config(m, n, k, behind)), m)
    return sorted({m for m in first.values() if m > MAX_ROWS})


@lru_cache(1 << 14)
def _tiles(m: int, n: int, k: int, gated: bool) -> Config:
    """The cut of the least estimated time, of which no block has a part of k."""
    count = processors()
    rows = [size for size in ROWS if size < m + 32] if m <= MAX_ROWS else [128, 192, 256]
    cuts = [cut for tile in TILES for size in rows for cut in _cuts(tile, size, k, gated)]

    def clocks(cut: Config) -> tuple[float, float]:
        """And, of those with as many, the share of multiprocessors that have nothing to do."""
        blocks = -(-n // cut.tile) * -(-m // cut.rows)
        waves = -(-blocks // count)
        whole = 64 * cut.groups * cut.passes
        feed = FEED * cut.passes * (cut.box + cut.rows)
        multiply = MULTIPLY * max(whole, 64) * max(cut.rows, 64) / 64
        least = max(feed, multiply, ASK * cut.passes / cut.panels)
        return max(waves * least, READ * n), 1 - blocks / (waves * count)

    return min(cuts, key=clocks)


def _cuts(tile: int, rows: int, k: int, gated: bool) -> list[Config]:
    """With ``rows`` of x in a tile, if there are registers and memory for its sums."""
    if rows > (64 if tile == 32 else 128 if tile == 256 else MAX_ROWS):
        return []
    if gated and tile == 32:
        return []
    plain = Config(tile, 1, 1, rows=rows)
    wide = plain._replace(panels=2)
    fits = 3 * 2 * 128 * (wide.box + rows) + 1280 <= SHARED[0]
    return [wide, plain] if fits and k % 128 == 0 and not gated else [plain]

"""Which kernel multiplies by a weight, and how it cuts the work.

A table says so that ``bench/tune.py`` has measured on such a card (``tuned/``, a file for each); where it has
no line, the launchers estimate it from the number of multiprocessors. What a kernel cannot do is not asked
here: see ``refuses`` of the launchers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from sgla.kernels.cuda import batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.device import this_device

FOLDER = Path(__file__).with_name("tuned")
Kernel = Literal["few rows", "tiles", "prompt tiles", "library"]
CONFIGS: dict[Kernel, Any] = {"few rows": skinny_gemm.Config, "tiles": batch_gemm.Config}


class Product(NamedTuple):
    """A weight ``[n, k]``. ``gated``: its rows are gate then up, and the activation follows; ``storage``: the
    kind of weight."""

    n: int
    k: int
    gated: bool = False
    storage: str = "bf16"


class Algorithm(NamedTuple):
    """A kernel and how it cuts the work. ``config`` None: it decides that by itself."""

    kernel: Kernel
    config: skinny_gemm.Config | batch_gemm.Config | None = None


LIBRARY, PROMPT = Algorithm("library"), Algorithm("prompt tiles")


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What serves a product with ``first`` to ``last`` rows.
    ``us``: microseconds that each kernel took at best with the last; only people read these."""

    n: int
    k: int
    gated: bool
    storage: str
    first: int
    last: int
    kernel: Kernel
    config: dict[str, int | bool] = {}
    us: dict[str, float] = {}

    @property
    def product(self) -> Product:
        return Product(self.n, self.k, self.gated, self.storage)

    @property
    def algorithm(self) -> Algorithm:
        return Algorithm(self.kernel, CONFIGS[self.kernel](**self.config) if self.config else None)


class Table:
    """Lines by product; those of one product do not overlap."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._rows: dict[Product, list[tuple[int, int, Algorithm]]] = {}
        for line in sorted(lines, key=lambda line: line.last):
            self._rows.setdefault(line.product, []).append((line.last, line.first, line.algorithm))

    def find(self, m: int, product: Product) -> Algorithm | None:
        rows = self._rows.get(product)
        if rows is None:
            return None
        at = bisect_left(rows, (m,))
        return rows[at][2] if at < len(rows) and rows[at][1] <= m else None


def file_of(card: str) -> Path:
    """Where the table of a card with this name is, if there is one."""
    return FOLDER / (card.removeprefix("NVIDIA ").replace(" ", "-").replace("/", "-") + ".jsonl")


@cache
def table_of(card: str) -> Table:
    path = file_of(card)
    if not path.is_file():
        return Table()
    return Table(msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines())


def algorithm_for(m: int, product: Product) -> Algorithm:
    """For ``m`` rows."""
    return measured(m, product) or estimated(m, product)


def measured(m: int, product: Product) -> Algorithm | None:
    """What the table of this card says."""
    return table_of(this_device().name).find(m, product)


def estimated(m: int, product: Product) -> Algorithm:
    n, k, gated, storage = product
    if m < batch_gemm.MIN_ROWS or (storage == "fp8" and m <= skinny_gemm.MAX_ROWS):
        columns = n // 2 if gated else n
        return Algorithm("few rows", skinny_gemm.default_config(m, columns, k, gated, storage == "fp8"))
    if storage == "fp8g128":
        takes = batch_gemm.refuses(n, k, e4m3=True) is None
        return Algorithm("tiles", batch_gemm.grouped_config(m, n, k, gated)) if takes else LIBRARY
    if storage == "fp8":
        takes = batch_gemm.refuses(n, k, e4m3=True) is None
        cut = batch_gemm.default_config(m, n, k, gated, e4m3=True) if takes else None
        return LIBRARY if cut is None else Algorithm("tiles", cut)
    if storage != "bf16":
        return LIBRARY
    if prompt_gemm.refuses(m, n, k, gated) is None and prompt_gemm.fills(m, n):
        return PROMPT
    config = batch_gemm.default_config(m, n, k, gated)
    return LIBRARY if config is None else Algorithm("tiles", config)

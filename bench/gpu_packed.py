"""Try the tiles of Triton's products with weights of few bits, for more rows than the CUDA kernels take.

    python bench/gpu_packed.py [--rows 64] [--kinds int8g128,mxfp8] [--seconds 60]

The products are those of Qwen3-8B's layers, without what stands before and after them. Each tile is compared
with the product by the dense weight, and then timed by graph replays over weights larger than the L2 cache.
One JSON line a product: microseconds of the best tiles, and of the one that serves.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import gpu_integers as gi
import lines
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels.integers import KINDS
from sgla.kernels.rehearsal import compilers, rehearsing
from sgla.kernels.triton import e2m1, integers

MOST = 8  # tiles told
WRONG = 1e-2  # relative error
SHAPES = (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4), (64, 4, 3), (64, 4, 4), (256, 8, 3)
Tile = tuple[int, ...]  # rows, outputs, warps, stages, splits
Run = Callable[[Any], Tensor]


def tiles(rows: int, n: int, blocks: int) -> Iterator[Tile]:
    """Those whose programs fill an H200 once to four times."""
    m = 32 if rows <= 32 else 64
    for (width, warps, stages), splits in itertools.product(SHAPES, (1, 2, 4, 8)):
        if 100 <= -(-n // width) * splits <= 560 and blocks >= 4 * splits:
            yield m, width, warps, stages, splits


def by(kind: str, x: Tensor, tile: Tile | None) -> Run:
    """The product in this tile, or in the one that serves."""
    if kind in KINDS:
        made = integers.Tile(*tile) if tile else None
        return lambda w: integers.linear(x, w, tile=made)
    if tile is None:
        return lambda w: e2m1.linear(x, w)
    m, *cut = tile
    given = e2m1.Cut(m, e2m1.Tile(*cut))

    def run(w: Any) -> Tensor:
        with patch.object(e2m1, "cut", lambda *_: given):
            return e2m1.linear(x, w)

    return run


def us(run: Run, weights: list[Any]) -> float:
    def body() -> None:
        for w in weights:
            run(w)

    return round(time_us(body, len(weights), 8), 2)


def measure(layer: gi.Layer, rows: int, kind: str, weights: list[Any]) -> dict[str, Any]:
    x = torch.randn(rows, layer.k, dtype=torch.bfloat16, device="cuda")
    dense = weights[0].dequant()
    expected, found, wrong = x.float() @ dense.float().T, [], []
    for tile in tiles(rows, layer.n, layer.k // 128):
        run = by(kind, x, tile)
        try:
            if not (run(weights[0]) - expected).norm() < WRONG * expected.norm():
                wrong.append(tile)
            found.append((us(run, weights), tile))
        except Exception as failed:  # no room, for the most part
            print(f"{layer.name}, {kind}: {tile} failed: {str(failed)[:100]}")
    fields = {"bench": "packed", "product": layer.name, "rows": rows, "kind": kind, "wrong": wrong}
    fields |= {"serving": us(by(kind, x, None), weights), "floor": round(weights[0].nbytes / 4.34e6, 2)}
    return fields | {"best": sorted(found)[:MOST]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="64")
    parser.add_argument("--kinds", default="int8g128,mxfp8,int4g128,nf4,int8g32")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    for rows, kind in itertools.product(map(int, args.rows.split(",")), args.kinds.split(",")):
        if time.monotonic() > end:
            break
        made = {layer: gi.weights_of(layer, kind) for layer in gi.LAYERS}
        with rehearsing():  # all compile side by side
            for layer, weights in made.items():
                x = torch.randn(rows, layer.k, dtype=torch.bfloat16, device="cuda")
                for tile in (None, *tiles(rows, layer.n, layer.k // 128)):
                    by(kind, x, tile)(weights[0])
        for layer, weights in made.items():
            lines.emit(measure(layer, rows, kind, weights))
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

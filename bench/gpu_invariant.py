"""What ``--deterministic`` costs by kernel, in the shapes of Qwen3-8B: linear layers whose k is not split
beside those that serve else, with the three fastest cuts, and attention in chunks beside the usual.

    python bench/gpu_invariant.py [--rows 1,16,64,128,256,1024] [--seconds 60]

A JSON line each, microseconds in a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lines
import numpy as np
import torch
from gpu_kernels import BF16, SCORING, decode_batch, shape_of, time_us

from sgla import attention
from sgla.attention.base import cut
from sgla.kernels.cuda import batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.cuda.batch_gemm import MAX_ROWS, SILU, STORE, Config
from sgla.kernels.gpu import invariant
from sgla.kernels.gpu.tuning import Product, algorithm_for
from sgla.kernels.rehearsal import rehearsing

LAYERS = {"q, k, v": (6144, 4096), "o": (4096, 4096), "gate and up": (24576, 4096), "down": (4096, 12288)}
SIZES = 32, 64, 128, 256  # rows of x in a tile
DECODES = (1, 640), (1, 8192), (16, 2048), (64, 640), (256, 640), (8, 32768)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,128,256,1024")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    for rows, length in DECODES:
        decode(rows, length)
    for length in (1024, 4096, 16384):
        prompt(length)
    for m in map(int, args.rows.split(",")):
        for name, (n, k) in LAYERS.items():
            if time.monotonic() < end:
                product(name, m, n, k)


def product(name: str, m: int, n: int, k: int) -> None:
    gated = name == "gate and up"
    x = torch.randn(m, k, dtype=BF16, device="cuda")
    copies = -(-(200 << 20) // (2 * n * k))
    weights = [torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5 for _ in range(copies)]
    epilogue = SILU if gated else STORE

    def us(run: Callable[[torch.Tensor], Any]) -> float:
        return round(time_us(lambda: [run(w) for w in weights], len(weights)), 2)

    def cut_us(cut: Config | None) -> float:
        if cut is None:
            return us(lambda w: prompt_gemm.linear(x, w, epilogue=epilogue))
        return us(lambda w: batch_gemm.linear(x, w, cut, epilogue=epilogue, rounded=gated))

    kernel, serving = algorithm_for(m, Product(n, k, gated))
    usual: Callable[[torch.Tensor], Any] = {
        "few rows": lambda w: skinny_gemm.linear(x, w, config=serving, epilogue=epilogue),  # type: ignore[arg-type]
        "tiles": lambda w: batch_gemm.linear(x, w, serving, epilogue=epilogue),  # type: ignore[arg-type]
        "prompt tiles": lambda w: prompt_gemm.linear(x, w, epilogue=epilogue),
        "library": lambda w: torch.nn.functional.linear(x, w),
    }[kernel]
    sizes = [size for size in SIZES if size < 2 * m or size == 32] if m <= MAX_ROWS else [128, 192, 256]
    tiles = [(tile, size) for tile in invariant.TILES for size in sizes]
    cuts = [one for tile, size in tiles for one in invariant._cuts(tile, size, k, gated)]
    with rehearsing():  # all compile at once
        for one in cuts:
            batch_gemm.linear(x, weights[0], one, epilogue=epilogue, rounded=gated)
    found = sorted((cut_us(one), [one.tile, one.rows, one.panels]) for one in cuts)
    chosen = invariant.config(m, n, k, gated)
    fields: dict[str, Any] = {"bench": "invariant", "product": name, "rows": m, "kernel": kernel}
    fields |= {"usual": us(usual), "chosen": cut_us(chosen)}
    fields |= {"cut": chosen and [chosen.tile, chosen.rows, chosen.panels], "best": found[:4]}
    lines.emit(fields | {"floor": round(2 * n * k / 4.34e6, 1)})


def attends(name: str, rows: int) -> attention.Attention:
    shape = shape_of(32, 8, rows)._replace(context_len=40961, deterministic=name == "chunked")
    return attention.choose_backend("auto", [shape])[0]


def decode(rows: int, length: int) -> None:
    q, layers, batch = decode_batch(rows, length, 32, 8, 128)

    def us(name: str) -> float:
        attend, batch.units = attends(name, rows).decode, None
        run = [partial(attend.forward, q, kv, batch, SCORING) for kv in layers]
        return round(time_us(lambda: [one() for one in run], len(run)), 1)

    found = {name: us(name) for name in ("usual", "chunked")}
    floor = round(rows * length * 8 * 128 * 4 / 4.34e6, 1)
    lines.emit({"bench": "invariant", "decode": [rows, length], **found, "floor": floor})


def prompt(length: int) -> None:
    """A whole one, from pages."""
    _, layers, batch = decode_batch(1, length, 32, 8, 128)
    q = torch.randn(length, 4096, dtype=BF16, device="cuda")
    out, start, lens = torch.empty_like(q), np.zeros(1, np.int32), np.full(1, length, np.int32)

    def us(name: str) -> float:
        prompts = attends(name, 1).prompts
        assert prompts is not None
        tiles = torch.from_numpy(cut(start, start, lens, 0, prompts.tile)).cuda()
        run = partial(prompts.forward, q, layers[0], batch.page_table, tiles, SCORING, out)
        return round(time_us(lambda: [run(), run()], 2), 1)

    lines.emit({"bench": "invariant", "prompt": length, **{name: us(name) for name in ("usual", "chunked")}})


if __name__ == "__main__":
    main()

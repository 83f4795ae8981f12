"""Try the cuts of the kernel for few rows with weights of 4 or 8 bits, and say which is fastest.

    python bench/gpu_integers.py [--rows 1,4,16] [--kind int4g128] [--seconds 60] [--kernels fixed] [--out F]

The products are those of Qwen3-8B's layers with what stands before and after them. Each cut is compared with
the product by the dense weight in float32, and then timed by graph replays over weights larger than the L2
cache. One JSON line a product and number of rows: microseconds and GB/s of the best cuts, and of the cut that
serves. ``--kernels``: of ``integer``, ``late`` and ``fixed``, whose cuts are tried. Then a layer's products
follow each other, with the best cuts of several kinds; F gets those that are fastest so, as lines of
``sgla/kernels/gpu/tuned``.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lines
import msgspec
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import integer_gemm as ig
from sgla.kernels.gpu.tuning import Line
from sgla.kernels.integers import KINDS
from sgla.kernels.rehearsal import compilers
from sgla.quant.weight import pack

BF16 = torch.bfloat16
OTHERS = 300 << 20  # bytes of weights that a replay reads
WRONG = 1e-2  # relative error
LENGTH = 6  # layers of a chain


class Layer(NamedTuple):
    name: str
    n: int  # weight rows
    k: int
    norm: bool
    epilogue: int


LAYERS = (
    Layer("qkv", 6144, 4096, True, ig.STORE),
    Layer("o", 4096, 4096, False, ig.ADD),
    Layer("gate+up", 24576, 4096, True, ig.SILU),
    Layer("down", 4096, 12288, False, ig.ADD),
)


def fixed_cuts(rows: int) -> Iterator[ig.Config]:
    """Those that take part, and others like them."""
    for config in late_cuts(rows):
        yield config._replace(fixed=True)
        yield config._replace(fixed=True, late=False)


def late_cuts(rows: int) -> Iterator[ig.Config]:
    """With room for the next kernel's blocks, which begin when memory would have nothing to do."""
    if rows <= 8:
        several = itertools.product((2, 4), (4, 8), (1,) if rows == 1 else (1, 2), (1, 2))
    else:
        several = itertools.product((2,), (1, 2, 4), (2, 4, 8), (1, 2))
    for unit, warps, slices, per_sm in several:
        yield ig.Config(1, warps, slices, unit, per_sm, 2, late=True)


def cuts(rows: int) -> Iterator[ig.Config]:
    if rows <= 8:
        parts = [1] if rows == 1 else [1, 2]
        several = itertools.product(((1, 2), (1, 4), (2, 2)), (2, 4, 8), parts, ((2, 2), (1, 2), (1, 1)))
    else:
        several = itertools.product(((1, 2), (2, 2)), (1, 2, 4), [1, 2, 4, 8], ((2, 2), (1, 1)))
    for (tiles, unit), warps, slices, (per_sm, resident) in several:
        if warps * slices <= 16 and not (tiles == resident == 2 and rows > 8):
            yield ig.Config(tiles, warps, slices, unit, per_sm, resident)


def shape_of(layer: Layer, rows: int, kind: str) -> ig.Shape:
    n = layer.n // 2 if layer.epilogue == ig.SILU else layer.n
    return ig.Shape(ig.padded(rows), n, layer.k, *KINDS[kind], layer.norm, layer.epilogue)


class Product:
    """A layer with weights, and inputs of so many rows."""

    def __init__(self, layer: Layer, rows: int, weights: list[Any]) -> None:
        self.layer, self.weights = layer, weights
        n = layer.n // 2 if layer.epilogue == ig.SILU else layer.n
        self.x = torch.randn(rows, layer.k, dtype=BF16, device="cuda")
        self.norm = torch.rand(layer.k, device="cuda") + 0.5 if layer.norm else None
        self.before = torch.randn(rows, n, dtype=BF16, device="cuda")

    def run(self, weight: Any, out: Tensor, config: ig.Config | None) -> None:
        more = {"norm": self.norm, "eps": 1e-6, "epilogue": self.layer.epilogue, "out": out}
        ig.linear(self.x, weight, config=config, **more)  # type: ignore[arg-type]

    def expected(self, dense: Tensor) -> Tensor:
        x = self.x.float()
        y = (x if self.norm is None else ops.rms_norm(x, self.norm, 1e-6)) @ dense.T
        if self.layer.epilogue == ig.SILU:
            return ops.act_mul(y, "silu")
        return y + self.before.float() if self.layer.epilogue == ig.ADD else y

    def error(self, expected: Tensor, config: ig.Config) -> float:
        out = self.before.clone()
        self.run(self.weights[0], out, config)
        return float((out.float() - expected).norm() / expected.norm())

    def us(self, config: ig.Config | None) -> float:
        out = self.before.clone()

        def body() -> None:
            for weight in self.weights:
                self.run(weight, out, config)

        return time_us(body, len(self.weights), 12)


def weights_of(layer: Layer, kind: str) -> list[Any]:
    first = pack(torch.randn(layer.n, layer.k, device="cuda") / layer.k**0.5, kind)
    count = max(3, OTHERS // first.nbytes)
    made = type(first)
    return [
        first,
        *(made(layer.n, layer.k, *(t.clone() for t in first.tensors)) for _ in range(count - 1)),
    ]


def measure(product: Product, dense: Tensor, configs: list[ig.Config]) -> list[tuple[float, ig.Config]]:
    expected, found = product.expected(dense), []
    for config in configs:
        try:
            error = product.error(expected, config)
            if error < WRONG:
                found.append((product.us(config), config))
            else:
                print(f"{product.layer.name}, {len(product.x)} rows: {config} is wrong by {error:.1e}")
        except RuntimeError as failed:
            print(f"{product.layer.name}, {len(product.x)} rows: {config} failed: {str(failed)[:200]}")
    return sorted(found)


def chains(
    products: list[Product], found: list[list[tuple[float, ig.Config]]]
) -> tuple[ig.Config, ...] | None:
    """A layer's products in turn, with the best cuts of several kinds: says how long each takes, and returns
    those that are fastest; None: what serves is."""
    kinds: dict[str, Callable[[ig.Config], bool]] = {
        "best": lambda config: True,
        "late": lambda config: config.late,
        "late, one block": lambda config: config.late and config.per_sm == 1,
        "integer": lambda config: not config.fixed,
        "integer, late": lambda config: config.late and not config.fixed,
    }
    several: dict[str, tuple[ig.Config | None, ...]] = {"serving": (None,) * len(products)}
    for name, fits in kinds.items():
        chosen = tuple(next((config for _, config in each if fits(config)), None) for each in found)
        several |= {name: chosen} if None not in chosen else {}
    outs = [product.before.clone() for product in products]
    times = {}
    for name, configs in several.items():

        def body(configs: tuple[ig.Config | None, ...] = configs) -> None:
            for at in range(LENGTH):
                for product, config, out in zip(products, configs, outs, strict=True):
                    product.run(product.weights[at % len(product.weights)], out, config)

        times[name] = round(time_us(body, LENGTH, 12), 2)
    fields: dict[str, Any] = {
        "bench": "integers",
        "product": "layer",
        "rows": len(products[0].x),
        "us": times,
    }
    lines.emit(fields | {"cuts": several})
    configs = several[min(times, key=lambda name: times[name])]
    return None if None in configs else tuple(config for config in configs if config is not None)


def line_of(layer: Layer, rows: int, kind: str, config: ig.Config) -> Line:
    first = max(1, ig.padded(rows) // 2 + 1)
    gated = layer.epilogue == ig.SILU
    return Line(layer.n, layer.k, gated, kind, first, rows, "few integers", config._asdict())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16,4")
    parser.add_argument("--kind", default="int4g128", choices=list(KINDS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kernels", default="integer,late,fixed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    named = {"integer": cuts, "late": late_cuts, "fixed": fixed_cuts}
    several = [named[name] for name in args.kernels.split(",")]
    end = time.monotonic() + args.seconds
    jobs = list(itertools.product(map(int, args.rows.split(",")), LAYERS))
    fitting = {}
    for rows, layer in jobs:
        shape = shape_of(layer, rows, args.kind)
        tried = dict.fromkeys(config for each in several for config in each(rows))
        fitting[rows, layer] = [config for config in tried if ig.plan(shape, config) is not None]
        for config in fitting[rows, layer]:
            ig._kernel(shape, config)
    made = {layer: weights_of(layer, args.kind) for layer in LAYERS}
    found: dict[tuple[int, Layer], list[tuple[float, ig.Config]]] = {}
    products = {job: Product(job[1], job[0], made[job[1]]) for job in jobs}
    for rows, layer in jobs:
        if time.monotonic() > end:
            break
        product = products[rows, layer]
        best = measure(product, made[layer][0].dequant(), fitting[rows, layer])
        size, serving = made[layer][0].nbytes, product.us(None)
        found[rows, layer] = best
        shown = [[*config, round(us, 2), round(size / us / 1e3)] for us, config in best[:5]]
        fields: dict[str, Any] = {"bench": "integers", "product": layer.name, "rows": rows, "kind": args.kind}
        fields |= {"us": round(serving, 2), "gb_s": round(size / serving / 1e3), "best": shown}
        lines.emit(fields)
    for rows in dict.fromkeys(rows for rows, _ in jobs):
        if all(found.get((rows, layer)) for layer in LAYERS):
            own = [products[rows, layer] for layer in LAYERS]
            taken = chains(own, [found[rows, layer] for layer in LAYERS])
            if args.out and taken is not None:
                with args.out.open("ab") as table:
                    for layer, config in zip(LAYERS, taken, strict=True):
                        table.write(msgspec.json.encode(line_of(layer, rows, args.kind, config)) + b"\n")
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

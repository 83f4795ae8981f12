"""Try the cuts of the kernel for few rows with weights of 4 or 8 bits, and say which is fastest.

    python bench/gpu_integers.py [--rows 1,4,16] [--kind int4g128] [--seconds 60] [--stages 5]

The products are those of Qwen3-8B's layers with what stands before and after them. Each cut is compared with
the product by the dense weight in float32, and then timed by graph replays over weights larger than the L2
cache. One JSON line a product and number of rows: microseconds and GB/s of the best cuts, and of the cut that
serves.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import lines
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.cuda import integer_gemm as ig
from sgla.kernels.integers import KINDS
from sgla.kernels.rehearsal import compilers
from sgla.quant.weight import pack

BF16 = torch.bfloat16
OTHERS = 300 << 20  # bytes of weights that a replay reads
WRONG = 1e-2  # relative error


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
    bits, group, codes = ig.packing(kind)
    return ig.Shape(ig.padded(rows), n, layer.k, bits, group, layer.norm, layer.epilogue, codes=codes)


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
            if not error < WRONG:
                print(f"{product.layer.name}, {len(product.x)} rows: {config} is wrong by {error:.1e}")
            found.append((product.us(config), config))
        except RuntimeError as failed:
            print(f"{product.layer.name}, {len(product.x)} rows: {config} failed: {str(failed)[:200]}")
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16,4")
    parser.add_argument("--kind", default="int4g128", choices=[*KINDS, *ig.OTHERS])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--stages", type=int, default=ig.STAGES)
    args = parser.parse_args()
    ig.STAGES = args.stages
    end = time.monotonic() + args.seconds
    jobs = list(itertools.product(map(int, args.rows.split(",")), LAYERS))
    fitting = {}
    for rows, layer in jobs:
        shape = shape_of(layer, rows, args.kind)
        fitting[rows, layer] = [config for config in cuts(rows) if ig.plan(shape, config) is not None]
        for config in fitting[rows, layer]:
            ig._kernel(shape, config)
    made = {layer: weights_of(layer, args.kind) for layer in LAYERS}
    for rows, layer in jobs:
        if time.monotonic() > end:
            break
        product = Product(layer, rows, made[layer])
        found = measure(product, made[layer][0].dequant(), fitting[rows, layer])
        size, serving = made[layer][0].nbytes, product.us(None)
        best = [[*config, round(us, 2), round(size / us / 1e3)] for us, config in found[:5]]
        fields: dict[str, Any] = {"bench": "integers", "product": layer.name, "rows": rows, "kind": args.kind}
        fields |= {"us": round(serving, 2), "gb_s": round(size / serving / 1e3), "best": best}
        lines.emit(fields)
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

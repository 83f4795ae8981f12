"""Try the cuts of the kernel that keeps activations in registers (weights of 4 or 8 bits), and say which is
fastest.

    python bench/gpu_stationary.py [--rows 16,1,8] [--kind int4g128] [--seconds 60] [--chains 16,1,8]

The products, their check and their times are those of ``gpu_integers.py``. One JSON line a product and number
of rows, with the share of 4.34 TB/s; one a chain of a layer's four products, each of which reads what the one
before has written; and, of a kernel that reads as many bytes and does nothing else, microseconds in a chain.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_integers as gi
import lines
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels.cuda import integer_gemm as ig
from sgla.kernels.cuda import stationary_gemm as sg
from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.integers import KINDS
from sgla.kernels.rehearsal import compilers

BF16 = torch.bfloat16
RATE = 4.34e6  # bytes a microsecond
EARLY = 1, 2, 3
LAYERS = {layer.name: layer for layer in gi.LAYERS}


def cuts(rows: int, layer: gi.Layer) -> Iterator[sg.Config]:
    blocks = (2, 4) if rows <= 8 else (2, 1)
    slices = (2, 3, 4, 6, 8) if layer.k > 8192 else (1, 2, 4)
    tile = 2 if layer.n > 8192 else 1
    beside = (1, 1, 1, False), (1, 2, 2, False), (1, 1, 2, False), (1, 1, 2, True), (2, 1, 1, False)
    for block, slice_, more in itertools.product(blocks, slices, beside):
        alone = more == beside[0]
        for early, behind in itertools.product((sg.STAGES, 1), (False, True)):
            if alone or (early == 1) == behind:
                yield sg.Config(tile, block, slice_, *more, early, behind)


def fits(shape: sg.Shape, config: sg.Config) -> bool:
    made = sg.plan(shape, config)
    return made is not None and made.threads // 32 * config.per_sm >= 6 and made.parts * config.slices >= 100


def different(shape: sg.Shape, configs: list[sg.Config]) -> list[sg.Config]:
    """Those that are not the same kernel as another."""
    return list({str(sg.plan(shape, config)): config for config in reversed(configs)}.values())[::-1]


class Product(gi.Product):
    def run(self, weight: Any, out: Tensor, config: Any) -> None:
        more: dict[str, Any] = {"norm": self.norm, "eps": 1e-6, "epilogue": self.layer.epilogue, "out": out}
        if isinstance(config, sg.Config):
            sg.linear(self.x, weight, config=config, **more)
        else:
            ig.linear(self.x, weight, config=config, **more)


def sweep(
    rows: int, layer: gi.Layer, weights: list[Any], configs: list[sg.Config], kind: str
) -> sg.Config | None:
    product = Product(layer, rows, weights)
    found: Any = gi.measure(product, weights[0].dequant(), configs)  # type: ignore[arg-type]
    size, serving = weights[0].nbytes, product.us(None)
    best = [[*config, round(us, 2), round(size / us / RATE, 3)] for us, config in found[:6]]
    late = [[*config, round(us, 2)] for us, config in found if config.early == 1][:2]
    fields: dict[str, Any] = {"bench": "stationary", "product": layer.name, "rows": rows, "kind": kind}
    fields |= {"serving": round(serving, 2), "floor": round(size / RATE, 2), "best": best, "early 1": late}
    served = ig.default_config(gi.shape_of(layer, rows, kind))
    assert served is not None
    fields["serving, early"] = {early: round(product.us(served._replace(early=early)), 2) for early in EARLY}
    lines.emit(fields)
    return found[0][1] if found else None


def chain(rows: int, weights: dict[str, list[Any]], run: Callable[[str, Tensor, Any, Any], Tensor]) -> float:
    """Microseconds of a layer."""
    count = min(map(len, weights.values()))
    hidden = torch.randn(rows, 4096, dtype=BF16, device="cuda")

    def body() -> None:
        for at in range(count):
            heads = run("qkv", hidden, weights["qkv"][at], None)
            run("o", heads[:, :4096], weights["o"][at], hidden)
            inner = run("gate+up", hidden, weights["gate+up"][at], None)
            run("down", inner, weights["down"][at], hidden)

    return time_us(body, count, 12)


def chains(rows: int, weights: dict[str, list[Any]], cut: dict[str, Any], kind: str) -> None:
    norm = torch.rand(4096, device="cuda") + 0.5

    def runner(chosen: dict[str, Any]) -> Callable[[str, Tensor, Any, Any], Tensor]:
        def run(name: str, x: Tensor, weight: Any, out: Any) -> Tensor:
            layer, config = LAYERS[name], chosen.get(name)
            module: Any = sg if isinstance(config, sg.Config) else ig
            return module.linear(
                x,
                weight,
                norm=norm if layer.norm else None,
                eps=1e-6,
                epilogue=layer.epilogue,
                out=out,
                config=config,
            )

        return run

    fields: dict[str, Any] = {"bench": "stationary", "product": "layer", "rows": rows, "kind": kind}
    fields["serving"] = round(chain(rows, weights, runner({})), 2)
    fields["stationary"] = round(chain(rows, weights, runner(cut)), 2)
    for name in LAYERS:
        fields[f"but {name}"] = round(
            chain(rows, weights, runner({k: v for k, v in cut.items() if k != name})), 2
        )
    for early in EARLY:
        served = {name: ig.default_config(gi.shape_of(layer, rows, kind)) for name, layer in LAYERS.items()}
        of_early = {name: config._replace(early=early) for name, config in served.items() if config}
        fields[f"serving, early {early}"] = round(chain(rows, weights, runner(of_early)), 2)
    fields["again"] = round(chain(rows, weights, runner({})), 2)
    lines.emit(fields | {"cut": {name: list(config) for name, config in cut.items()}})


class Reads(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("out", ctypes.c_void_p), ("count", ctypes.c_int))


def reads(weights: dict[str, list[Any]]) -> None:
    out = torch.zeros(512, dtype=torch.int32, device="cuda")
    path = str(Path(__file__).parent / "gpu" / "reads.cu")
    for early, late, per_sm in ((1, 0, 2), (1, 0, 1), (1, 1, 1), (1, 2, 1), (0, 0, 2)):
        kernel = Kernel(path, "reads", {"EARLY": early, "LATE": late})
        found = {}
        for name, of in weights.items():

            def body(of: list[Any] = of, kernel: Kernel = kernel, per_sm: int = per_sm) -> None:
                for weight in of:
                    words = weight.tensors[0]
                    params = Reads(words.data_ptr(), out.data_ptr(), words.nbytes // 16)
                    kernel.launch(processors() * per_sm, 512, params)

            us = time_us(body, len(of), 12)
            found[name] = [round(us, 2), round(of[0].tensors[0].nbytes / us / RATE, 3)]
        lines.emit({"bench": "reads", "early": early, "late": late, "per_sm": per_sm, "us": found})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="16,1,8")
    parser.add_argument("--chains", default="16,1,8")
    parser.add_argument("--kind", default="int4g128", choices=list(KINDS))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--stages", type=int, default=sg.STAGES)
    args = parser.parse_args()
    sg.STAGES = args.stages
    end = time.monotonic() + args.seconds
    jobs = list(itertools.product(map(int, args.rows.split(",")), gi.LAYERS))
    fitting = {}
    for rows, layer in jobs:
        shape = gi.shape_of(layer, rows, args.kind)
        fitting[rows, layer] = different(
            shape, [config for config in cuts(rows, layer) if fits(shape, config)]
        )
        for config in fitting[rows, layer]:
            sg._kernel(shape, config)
    made = {layer.name: gi.weights_of(layer, args.kind) for layer in gi.LAYERS}
    best: dict[int, dict[str, Any]] = {}
    reads(made)
    for rows, layer in jobs:
        if time.monotonic() < end:
            found = sweep(rows, layer, made[layer.name], fitting[rows, layer], args.kind)
            if found is not None:
                best.setdefault(rows, {})[layer.name] = found
    for rows in map(int, filter(None, args.chains.split(","))):
        if len(best.get(rows, {})) == len(LAYERS):
            chains(rows, made, best[rows], args.kind)
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

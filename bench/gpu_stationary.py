"""Try the cuts of the kernel that keeps activations in registers (weights of 4 or 8 bits) and those of
``integer_gemm.cu``, and say which is fastest.

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
MOST = 6  # cuts told
LAYERS = {layer.name: layer for layer in gi.LAYERS}


# Tiles and blocks of a warp, slices, warps beside each other, whether a tile is added up behind the next,
# stages that are asked for before the wait, and blocks on a multiprocessor.
CUTS = (
    (1, 4, 1, 1, True, 8, 1),
    (1, 4, 1, 1, False, 8, 1),
    (2, 4, 1, 1, True, 8, 1),
    (2, 4, 1, 1, True, 2, 1),
    (4, 4, 1, 1, True, 8, 1),
    (1, 2, 1, 1, False, 8, 1),
    (2, 2, 1, 1, True, 8, 1),
    (2, 2, 2, 2, False, 8, 1),
    (1, 4, 2, 2, True, 8, 1),
    (1, 4, 2, 2, False, 8, 1),
    (2, 4, 2, 2, True, 8, 1),
    (2, 4, 2, 2, False, 8, 1),
    (2, 4, 2, 2, True, 2, 1),
    (1, 4, 4, 4, True, 8, 1),
    (1, 4, 4, 4, False, 8, 1),
    (2, 4, 4, 4, True, 8, 1),
    (1, 2, 2, 1, True, 8, 2),
    (2, 2, 2, 1, True, 8, 2),
    (1, 2, 4, 2, True, 8, 2),
    (1, 2, 4, 2, False, 8, 2),
    (2, 2, 4, 2, True, 8, 2),
)
WIDE_CUTS = (
    (2, 2, 4, 1, False, 8, 1),
    (2, 2, 4, 1, True, 8, 1),
    (2, 2, 4, 1, False, 2, 1),
    (1, 2, 4, 1, True, 8, 1),
    (1, 3, 4, 1, True, 8, 1),
    (1, 3, 4, 1, False, 8, 1),
    (2, 3, 4, 1, True, 8, 1),
    (2, 3, 4, 1, False, 8, 1),
    *((1, 4, 3, 1, True, 8, 1), (2, 4, 3, 1, True, 8, 1), (1, 4, 6, 2, True, 8, 1), (1, 3, 8, 2, True, 8, 1)),
    (2, 2, 8, 2, False, 8, 1),
    (1, 4, 2, 1, False, 8, 1),
    (1, 2, 6, 1, True, 8, 2),
    (2, 2, 6, 1, True, 8, 2),
    *((1, 2, 8, 1, True, 8, 2), (2, 2, 8, 1, True, 8, 2)),
)


def cuts(rows: int, layer: gi.Layer) -> Iterator[sg.Config]:
    for tiles, blocks, slices, beside, behind, early, per_sm in WIDE_CUTS if layer.k > 8192 else CUTS:
        if rows > 4:
            yield sg.Config(
                tiles, blocks, slices, beside, per_sm=per_sm, resident=per_sm, behind=behind, early=early
            )


def shared(rows: int, layer: gi.Layer) -> Iterator[ig.Config]:
    """Of ``integer_gemm.cu``: what serves, and cuts whose blocks share k."""
    served = ig.default_config(gi.shape_of(layer, rows, "int4g128"))
    if rows > 4 or served is None:
        return
    yield served
    for warps, early in itertools.product((4, 8), (1, 2, 3)):
        yield ig.Config(1, warps, 1, 2, early=early, after=True)
    for warps, slices, unit in itertools.product((4, 8), (1, 2), (2, 4)):
        yield ig.Config(1, warps, slices, unit, early=1, after=True)


def fits(shape: sg.Shape, config: sg.Config | ig.Config) -> bool:
    if isinstance(config, ig.Config):
        cut = ig.plan(shape, config)
        return cut is not None and cut.grid >= 100
    made = sg.plan(shape, config)
    return made is not None and made.threads // 32 * config.per_sm >= 6 and made.parts * config.slices >= 100


def different(shape: sg.Shape, configs: list[Any]) -> list[Any]:
    """Those that are not the same kernel as another."""
    made = {str((sg if isinstance(c, sg.Config) else ig).plan(shape, c)): c for c in reversed(configs)}
    return list(made.values())[::-1]


class Product(gi.Product):
    def run(self, weight: Any, out: Tensor, config: Any) -> None:
        more: dict[str, Any] = {"norm": self.norm, "eps": 1e-6, "epilogue": self.layer.epilogue, "out": out}
        if isinstance(config, sg.Config):
            sg.linear(self.x, weight, config=config, **more)
        else:
            ig.linear(self.x, weight, config=config, **more)


def sweep(rows: int, layer: gi.Layer, weights: list[Any], configs: list[Any], kind: str) -> dict[type, Any]:
    """The best cut of each kernel."""
    product = Product(layer, rows, weights)
    found: Any = gi.measure(product, weights[0].dequant(), configs)
    size, serving = weights[0].nbytes, product.us(None)
    fields: dict[str, Any] = {"bench": "stationary", "product": layer.name, "rows": rows, "kind": kind}
    fields |= {"serving": round(serving, 2), "floor": round(size / RATE, 2)}
    first: dict[type, Any] = {}
    for name, of in (("stationary", sg.Config), ("shared", ig.Config)):
        own = [(us, config) for us, config in found if isinstance(config, of)]
        fields[name] = [[*config, round(us, 2), round(size / us / RATE, 3)] for us, config in own[:MOST]]
        first |= {of: own[0][1]} if own else {}
    lines.emit(fields)
    return first


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


def chains(rows: int, weights: dict[str, list[Any]], best: dict[str, dict[type, Any]], kind: str) -> None:
    norm = torch.rand(4096, device="cuda") + 0.5

    def us(chosen: dict[str, Any]) -> float:
        def run(name: str, x: Tensor, weight: Any, out: Any) -> Tensor:
            layer, config = LAYERS[name], chosen.get(name)
            module: Any = sg if isinstance(config, sg.Config) else ig
            more: dict[str, Any] = {"norm": norm if layer.norm else None, "eps": 1e-6, "out": out}
            return module.linear(x, weight, epilogue=layer.epilogue, config=config, **more)

        return round(chain(rows, weights, run), 2)

    shapes = {name: gi.shape_of(layer, rows, kind) for name, layer in LAYERS.items()}
    sets: dict[str, dict[str, Any]] = {"serving": {}}
    if rows > 4:
        sets["default"] = {n: sg.default_config(s) for n, s in shapes.items()}
    for name, of in (("stationary", sg.Config), ("shared", ig.Config)):
        cut = {layer: found[of] for layer, found in best.items() if of in found}
        sets[name] = cut
        if rows > 1:
            sets |= {f"{name} but {left}": {k: v for k, v in cut.items() if k != left} for left in cut}
    served = {layer: few for layer, shape in shapes.items() if (few := ig.default_config(shape))}
    for early in (8, 1, 0) if rows <= 4 else ():
        cut = {layer: few._replace(after=True, early=early) for layer, few in served.items()}
        sets[f"serving, after, early {early}"] = cut
        sets[f"serving, after, early {early}, eight warps share"] = {
            layer: few._replace(warps=8) for layer, few in cut.items()
        }
    fields: dict[str, Any] = {"bench": "stationary", "product": "layer", "rows": rows, "kind": kind}
    fields["us"] = {name: us(cut) for name, cut in [*sets.items(), ("serving again", {})]}
    lines.emit(fields | {"cut": {name: [list(c) for c in cut.values()] for name, cut in sets.items()}})


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
        both: list[Any] = [*shared(rows, layer), *cuts(rows, layer)]
        fitting[rows, layer] = different(shape, [config for config in both if fits(shape, config)])
        for config in fitting[rows, layer]:
            (sg if isinstance(config, sg.Config) else ig)._kernel(shape, config)
    made = {layer.name: gi.weights_of(layer, args.kind) for layer in gi.LAYERS}
    best: dict[int, dict[str, dict[type, Any]]] = {}
    for rows, layer in jobs:
        if time.monotonic() < end:
            found = sweep(rows, layer, made[layer.name], fitting[rows, layer], args.kind)
            best.setdefault(rows, {})[layer.name] = found
    for rows in map(int, filter(None, args.chains.split(","))):
        if len(best.get(rows, {})) == len(LAYERS):
            chains(rows, made, best[rows], args.kind)
    reads(made)
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

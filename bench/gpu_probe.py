# ruff: noqa: B023
"""What the kernel for 16 rows of integers takes without parts of its work, and with parts done otherwise.

    python bench/gpu_probe.py [--rows 16] [--kind int4g128] [--only TEXT] [--kinds int8g128] [--spread]

Each variant is the source with some text in another's place; where ``error`` is large, only times count. One
JSON line a product and cut: microseconds and relative error by variant. ``--kinds``: instead of that, a
layer's products in turn by either kernel. ``--spread``: cuts of the kernel whose k is spread over a cluster,
and a layer with the best of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import gpu_integers as gi
import gpu_stationary as gs
import lines
import torch
from gpu_kernels import time_us

from sgla.kernels.build import source_folder
from sgla.kernels.cuda import byte_gemm as bg
from sgla.kernels.cuda import integer_gemm as ig
from sgla.kernels.cuda import spread_gemm as sp
from sgla.kernels.cuda import stationary_gemm as sg
from sgla.kernels.cuda.build import Kernel
from sgla.kernels.rehearsal import compilers, rehearsing

Changes = list[tuple[str, str]]
UNPACK = "  if (BITS == 4) return (word >> (4 * p) & mask) | 0x43004300u;\n"
MMA = "mma(sum[j][s % CHAINS], a0, a1, a2, a3, x[j][b][q][step % 2 * 2], x[j][b][q][step % 2 * 2 + 1]);"
ONES = "mma(sum, ONES, ONES, ONES, ONES, x[j][b][step / 2][step % 2 * 2],"
FOLLOW = "      if (BEHIND && i == 0 && tile > first) follow(tile - 1);\n"
SCALE = "acc[j][h * 2 + e] += (total - zero * (e ? of_x.y : of_x.x)) * scale;"
NOTHING: Changes = [(UNPACK, "  if (BITS == 4) return word;\n")]
NO_MMA: Changes = [
    (
        MMA,
        "sum[j][0][0] += __uint_as_float(a0), sum[j][0][1] += __uint_as_float(a1),"
        " sum[j][0][2] += __uint_as_float(a2), sum[j][0][3] += __uint_as_float(a3);",
    )
]
NO_X: Changes = [("if (row < p.m && k < p.k)", "if (row < p.m && k < -p.k)")]
SCALED = "        if (NORM) {\n          const float4 lo"
NO_NORM: Changes = [(SCALED, SCALED.replace("NORM", "NORM && p.m < 0"))]
NO_ONES: Changes = [(ONES, "if (false) " + ONES)]
HALF: Changes = [
    (
        UNPACK,
        "  if (BITS == 4) return (p < 2 ? word : word >> 8) & mask << p % 2 * 4;\n",
    )
]
NO_SUMS: Changes = [(FOLLOW, ""), ("      follow(tile);\n", "      __syncwarp();\n")]
NO_WEIGHTS: Changes = [
    ("    if (tile < last) {\n      const u32 to", "    if (tile < first + 2) {\n      const u32 to")
]
NO_SCALES: Changes = [(SCALE, "acc[j][h * 2 + e] += total;")]
NO_PROLOGUE = NO_X + NO_NORM + NO_ONES
VARIANTS: dict[str, Changes] = {
    "as it is": [],
    "nothing unpacked": NOTHING,
    "half unpacked": HALF,
    "no products": NO_MMA,
    "neither": NOTHING + NO_MMA,
    "neither, no scales": NOTHING + NO_MMA + NO_SCALES,
    "neither, no scales, x, norm": NOTHING + NO_MMA + NO_SCALES + NO_X + NO_NORM,
    "no sums of warps": NO_SUMS,
    "no x": NO_X,
    "no norm": NO_NORM,
    "no ones": NO_ONES,
    "no x, norm, ones": NO_PROLOGUE,
    "no scales": NO_SCALES,
    "copies": NOTHING + NO_MMA + NO_SCALES + NO_PROLOGUE,
    "copies, no sums of warps": NOTHING + NO_MMA + NO_SCALES + NO_PROLOGUE + NO_SUMS,
    "no weights": NO_WEIGHTS,
    "no weights, x, norm, ones": NO_WEIGHTS + NO_PROLOGUE,
    "no weights, products": NO_WEIGHTS + NO_MMA,
    "no weights, nothing unpacked": NO_WEIGHTS + NOTHING,
    "no weights, half unpacked": NO_WEIGHTS + HALF,
    "no weights, neither": NO_WEIGHTS + NOTHING + NO_MMA,
    "no weights, neither, scales": NO_WEIGHTS + NOTHING + NO_MMA + NO_SCALES,
    "no weights, neither, scales, x, norm, ones": NO_WEIGHTS + NOTHING + NO_MMA + NO_SCALES + NO_PROLOGUE,
}
SIXTEEN = (
    "as it is",
    "nothing unpacked",
    "half unpacked",
    "no products",
    "neither",
    "neither, no scales",
    "neither, no scales, x, norm",
)


def text_of(path: Path, changes: Changes) -> dict[str, str]:
    """A source and its headers, changed."""
    texts = {header.name: header.read_text() for header in source_folder("cuda").glob("*.cuh")}
    texts["stationary_gemm.cu"] = path.read_text()
    for found, put in changes:
        at = [name for name, text in texts.items() if text.count(found) == 1]
        if len(at) != 1:
            raise ValueError(f"{path} has no {found!r}")
        texts[at[0]] = texts[at[0]].replace(found, put)
    return texts


def variant(folder: Path, path: Path, changes: Changes) -> str:
    """One file: a compiler would take the headers from where the sources are."""
    folder.mkdir()
    texts = text_of(path, changes)
    whole = texts["stationary_gemm.cu"]
    for name in texts:
        whole = whole.replace(f'#include "{name}"', texts[name].replace("#pragma once", ""))
    (folder / "stationary_gemm.cu").write_text(whole)
    return str(folder / "stationary_gemm.cu")


def sixteen(shape: sg.Shape, cut: sg.Config) -> sg.Plan:
    """Of the source whose stages are 16 rows: more of them fit."""
    made = sg.plan(shape, cut)
    assert made is not None
    warps, stages = made.threads // 32, made.defines["STAGES"]
    whole = warps * cut.tiles * 16 * cut.blocks * (16 * shape.bits + 4 * 128 // shape.group)
    fixed, each = made.shared - stages * whole, whole // cut.tiles
    room = (sg.SHARED // cut.resident - 4096 - fixed) // each
    stages = min(8, room)
    defines = made.defines | {"STAGES": stages, "EARLY": stages - 1}
    return made._replace(defines=defines, shared=-(-(fixed + stages * each) // 1024) * 1024)


def jobs_of(rows: int, kind: str, only: str) -> list[tuple[gi.Layer, sg.Config, str, str, sg.Plan]]:
    """Products, cuts, sources and variants."""
    found = []
    for layer in gi.LAYERS:
        shape = gi.shape_of(layer, rows, kind)
        served: Any = sg.default_config(shape)
        made = sg.plan(shape, served)
        assert made is not None
        names = tuple(VARIANTS)
        if served.slices > 1:  # blocks of a cluster would wait for sums
            names = tuple(name for name in names if "no sums" not in name)
        found += [(layer, served, "now", name, made) for name in names if only in name]
        if layer.name in ("qkv", "gate+up"):
            found += [(layer, served, "16", name, sixteen(shape, served)) for name in SIXTEEN if only in name]
    return found


PATHS = {
    "now": source_folder("cuda") / "stationary_gemm.cu",
    "16": Path(__file__).parent / "gpu" / "stationary16.cu",
}


def layers(kind: str, rows: int) -> None:
    """A layer's products in turn."""
    weights = {layer.name: gi.weights_of(layer, kind)[:6] for layer in gi.LAYERS}
    norm = torch.rand(4096, device="cuda") + 0.5
    fields: dict[str, Any] = {"bench": "probe", "product": "layer", "rows": rows, "kind": kind}
    size = sum(of[0].nbytes for of in weights.values())
    for name, module in (("shared", ig), ("stationary", sg), ("shared again", ig)):

        def run(name: str, x: torch.Tensor, weight: Any, out: Any) -> torch.Tensor:
            layer = gs.LAYERS[name]
            more: dict[str, Any] = {"norm": norm if layer.norm else None, "eps": 1e-6, "out": out}
            return module.linear(x, weight, epilogue=layer.epilogue, **more)

        shapes = [gi.shape_of(layer, rows, kind) for layer in gi.LAYERS]
        if None in map(module.default_config, shapes):
            continue
        with rehearsing():
            gs.chain(rows, {key: of[:1] for key, of in weights.items()}, run, timed=False)
        fields[name] = round(gs.chain(rows, weights, run), 2)
    lines.emit(fields | {"floor": round(size / gs.RATE, 2)})


# Tiles and blocks of a warp, slices, warps beside each other, lag, stages early; each with either product.
SPREAD = (
    *((tiles, 4, 8, 8, 1, 8) for tiles in (1, 2)),
    (2, 4, 4, 4, 1, 8),
    *((tiles, 4, 2, 2, 1, 8) for tiles in (1, 2)),
    *((tiles, 3, 8, 2, 1, 8) for tiles in (2, 4)),
)
# Of products of bytes: blocks of a warp and of a stage, slices, warps beside each other, lag, stages early,
# tiles.
BYTES = (
    *((4, unit, 8, 8, 1, 8, tiles) for unit in (4, 2) for tiles in (1, 2)),
    (4, 4, 8, 8, 1, 1),
    (4, 4, 8, 8, 2, 8),
    *((8, unit, 4, 8, 1, 8) for unit in (4, 2)),
    (8, 4, 4, 8, 1, 1),
    (4, 4, 4, 4, 1, 8),
    (4, 4, 2, 4, 1, 8),
    (8, 4, 2, 4, 1, 8),
    *((12, unit, 8, 8, 1, 8) for unit in (4, 3, 2)),
    (12, 4, 8, 8, 1, 1),
    *((6, unit, 8, 4, 1, 8) for unit in (3, 2)),
    (6, 3, 8, 4, 1, 8, 2),
    (4, 4, 8, 4, 1, 8),
)
# Of the kernel that serves, not tried before.
OTHERS = (
    *((tiles, 3, 1, 1, 1, 1, False, 8, True) for tiles in (1, 2)),
    (2, 3, 2, 2, 1, 1, False, 8, True),
)


def module_of(config: Any) -> Any:
    return bg if isinstance(config, bg.Config) else sp if isinstance(config, sp.Config) else sg


def spread(rows: int, kind: str) -> None:
    shapes = {layer.name: gi.shape_of(layer, rows, kind) for layer in gi.LAYERS}
    fitting = {
        name: [tried for cut in dict.fromkeys(SPREAD) if sp.plan(shape, tried := sp.Config(*cut)) is not None]
        for name, shape in shapes.items()
    }
    by_bytes = {
        name: [bg.Config(*cut) for cut in dict.fromkeys(BYTES) if bg.plan(shape, bg.Config(*cut)) is not None]
        for name, shape in shapes.items()
    }
    for name, configs in fitting.items():
        for cut in configs:
            sp._kernel(shapes[name], cut)
        for each in by_bytes[name]:
            bg._kernel(shapes[name], each)
        for other in (sg.default_config(shapes[name]), *(sg.Config(*cut) for cut in OTHERS)):
            if other is not None and sg.plan(shapes[name], other) is not None:
                sg._kernel(shapes[name], other)
    weights = {layer.name: gi.weights_of(layer, kind) for layer in gi.LAYERS}
    best: dict[str, Any] = {}
    for layer in gi.LAYERS:
        product = gi.Product(layer, rows, weights[layer.name])
        expected = product.expected(product.weights[0].dequant())
        given: Any = {"norm": product.norm, "eps": 1e-6, "epilogue": layer.epilogue}
        told = []
        others = [sg.Config(*cut) for cut in OTHERS if sg.plan(shapes[layer.name], sg.Config(*cut))]
        for config in [None, *by_bytes[layer.name], *fitting[layer.name], *others]:
            out = product.before.clone()

            def run(weight: Any) -> None:
                module_of(config).linear(product.x, weight, out=out, config=config, **given)

            def body() -> None:
                for weight in product.weights:
                    run(weight)

            try:
                run(product.weights[0])
                error = float((out.float() - expected).norm() / expected.norm())
                took = round(time_us(body, len(product.weights), 9), 2)
            except RuntimeError as failed:
                print(f"{layer.name}, {rows} rows: {config} failed: {str(failed)[:300]}")
                continue
            told.append((took, float(f"{error:.1e}"), module_of(config).__name__[18:], *(config or ())))
            if (
                config
                and error < gi.WRONG
                and took <= min(each[0] for each in told[1:] if each[1] < gi.WRONG)
            ):
                best[layer.name] = config
        told.sort(key=lambda each: each[0])
        lines.emit({"bench": "spread", "product": layer.name, "rows": rows, "kind": kind, "us": told})
    norm = torch.rand(4096, device="cuda") + 0.5

    def us(chosen: dict[str, Any]) -> float:
        def run(name: str, x: torch.Tensor, weight: Any, out: Any) -> torch.Tensor:
            layer = gs.LAYERS[name]
            more: dict[str, Any] = {"norm": norm if layer.norm else None, "eps": 1e-6, "out": out}
            config = chosen.get(name)
            return module_of(config).linear(x, weight, epilogue=layer.epilogue, config=config, **more)

        return round(gs.chain(rows, weights, run), 2)

    sets: dict[str, dict[str, Any]] = {"stationary": {}, "spread": best}
    sets |= {f"spread {name}": {name: config} for name, config in best.items()}
    sets |= {f"spread but {name}": {k: v for k, v in best.items() if k != name} for name in best}
    found = {name: us(cut) for name, cut in [*sets.items(), ("stationary again", {})]}
    lines.emit({"bench": "spread", "product": "layer", "rows": rows, "kind": kind, "us": found})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--kind", default="int4g128")
    parser.add_argument("--only", default="")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--spread", action="store_true")
    args = parser.parse_args()
    if args.spread:
        for rows in (16, 8):
            spread(rows, args.kind)
        compilers().shutdown(wait=False, cancel_futures=True)
        return
    if args.kinds:
        for kind in args.kinds.split(","):
            for rows in (16, 8):
                layers(kind, rows)
        compilers().shutdown(wait=False, cancel_futures=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        jobs = jobs_of(args.rows, args.kind, args.only)
        files = {
            key: variant(Path(scratch) / f"v{at}", PATHS[key[0]], VARIANTS[key[1]])
            for at, key in enumerate(dict.fromkeys((source, name) for _, _, source, name, _ in jobs))
        }
        kernels = [
            Kernel(files[source, name], "stationary_gemm", made.defines, made.shared, cut.slices)
            for _, cut, source, name, made in jobs
        ]
        found: dict[tuple[str, sg.Config, str], dict[str, Any]] = {}
        for layer in gi.LAYERS:
            weights = gi.weights_of(layer, args.kind)
            product = gi.Product(layer, args.rows, weights)
            expected = product.expected(weights[0].dequant())
            for (of, cut, source, name, made), kernel in zip(jobs, kernels, strict=True):
                if of is not layer:
                    continue
                sg._kernel = lambda *_: (kernel, made)  # type: ignore[assignment]

                def run(weight: Any, out: torch.Tensor) -> None:
                    more: Any = {"norm": product.norm, "eps": 1e-6, "epilogue": layer.epilogue, "out": out}
                    sg.linear(product.x, weight, config=cut, **more)

                out = product.before.clone()

                def body() -> None:
                    for weight in weights:
                        run(weight, out)

                told = found.setdefault((layer.name, cut, source), {})
                try:
                    run(weights[0], out)
                    error = float((out.float() - expected).norm() / expected.norm())
                    told[name] = [round(time_us(body, len(weights), 9), 2), float(f"{error:.1e}")]
                except RuntimeError as failed:
                    told[name] = str(failed)[:100]
        for (layer_name, cut, source), told in found.items():
            fields = {"bench": "probe", "product": layer_name, "rows": args.rows, "kind": args.kind}
            lines.emit(fields | {"source": source, "cut": list(cut), "us": told})
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

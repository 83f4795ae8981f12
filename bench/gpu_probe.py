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
QUICK: Changes = [("rsqrtf(s / p.k + p.eps)", "rsqrtf(__fdividef(s, float(p.k)) + p.eps)")]
ROLLED: Changes = [
    (
        "#pragma unroll\n    for (int i = 0; i < MT; ++i) {\n      float acc",
        "#pragma unroll 1\n    for (int i = 0; i < MT; ++i) {\n      float acc",
    )
]


def by_products(*places: int) -> Changes:
    """Shifts by the unit that multiplies."""
    more = "".join(
        f"  if (BITS == 4 && p == {p}) return (__umulhi(word, (mask >> 16 ^ 15u) + {1 << (32 - 4 * p)}u) &"
        " mask) | 0x43004300u;\n"
        for p in places
    )
    return [(UNPACK, more + UNPACK)]


def half(shift: str) -> Changes:
    """As float16, where two places need no shift."""
    return [
        (
            UNPACK,
            "  if (BITS == 4) {\n"
            f"    const u32 v = p < 2 ? word : {shift}, m = mask << p % 2 * 4;\n"
            "    u32 r;\n"
            '    asm("lop3.b32 %0, %1, %2, 0x64006400, 0xea;" : "=r"(r) : "r"(v), "r"(m));\n'
            "    return r;\n  }\n" + UNPACK,
        )
    ]


VARIANTS: dict[str, Changes] = {
    "as it is": [],
    "nothing unpacked": NOTHING,
    "no products": NO_MMA,
    "neither": NOTHING + NO_MMA,
    "no sums of warps": [(FOLLOW, ""), ("      follow(tile);\n", "      __syncwarp();\n")],
    "no weights but the first": [
        ("    if (tile < last) {\n      const u32 to", "    if (tile < first + 2) {\n      const u32 to")
    ],
    "no x": NO_X,
    "no norm": NO_NORM,
    "no ones": NO_ONES,
    "no x, norm, ones": NO_X + NO_NORM + NO_ONES,
    "no scales": [(SCALE, "acc[j][h * 2 + e] += total;")],
    "rolled": ROLLED,
    "quick": QUICK,
    "one shift by products": by_products(2),
    "two shifts by products": by_products(1, 3),
    "shifts by products": by_products(1, 2, 3),
    "rolled, shifts by products": ROLLED + by_products(1, 2, 3),
    "half": half("word >> 8"),
    "half by products": half("__umulhi(word, (mask >> 16 ^ 15u) + (1u << 24))"),
}
SIXTEEN = (
    "as it is",
    "nothing unpacked",
    "no products",
    "neither",
    "one shift by products",
    "shifts by products",
    "half",
    "half by products",
)


def text_of(path: Path, changes: Changes) -> dict[str, str]:
    """A source and its headers, changed."""
    texts = {header.name: header.read_text() for header in source_folder("cuda").glob("*.cuh")}
    texts["stationary_gemm.cu"] = path.read_text()
    for found, put in changes:
        at = [name for name, text in texts.items() if text.count(found) == 1]
        if len(at) != 1 and found != QUICK[0][0]:
            raise ValueError(f"{path} has no {found!r}")
        for name in at:
            texts[name] = texts[name].replace(found, put)
    return texts


def variant(folder: Path, path: Path, changes: Changes) -> str:
    folder.mkdir()
    for name, text in text_of(path, changes).items():
        (folder / name).write_text(text)
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


EVERYWHERE = "as it is", "two shifts by products", "half by products"  # tried with every cut


def jobs_of(rows: int, kind: str, only: str) -> list[tuple[gi.Layer, sg.Config, str, str, sg.Plan]]:
    """Products, cuts, sources and variants."""
    found = []
    for layer in gi.LAYERS:
        shape = gi.shape_of(layer, rows, kind)
        served = sg.default_config(shape)
        assert served is not None
        others = [cut for cut in gs.cuts(rows, layer) if gs.fits(shape, cut)]
        for cut in gs.different(shape, [served, *others]):
            made = sg.plan(shape, cut)
            assert made is not None
            names = tuple(VARIANTS) if cut == served else EVERYWHERE
            if cut.slices > 1:  # blocks of a cluster would wait for sums
                names = tuple(name for name in names if name != "no sums of warps")
            found += [(layer, cut, "now", name, made) for name in names if only in name]
            if layer.name in ("qkv", "gate+up") and cut == served:
                found += [(layer, cut, "16", name, sixteen(shape, cut)) for name in SIXTEEN if only in name]
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


# Tiles and blocks of a warp, slices, warps beside each other, lag, stages early, shifts.
SPREAD = (
    *((1, 4, 8, 8, lag, early, shifts) for lag in (1, 2) for early in (8, 1) for shifts in (0, 2)),
    *((1, 4, 8, 8, 2, 8, shifts) for shifts in (1, 3)),
    *((2, 4, 8, 8, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 4, 4, 4, 2, early, shifts) for early in (8, 1) for shifts in (0, 2)),
    *((2, 4, 4, 4, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 2, 8, 8, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 2, 8, 4, 2, 8, shifts) for shifts in (0, 2)),
    *((1, 2, 4, 4, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 4, 2, 2, 2, 8, shifts) for shifts in (0, 2)),
    *((1, 2, 2, 2, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 3, 8, 2, lag, early, shifts) for lag in (1, 2) for early in (8, 1) for shifts in (0, 2)),
    *((2, 3, 8, 2, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 4, 8, 2, 2, 8, shifts) for shifts in (0, 2)),
    *((2, 4, 8, 2, 1, 8, shifts) for shifts in (0, 2)),
    *((1, 2, 8, 2, 2, 8, shifts) for shifts in (0, 2)),
)


def spread(rows: int, kind: str) -> None:
    shapes = {layer.name: gi.shape_of(layer, rows, kind) for layer in gi.LAYERS}
    fitting = {
        name: [cut for cut in (sp.Config(*cut) for cut in SPREAD) if sp.plan(shape, cut) is not None]
        for name, shape in shapes.items()
    }
    for name, configs in fitting.items():
        for cut in configs:
            sp._kernel(shapes[name], cut)
        sg._kernel(shapes[name], sg.default_config(shapes[name]) or sg.Config())
    weights = {layer.name: gi.weights_of(layer, kind) for layer in gi.LAYERS}
    best: dict[str, sp.Config] = {}
    for layer in gi.LAYERS:
        product = gi.Product(layer, rows, weights[layer.name])
        expected = product.expected(product.weights[0].dequant())
        given: Any = {"norm": product.norm, "eps": 1e-6, "epilogue": layer.epilogue}
        told = []
        for config in [None, *fitting[layer.name]]:
            out = product.before.clone()

            def run(weight: Any) -> None:
                if config is None:
                    sg.linear(product.x, weight, out=out, **given)
                else:
                    sp.linear(product.x, weight, out=out, config=config, **given)

            def body() -> None:
                for weight in product.weights:
                    run(weight)

            run(product.weights[0])
            error = float((out.float() - expected).norm() / expected.norm())
            took = round(time_us(body, len(product.weights), 9), 2)
            told.append((took, float(f"{error:.1e}"), *(config or ("stationary",))))
            if (
                config
                and error < gi.WRONG
                and took <= min(each[0] for each in told[1:] if each[1] < gi.WRONG)
            ):
                best[layer.name] = config
        told.sort(key=lambda each: each[0])
        lines.emit({"bench": "spread", "product": layer.name, "rows": rows, "kind": kind, "us": told})
    norm = torch.rand(4096, device="cuda") + 0.5

    def us(chosen: dict[str, sp.Config]) -> float:
        def run(name: str, x: torch.Tensor, weight: Any, out: Any) -> torch.Tensor:
            layer = gs.LAYERS[name]
            more: dict[str, Any] = {"norm": norm if layer.norm else None, "eps": 1e-6, "out": out}
            if name in chosen:
                return sp.linear(x, weight, epilogue=layer.epilogue, config=chosen[name], **more)
            return sg.linear(x, weight, epilogue=layer.epilogue, **more)

        return round(gs.chain(rows, weights, run), 2)

    sets: dict[str, dict[str, sp.Config]] = {"stationary": {}, "spread": best}
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
        spread(args.rows, args.kind)
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

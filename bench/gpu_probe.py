# ruff: noqa: B023
"""What the kernels for 16 rows of integers and for blocks of e4m3 take without parts of their work.

    python bench/gpu_probe.py

Each variant is the source with some text in another's place; results are wrong, times count. One JSON line a
product: microseconds by variant.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu_e4m3
import gpu_integers as gi
import lines
import torch
from gpu_kernels import BF16, time_us

from sgla.kernels.build import source_folder
from sgla.kernels.cuda import batch_gemm
from sgla.kernels.cuda import build as compiled
from sgla.kernels.cuda import stationary_gemm as sg
from sgla.kernels.rehearsal import compilers, rehearsing
from sgla.kernels.triton import e2m1, fp8
from sgla.quant.weight import pack

UNPACK = "if (BITS == 4) return (word >> (4 * p) & mask) | 0x43004300u;"
MMA = "mma(sum[j][s % CHAINS], a0, a1, a2, a3, x[j][b][q][step % 2 * 2], x[j][b][q][step % 2 * 2 + 1]);"
STATIONARY: dict[str, list[tuple[str, str]]] = {
    "as it is": [],
    "nothing unpacked": [(UNPACK, "if (BITS == 4) return word;")],
    "no products": [
        (
            MMA,
            "sum[j][0][0] += __uint_as_float(a0), sum[j][0][1] += __uint_as_float(a1),"
            " sum[j][0][2] += __uint_as_float(a2), sum[j][0][3] += __uint_as_float(a3);",
        )
    ],
    "no sums of warps": [
        ("      if (BEHIND && i == 0 && tile > first) follow(tile - 1);\n", ""),
        ("      follow(tile);\n", "      __syncwarp();\n"),
    ],
    "no weights but the first": [
        ("    if (tile < last) {\n      const u32 to", "    if (tile < first + 2) {\n      const u32 to")
    ],
    "no x": [("if (row < p.m && k < p.k)", "if (row < p.m && k < 0)")],
    "no norm": [
        (
            "        if (NORM) {\n          const float4 lo",
            "        if (NORM && p.m < 0) {\n          const float4 lo",
        )
    ],
    "no scales": [
        (
            "acc[j][h * 2 + e] += (total - zero * (e ? of_x.y : of_x.x)) * scale;",
            "acc[j][h * 2 + e] += total;",
        )
    ],
}
FMA = "acc[half * PART + j] = fmaf(part[j], scale[j / 2 % 2], acc[half * PART + j]);"
GROUPED: dict[str, list[tuple[str, str]]] = {
    "as it is": [],
    "without turns": [("#define TAKE_TURNS 1", "#define TAKE_TURNS 0")],
    "sums not scaled": [(FMA, "if (i == count - 1) acc[half * PART + j] = part[j];")],
    "scales not read": [
        ("const float scale[2] = {next[0], next[1]};", "const float scale[2] = {1.5f, 0.5f};"),
        ("    if (i + 1 < count) next[0] = __ldg(first + i + 1), next[1] = __ldg(second + i + 1);\n", ""),
    ],
    "no results": [
        (
            "    store(p, sum, n, row, shared.scales + row - tile.row);",
            "    if (sum[0] == 1e30f) store(p, sum, n, row, shared.scales + row - tile.row);",
        )
    ],
}
Cut = batch_gemm.Config


def variant(folder: Path, file: str, changes: list[tuple[str, str]]) -> str:
    folder.mkdir()
    for path in source_folder("cuda").glob("*.cuh"):
        (folder / path.name).write_text(path.read_text())
    (folder / file).write_text((source_folder("cuda") / file).read_text())
    for found, put in changes:
        at = [path for path in folder.iterdir() if path.read_text().count(found) == 1]
        assert len(at) == 1, found
        at[0].write_text(at[0].read_text().replace(found, put))
    return str(folder / file)


def redirect(module: Any, path: str) -> None:
    def kernel(file: str, *rest: Any) -> compiled.Kernel:
        return compiled.Kernel(path, *rest)

    module.Kernel = kernel
    for kept in ("_compiled", "_kernel"):
        if hasattr(module, kept):
            getattr(module, kept).cache_clear()


def stationary(scratch: Path) -> None:
    paths = {
        name: variant(scratch / f"s{i}", "stationary_gemm.cu", c)
        for i, (name, c) in enumerate(STATIONARY.items())
    }
    for layer in gi.LAYERS:
        shape = gi.shape_of(layer, 16, "int4g128")
        cut = sg.default_config(shape)
        assert cut is not None
        kernels = {}
        for name, path in paths.items():
            redirect(sg, path)
            kernels[name] = sg._kernel(shape, cut)
        weights = gi.weights_of(layer, "int4g128")
        product = gi.Product(layer, 16, weights)
        found = {}
        for name, made in kernels.items():
            sg._kernel = lambda *_, made=made: made  # type: ignore[assignment]
            out = product.before.clone()
            given: Any = {
                "norm": product.norm,
                "eps": 1e-6,
                "epilogue": layer.epilogue,
                "out": out,
                "config": cut,
            }
            found[name] = round(
                time_us(lambda: [sg.linear(product.x, w, **given) for w in weights], len(weights), 9), 2
            )
        sg._kernel = KEPT
        lines.emit({"bench": "probe", "product": layer.name, "rows": 16, "us": found})


KEPT = sg._kernel


def grouped(scratch: Path) -> None:
    paths = {
        name: variant(scratch / f"b{i}", "batch_gemm.cu", c) for i, (name, c) in enumerate(GROUPED.items())
    }
    n, k, m = 6144, 4096, 4096
    weights = gpu_e4m3.weights_of(n, k)[:6]
    rounded = fp8.quantize(torch.randn(m, k, dtype=BF16, device="cuda"))
    whole, scale = torch.ones(n, device="cuda"), torch.rand(n, k // 128, device="cuda") + 0.5
    found = {
        "library": round(
            time_us(lambda: [fp8.linear(rounded, w, whole) for w in weights], len(weights), 5), 1
        )
    }
    cuts = Cut(128, 1, 1, rows=256), Cut(128, 1, 1, rows=256, shares=True), Cut(128, 1, 1, rows=128)
    jobs = [(name, cut, scale) for name in paths for cut in cuts]
    jobs += [
        ("as it is", cut, whole)
        for cut in (Cut(128, 1, 1, rows=256), Cut(256, 1, 1, rows=128), Cut(128, 1, 1, rows=128))
    ]

    def body(name: str, cut: Cut, of_w: torch.Tensor) -> Any:
        scales = batch_gemm.Scales(rounded.scale, of_w)

        def run() -> None:
            for w in weights:
                batch_gemm.linear(rounded.numbers, w, cut, scales=scales)

        redirect(batch_gemm, paths[name])
        return run

    with rehearsing():  # all compile side by side
        for job in jobs:
            body(*job)()
    for name, cut, of_w in jobs:
        run = body(name, cut, of_w)
        what = f"{name}{', a scale a channel' if of_w is whole else ''}, {cut.tile} by {cut.rows}"
        what += ", shared" if cut.shares else ""
        found[what] = round(time_us(run, len(weights), 5), 1)
    lines.emit({"bench": "probe", "product": "qkv", "rows": m, "us": found})


SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
TILES = (  # outputs, warps, stages, splits
    (64, 4, 5, 1),
    (32, 4, 4, 1),
    (32, 2, 4, 1),
    (64, 2, 4, 1),
    (128, 4, 3, 1),
    (32, 2, 6, 2),
    (64, 4, 3, 2),
)


def packed() -> None:
    """Products of few rows by weights that are no integers, by tile, each shape by itself."""
    kinds, xs = ("nf4", "mxfp4", "nvfp4", "mxfp8"), {}
    served = e2m1.cut
    made = {}
    for kind in kinds:
        for n, k in SHAPES:
            first = pack(torch.randn(n, k, device="cuda") / k**0.5, kind)
            count = -(-(150 << 20) // first.nbytes)
            copies = [type(first)(n, k, *(t.clone() for t in first.tensors)) for _ in range(count)]
            made[kind, n, k] = [first, *copies]
            xs[k] = torch.randn(16, k, dtype=BF16, device="cuda")
    cuts = [None, *(e2m1.Cut(16, e2m1.Tile(*tile)) for tile in TILES)]

    def body(kind: str, n: int, k: int, cut: Any, m: int) -> Any:
        def run() -> None:
            for w in made[kind, n, k]:
                e2m1.linear(xs[k][:m], w)

        e2m1.cut = served if cut is None else lambda *_: cut
        return run

    with rehearsing():
        for kind in kinds:
            for n, k in SHAPES:
                body(kind, n, k, None, 16)()
                for cut in cuts:
                    body(kind, n, k, cut, 1)()
    for kind in kinds:
        w = made[kind, 4096, 4096][0]
        x = xs[4096]
        y = x.float() @ w.dequant().T
        e2m1.cut = served
        error = float((e2m1.linear(x, w).float() - y).norm() / y.norm())
        for m in (1, 16):
            found = {}
            for cut in cuts if m == 1 else cuts[:1]:
                name = "served" if cut is None else " ".join(map(str, cut.tile))
                times = [time_us(body(kind, n, k, cut, m), len(made[kind, n, k]), 5) for n, k in SHAPES]
                found[name] = [round(us, 1) for us in (*times, sum(times))]
            lines.emit({"bench": "probe", "kind": kind, "rows": m, "error": round(error, 5), "us": found})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for part in sys.argv[1:] or ("packed", "stationary", "grouped"):
            if part == "packed":
                packed()
            else:
                {"stationary": stationary, "grouped": grouped}[part](Path(folder))
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

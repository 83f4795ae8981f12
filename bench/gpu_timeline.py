"""When the blocks of a layer's four products wait and for what (weights of 4 bits, few rows): cycles.

    python bench/gpu_timeline.py [--rows 1,16] [--kind int4g128]

Copies of ``integer_gemm.cu`` and ``stationary_gemm.cu`` note the clock of their multiprocessor in eight
places; layers run in turn, and what the last one noted is told: medians over blocks, as seen by their first
warp. ``before``: from the end of the block before on the same multiprocessor to this one's start (negative:
it was there already).
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import gpu_integers as gi
import lines
import torch
from gpu_kernels import capture
from torch import Tensor

from sgla.kernels.build import source_folder
from sgla.kernels.cuda import integer_gemm as ig
from sgla.kernels.cuda import stationary_gemm as sg
from sgla.kernels.cuda.build import Kernel, check, driver
from sgla.kernels.rehearsal import compilers

PLACES = "asked", "waited", "x is there", "first weights", "first tile", "last product", "end"
BLOCKS, COUNT = 512, 3  # at most; layers
NOTE = """
__device__ u64 noted[512][9];
__device__ __forceinline__ void note(int place) {
  if (threadIdx.x) return;
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now) :: "memory");
  noted[blockIdx.x][place] = now;
  u32 processor;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
  noted[blockIdx.x][8] = processor;
}
"""
# Where a source is cut for a note: what stands there, and before or behind it.
AT: dict[str, list[tuple[str, str]]] = {
    "integer_gemm": [
        ("  const int warp = threadIdx.x / 32,", "note(0);\n@"),
        ("  pdl_wait();\n", "note(1);\n@note(2);\n"),
        ("  // Where ``ldmatrix`` takes a lane's", "note(3);\n@"),
        (
            "      const u32 from = ring + stage * STAGE_BYTES;\n",
            "if (tile == first && unit == wk) note(4);\n@",
        ),
        (
            "    const int column = first_column(tile);\n    if (DIRECT) {",
            "if (tile == first) note(5);\nnote(6);\n@",
        ),
    ],
    "stationary_gemm": [
        ("  const int warp = threadIdx.x / 32,", "note(0);\n@"),
        ("  pdl_wait();\n", "note(1);\n@note(2);\n"),
        ("  // What becomes of a sum: of output", "note(3);\n@"),
        ("    const u32 from = ring + stage * STAGE_BYTES;\n", "if (tile == first) note(4);\n@"),
        ("    if (BEHIND) {\n      __syncwarp();\n", "if (tile == first) note(5);\nnote(6);\n@"),
    ],
}


def noting(name: str, folder: Path) -> str:
    text = (source_folder("cuda") / f"{name}.cu").read_text()
    for found, put in AT[name]:
        assert text.count(found) == 1, found
        text = text.replace(found, put.replace("@", found))
    text = text.replace('extern "C" __global__', NOTE + 'extern "C" __global__').rstrip()
    assert text.endswith("}")
    path = folder / f"{name}.cu"
    path.write_text(text[:-1] + "note(7);\n}\n")
    for header in source_folder("cuda").glob("*.cuh"):
        (folder / header.name).write_text(header.read_text())
    return str(path)


def noted(kernel: Kernel) -> torch.Tensor:
    """[blocks, 9]"""
    at, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = driver().cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), kernel._module, b"noted")
    check(code, "noted")
    found = torch.zeros(BLOCKS, 9, dtype=torch.int64)
    check(driver().cuMemcpyDtoH_v2(ctypes.c_void_p(found.data_ptr()), at, size), "a copy")
    return found[found[:, 7] > 0]


def told(kernels: dict[str, Kernel]) -> dict[str, Any]:
    ends: dict[int, int] = {}
    fields: dict[str, Any] = {}
    tables = {name: noted(kernel) for name, kernel in kernels.items()}
    for name, table in tables.items():
        rows = table.tolist()
        steps: dict[str, list[int]] = {"before": [row[0] - ends[row[8]] for row in rows if row[8] in ends]}
        for at, place in enumerate(PLACES, 1):
            steps[place] = [row[at] - row[at - 1] for row in rows if row[at] >= row[at - 1] > 0]
        on = [row[8] for row in rows]
        fields[name] = {step: round(statistics.median(v)) for step, v in steps.items() if v}
        fields[name] |= {"blocks": len(rows), "most on one": max(map(on.count, on))}
        ends = {}
        for row in rows:
            ends[row[8]] = max(ends.get(row[8], 0), row[7])
    begins = {row[8]: row[2] for row in tables["qkv"].tolist()}
    whole = [ends[at] - begins[at] for at in ends if at in begins]
    return fields | {"layer": round(statistics.median(whole))}


class Layer:
    """The four products of a layer by kernels that note, with what each takes by itself but for
    ``changes``, if they fit."""

    def __init__(self, file: str, module: Any, changes: dict[str, Any], kind: str) -> None:
        self.file, self.module, self.changes, self.kind = file, module, changes, kind
        self.norm = torch.rand(4096, device="cuda") + 0.5
        self.kernels: dict[str, Kernel] = {}

    def product(self, layer: gi.Layer, x: Tensor, w: Any, out: Tensor | None) -> Tensor:
        shape = gi.shape_of(layer, len(x), self.kind)
        served = self.module.default_config(shape)
        cut = served._replace(**self.changes)
        cut = served if self.module.plan(shape, cut) is None else cut
        plan = self.module.plan(shape, cut)
        if layer.name not in self.kernels:  # one for each product, so that none forgets what another noted
            defines = plan.defines | {"NOTED": len(self.kernels)}
            name = Path(self.file).stem
            self.kernels[layer.name] = Kernel(self.file, name, defines, plan.shared, cut.slices)
        if out is None:
            out = torch.empty(len(x), shape.n, dtype=x.dtype, device="cuda")
        tensors = x, *w.tensors, self.norm if layer.norm else None, None, out, None
        few = self.module is ig
        sizes = (
            len(x),
            shape.n,
            layer.k,
            x.stride(0),
            out.stride(0),
            shape.blocks,
            *([plan.x_row] if few else []),
        )
        params = self.module._Params(*(None if t is None else t.data_ptr() for t in tensors), *sizes, 1e-6)
        grid = plan.grid if few else plan.parts * cut.slices
        self.kernels[layer.name].launch(grid, 32 * ig.WARPS if few else plan.threads, params)
        return out

    def run(self, hidden: Tensor, made: dict[str, list[Any]]) -> None:
        qkv, o, inner, down = gi.LAYERS
        for at in range(COUNT):
            heads = self.product(qkv, hidden, made["qkv"][at], None)
            self.product(o, heads[:, :4096], made["o"][at], hidden)
            gated = self.product(inner, hidden, made["gate+up"][at], None)
            self.product(down, gated, made["down"][at], hidden)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--kind", default="int4g128")
    args = parser.parse_args()
    made = {layer.name: gi.weights_of(layer, args.kind)[:COUNT] for layer in gi.LAYERS}
    with tempfile.TemporaryDirectory() as scratch:
        few, stationary = (noting(name, Path(scratch)) for name in AT)
        for rows in map(int, args.rows.split(",")):
            hidden = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")
            sets: dict[str, tuple[str, Any, dict[str, Any]]] = {"shared": (few, ig, {})}
            if rows <= 4:
                sets["shared, after"] = few, ig, {"after": True}
                sets["shared, after, early 1"] = few, ig, {"after": True, "early": 1}
            else:
                sets["stationary"] = stationary, sg, {}
                sets["stationary, k cut"] = stationary, sg, {"slices": 2, "beside": 2}
            for name, (file, module, chosen) in sets.items():
                layer = Layer(file, module, chosen, args.kind)
                graph = capture(functools.partial(layer.run, hidden, made))
                for _ in range(10):
                    graph.replay()
                torch.cuda.synchronize()
                lines.emit({"bench": "timeline", "rows": rows, "cut": name, "cycles": told(layer.kernels)})
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

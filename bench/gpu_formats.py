"""Time a layer's products of Qwen3-8B, with what stands before and after them, for each storage of weights.

    python bench/gpu_formats.py [--kinds int4m32,nf4] [--rows 1,16,64]

The storages are those of ``docs/models.md``, which says what formats of files become them. The kernels are
those that serve: norms, products, sums and gates are recorded and rewritten as a model's are, without
attention. One JSON line a storage: bytes of a layer, and by rows microseconds of a layer (medians of graph
replays over layers larger than the L2 cache), and what its bytes take at 4.34 TB/s.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import lines
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.dispatch import using
from sgla.kernels.gpu.ops import GpuOps
from sgla.kernels.gpu.program import Program
from sgla.kernels.gpu.record import Record, Recorder
from sgla.kernels.gpu.rewrite import Asked
from sgla.kernels.gpu.rules import apply
from sgla.kernels.rehearsal import compilers, rehearsing
from sgla.kernels.trace import STAND_INS
from sgla.quant.weight import pack

KINDS = (
    "int4m32,int8g32,int8m32,int4m64,int8g128,mxfp4,nf4,int4g64,int4g32,int4g128,mxfp8,nvfp4,fp8g128,fp8,bf16"
)
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))  # q, k and v; o; gate and up; down
RATE = 4.34e6  # bytes a microsecond
LEAST = 400 << 20  # bytes of the layers of a replay


def layers_of(kind: str) -> list[list[Any]]:
    """As many as are larger than the L2 cache, with the same numbers."""
    first = [pack(torch.randn(n, k, device="cuda") / k**0.5, kind) for n, k in SHAPES]
    count = -(-LEAST // sum(w.nbytes for w in first))
    copies = [[type(w)(w.n, w.k, *(t.clone() for t in w.tensors)) for w in first] for _ in range(count - 1)]
    return [first, *copies]


def recorded(layers: list[list[Any]], norm: Tensor) -> Record:
    """Of the residual stream and of what attention returns, the same for all layers."""
    recorder = Recorder()
    hidden, heads = (
        recorder.input(name, (STAND_INS["tokens"], 4096), torch.bfloat16) for name in ("hidden", "heads")
    )
    made = []
    with using(recorder):
        residual = hidden + heads
        x = ops.rms_norm(residual, norm, 1e-6)
        for qkv, o, gate_up, down in layers:
            made.append(ops.linear(x, qkv))
            x, residual = ops.add_rms_norm(ops.linear(heads, o), residual, norm, 1e-6)
            y = ops.act_mul(ops.linear(x, gate_up), "silu")
            x, residual = ops.add_rms_norm(ops.linear(y, down), residual, norm, 1e-6)
    recorder.record.outputs += [recorder.number(y) for y in (*made, x)]
    return recorder.record


class Format:
    """Layers of a storage, and what computes them with so many rows."""

    def __init__(self, kind: str, rows: list[int]) -> None:
        self.kind, self.layers = kind, layers_of(kind)
        record = recorded(self.layers, torch.ones(4096, device="cuda"))
        attend: Any = None
        gpu = GpuOps(attend)
        self.runs: dict[int, Callable[[], Any]] = {}
        for m in rows:
            sizes = {"tokens": m, "rows": m, "sampled": 0, "gathered": 0}
            given = {
                name: torch.randn(m, 4096, dtype=torch.bfloat16, device="cuda")
                for name in ("hidden", "heads")
            }
            self.runs[m] = functools.partial(Program(gpu, apply(record, Asked(sizes))), given)

    def measure(self) -> dict[str, Any]:
        size = sum(w.nbytes for w in self.layers[0])
        found: dict[str, Any] = {"kind": self.kind, "bytes": size, "floor": round(size / RATE, 1)}
        for m, run in self.runs.items():
            found[f"{m} rows"] = round(time_us(run, len(self.layers), 7), 1)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--rows", default="1,16,64")
    args = parser.parse_args()
    formats = [Format(kind, [int(m) for m in args.rows.split(",")]) for kind in args.kinds.split(",")]
    with rehearsing():  # all compile side by side
        for format in formats:
            for run in format.runs.values():
                run()
    for format in formats:
        lines.emit({"bench": "formats", **format.measure()})
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

"""Time products with e4m3 weights for decode batches: one JSON line a measurement.

    python bench/gpu_fp8.py [--rows 24,64,128,256]

Medians of graph replays over more weights than the L2 cache holds; ``floor_us``: the weights at 4.34 TB/s.
"""

from __future__ import annotations

import argparse
import json

import torch
from gpu_moe import time_us

from sgla.kernels.triton import fp8
from sgla.kernels.triton.fp8 import Cut
from sgla.quant import pack

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}  # qwen3-8b
CUTS = (Cut(64, 128, 3), Cut(64, 128, 4), Cut(64, 128, 8), Cut(64, 256, 3), Cut(128, 128, 4))


def measure(name: str, rows: int) -> dict[str, object]:
    n, k = SHAPES[name]
    copies = max(2, (300 << 20) // (n * k))
    weights = [pack(torch.randn(n, k, device="cuda"), "fp8") for _ in range(copies)]
    x = fp8.quantize(torch.randn(rows, k, dtype=torch.bfloat16, device="cuda"))
    times: dict[str, float] = {}
    fp8.SMALL_ROWS = 0
    times["library"] = time_us([lambda w=w: fp8.linear(x, w.data, w.scale) for w in weights])  # type: ignore[misc]
    for cut in CUTS:
        try:
            times[str(tuple(cut))] = time_us(
                [lambda w=w, c=cut: fp8.linear_small(x, w.data, w.scale, cut=c) for w in weights]  # type: ignore[misc]
            )
        except Exception as error:  # too much shared memory
            times[str(tuple(cut))] = -1.0
            print(error, flush=True)
    return {
        "bench": "fp8",
        "layer": name,
        "rows": rows,
        "floor_us": round(n * k / 4.34e6, 1),
        "us": {label: round(us, 1) for label, us in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="24,64,128,256")
    args = parser.parse_args()
    with torch.inference_mode():
        for rows in map(int, args.rows.split(",")):
            for name in SHAPES:
                print("JSON " + json.dumps(measure(name, rows)), flush=True)


if __name__ == "__main__":
    main()

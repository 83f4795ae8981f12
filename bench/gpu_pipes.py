"""Cycles of a scheduler for instructions of some kinds, alone and beside others, with two or four warps each.

    python bench/gpu_pipes.py

One JSON line: by kinds and warps cycles for each instruction that a scheduler issued.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import lines
import torch

from sgla.kernels.cuda.build import Kernel
from sgla.kernels.rehearsal import compilers

ROUNDS = 200
CASES: dict[str, dict[str, int]] = {
    "products": {"HMMA": 8},
    "products, eight chains": {"HMMA": 8, "CHAINS": 8},
    "products, two chains": {"HMMA": 8, "CHAINS": 2},
    "products of float16": {"HMMA": 8, "HALVES": 1},
    "logic": {"LOP": 32},
    "shifts": {"SHIFT": 32},
    "logic and shifts": {"LOP": 16, "SHIFT": 16},
    "high products": {"HIGH": 32},
    "logic and high products": {"LOP": 16, "HIGH": 16},
    "sums": {"FFMA": 32},
    "logic and sums": {"LOP": 16, "FFMA": 16},
    "products, 2 logic each": {"HMMA": 8, "LOP": 16},
    "products, 4 logic each": {"HMMA": 8, "LOP": 32},
    "products, 4 logic each, eight chains": {"HMMA": 8, "LOP": 32, "CHAINS": 8},
    "products, 2 logic and 2 shifts each": {"HMMA": 8, "LOP": 16, "SHIFT": 16},
    "products, 4 sums each": {"HMMA": 8, "FFMA": 32},
    "products, 2 logic and 2 sums each": {"HMMA": 8, "LOP": 16, "FFMA": 16},
    "products, 2 logic and 2 high products each": {"HMMA": 8, "LOP": 16, "HIGH": 16},
    "products, a load each": {"HMMA": 8, "LOAD": 8},
    "products by some warps, 4 logic each by others": {"HMMA": 8, "LOP": 32, "APART": 1},
}


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("given", ctypes.c_uint))


def main() -> None:
    path = str(Path(__file__).parent / "gpu" / "pipes.cu")
    kernels = {name: Kernel(path, "pipes", case) for name, case in CASES.items()}
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    found: dict[str, Any] = {}
    for name, kernel in kernels.items():
        for warps in (4, 8, 16):
            for _ in range(3):
                kernel.launch(1, 32 * warps, Params(out.data_ptr(), 3))
                torch.cuda.synchronize()
            cycles = float(out[16 : 16 + warps].max()) / ROUNDS
            found.setdefault(name, {})[f"{warps // 4} warps"] = round(cycles, 1)
    lines.emit({"bench": "pipes", "cycles of a round": found, "rounds": CASES})
    compilers().shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

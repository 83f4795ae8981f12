"""Variants of ``decode_step.cu`` for one row of Qwen3-0.6B: microseconds of the kernel, and where they go.

python bench/gpu_one_row.py [--variants base,c8,...] [--stamps base,...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import lines
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels.cuda import decode_step
from sgla.kernels.cuda.build import Kernel
from sgla.kernels.cuda.decode_step import BLOCKS, WARPS, DecodeStep, DenseShape, LayerWeights, told
from sgla.kernels.ops import KVLayer

BF16 = torch.bfloat16
SHAPE = DenseShape(1024, 16, 8, 3072, True, 16)
LAYERS, VOCAB, LENGTHS = 28, 151_936, (1, 128, 384, 640)
C, P, G, D, T, F = "COPIES", "PART_COPIES", "GATHER", "DIRECT", "TILES_EACH", "FLYING"
VARIANTS: Mapping[str, dict[str, int]] = {
    "base": {},
    "c4": {C: 4},
    "c8": {C: 8},
    "c8p4": {C: 8, P: 4},
    "p4": {P: 4},
    "g": {G: 1},
    "c4g": {C: 4, G: 1},
    "c8g": {C: 8, G: 1},
    "c32g": {C: 32, G: 1},
    "c128g": {C: 128, G: 1},
    "dir": {D: 1},
    "t2": {T: 2},
    "c8p4dir": {C: 8, P: 4, D: 1},
    "c8p4t2": {C: 8, P: 4, T: 2},
    "c8p4dirt2": {C: 8, P: 4, D: 1, T: 2},
    "c8p8": {C: 8, P: 8},
    "c8p4f3": {C: 8, P: 4, F: 3},
    "c8p4f4": {C: 8, P: 4, F: 4},
    "all": {C: 8, P: 4, G: 1, D: 1, T: 2},
    "all32": {C: 32, P: 4, G: 1, D: 1, T: 2},
    "all128": {C: 128, P: 4, G: 1, D: 1, T: 2},
    "all128f3": {C: 128, P: 4, G: 1, D: 1, T: 2, F: 3},
    "again": {},
}
POINTS = 20  # stamps of a layer


def copies(defines: Mapping[str, int]) -> int:
    return max(defines.get(C, 1), defines.get(P, 1))


def kernel_of(defines: Mapping[str, int]) -> Kernel:
    shape = {"HIDDEN": 1024, "HEADS": 16, "KV_HEADS": 8, "INTER": 3072, "QK_NORM": 1, "PAGE_TILES": 1}
    limits = {"MAX_LAYERS": decode_step.MAX_LAYERS, "DEPTH": SHAPE.depth}
    rings = WARPS * SHAPE.depth * (2 * decode_step.PIECE + 8)
    every = shape | limits | dict(defines)
    return Kernel("decode_step.cu", "decode_step", every, rings + SHAPE.shared + 1024)


class Bench:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [self.layer() for _ in range(LAYERS)]
        self.embedding, self.head, self.norm = (
            self.weight(VOCAB, 1024),
            self.weight(VOCAB, 1024),
            self.ones(1024),
        )
        pages = 80
        pool = torch.randn(LAYERS, 2, pages + 1, 8, 16, 128, dtype=BF16, device="cuda")
        self.kv = [KVLayer(k, v) for k, v in pool.transpose(3, 4)]
        self.table = (1 + torch.randperm(pages, device="cuda").int())[None].contiguous()
        self.cos_sin = torch.randn(2048, 128, device="cuda").clamp(-1, 1)

    def weight(self, n: int, k: int) -> Tensor:
        return torch.randn(n, k, dtype=BF16, device="cuda").mul_(0.02)

    def ones(self, n: int) -> Tensor:
        return 1 + 0.1 * torch.randn(n, device="cuda")

    def layer(self) -> LayerWeights:
        w, o = self.weight, self.ones
        products = w(4096, 1024), w(1024, 2048), w(6144, 1024), w(1024, 3072)
        return LayerWeights(*products, o(1024), o(1024), o(128), o(128))

    def step(self, kernel: Kernel, count: int) -> DecodeStep:
        words = SHAPE.words * count + 2 * LAYERS * BLOCKS * POINTS
        parts = self.layers, self.kv, self.embedding, self.head, self.norm, self.cos_sin
        made = partial(told, words)
        with (
            patch.object(decode_step, "_kernel", lambda shape: kernel),
            patch.object(decode_step, "told", lambda words, device: made(device)),
        ):
            return DecodeStep(SHAPE, *parts, 1e-6, 128**-0.5)

    def run(self, step: DecodeStep, length: int, logits: Tensor) -> Any:
        ids, slots, kv_len = (torch.tensor([x], dtype=torch.int32, device="cuda") for x in (7, 0, length))
        positions = kv_len - 1
        return lambda: step(ids, positions, slots, kv_len, self.table, logits)


def medians(step: DecodeStep, count: int) -> list[float]:
    """Thousands of cycles between a layer's stamps: the median block's, on average over layers."""
    words = step._fixed[1][0][SHAPE.words * count :]
    stamps = words.view(torch.int64)[: LAYERS * BLOCKS * POINTS].view(LAYERS, BLOCKS, POINTS).double().cpu()
    order = [0, 1, 2, 3, 16, 17, 18, *range(4, 16), 19]
    x = stamps[4:-1][..., order]
    x = torch.cat([x, stamps[5:][..., :1]], -1)
    idle = x[..., 5] < x[..., 4]  # blocks that attend to nothing
    x[..., 5] = torch.where(idle, x[..., 4], x[..., 5])
    gone = x.diff(dim=-1)
    return [round(float(v) / 1e3, 2) for v in gone.median(1).values.mean(0)] + [
        round(float(v) / 1e3, 2) for v in gone[:, :8].median(1).values.mean(0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--stamps", default="base,c8p4,all128")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    begun = time.monotonic()
    names, stamped = args.variants.split(","), [x for x in args.stamps.split(",") if x]
    kernels = {name: kernel_of(VARIANTS[name]) for name in names}
    kernels |= {f"{name} stamps": kernel_of(VARIANTS[name] | {"STAMPS": 1}) for name in stamped}
    bench, logits = Bench(), torch.empty(1, VOCAB, device="cuda")
    steps = {name: bench.step(kernel, copies(VARIANTS[name.split()[0]])) for name, kernel in kernels.items()}
    expected: dict[int, Tensor] = {}
    with torch.inference_mode():
        for repeat in range(args.repeat):
            for name in names:
                found = []
                for length in LENGTHS:
                    run = bench.run(steps[name], length, logits)
                    run()
                    wrong = 0.0
                    if length in expected:
                        wrong = float((logits - expected[length]).norm() / expected[length].norm())
                    else:
                        expected[length] = logits.clone()
                    us = time_us(lambda run=run: [run() for _ in range(10)], 10, 10)  # type: ignore[misc]
                    found.append((length, round(us, 1), f"{wrong:.1e}"))
                print(
                    lines.line({"bench": "one-row", "variant": name, "repeat": repeat, "us": found}),
                    flush=True,
                )
        for name in stamped:
            for length in (1, 384):
                step = steps[f"{name} stamps"]
                run = bench.run(step, length, logits)
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
                gone = medians(step, copies(VARIANTS[name]))
                print(
                    lines.line({"bench": "one-row", "stamps": name, "length": length, "kcycles": gone}),
                    flush=True,
                )
    print(round(time.monotonic() - begun, 1), "s")


if __name__ == "__main__":
    main()

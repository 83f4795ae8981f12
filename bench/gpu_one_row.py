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

from sgla.kernels.cuda import decode_step, mixture_step
from sgla.kernels.cuda.build import Kernel
from sgla.kernels.cuda.decode_step import BLOCKS, DecodeStep, DenseShape, LayerWeights, copies, told
from sgla.kernels.cuda.mixture_step import MixtureShape, MixtureWeights
from sgla.kernels.ops import KVLayer

BF16 = torch.bfloat16
SHAPE = DenseShape(1024, 16, 8, 3072, True, 16)
LAYERS, VOCAB, LENGTHS = 28, 151_936, (1, 128, 384, 640)
C, P, G, D, T, F = "COPIES", "PART_COPIES", "GATHER", "DIRECT", "TILES_EACH", "FLYING"
VARIANTS: Mapping[str, dict[str, int]] = {
    "base": {},
    "c8": {C: 8},
    "c8p4": {C: 8, P: 4},
    "c8g": {C: 8, G: 1},
    "c128g": {C: 128, G: 1},
    "c8p4f3": {C: 8, P: 4, F: 3},
    "c8p4t2": {C: 8, P: 4, T: 2},
    "c8p4t4": {C: 8, P: 4, T: 4},
    "c8p4dirt2": {C: 8, P: 4, D: 1, T: 2},
    "all": {C: 8, P: 4, G: 1, D: 1, T: 2},
    "all128": {C: 128, P: 4, G: 1, D: 1, T: 2},
    "c8p2": {C: 8, P: 2},
    "c8t2": {C: 8, T: 2},
    "c8dirt2": {C: 8, D: 1, T: 2},
    "again": {},
}
DENSE = [name for name in VARIANTS if name not in ("c8p2", "c8t2", "c8dirt2")]
MIXTURES = "base", "c8", "c8p2", "c8t2", "c8dirt2", "again"
POINTS = 20  # stamps of a layer
EXPERTS = MixtureShape(2048, 32, 4, 768, 128, 8, True, True, 16)


def kernel_of(defines: Mapping[str, int], mixture: bool) -> Kernel:
    """Its compilation begins."""
    module, shape = (mixture_step, EXPERTS) if mixture else (decode_step, SHAPE)
    module._kernel.cache_clear()
    with patch.dict(module.EXCHANGE, defines):
        kernel = shape.kernel()
    module._kernel.cache_clear()
    # Steps that follow each other at once would share their words.
    setattr(kernel, "launch", partial(kernel.launch, dependent=False))  # noqa: B010
    return kernel


class Bench:
    """``mixture``: twelve layers of Qwen3-30B-A3B, without an output layer worth the name."""

    def __init__(self, mixture: bool) -> None:
        torch.manual_seed(0)
        self.mixture, self.count = mixture, 12 if mixture else LAYERS
        self.shape: Any = EXPERTS if mixture else SHAPE
        hidden, self.vocab = self.shape.hidden, 2048 if mixture else VOCAB
        self.layers = [self.layer() for _ in range(self.count)]
        self.embedding, self.head = self.weight(self.vocab, hidden), self.weight(self.vocab, hidden)
        self.norm = self.ones(hidden)
        pages = 80
        heads = self.shape.kv_heads
        pool = torch.randn(self.count, 2, pages + 1, heads, 16, 128, dtype=BF16, device="cuda")
        self.kv = [KVLayer(k, v) for k, v in pool.transpose(3, 4)]
        self.table = (1 + torch.randperm(pages, device="cuda").int())[None].contiguous()
        self.cos_sin = torch.randn(2048, 128, device="cuda").clamp(-1, 1)
        self.logits = torch.empty(1, self.vocab, device="cuda")

    def weight(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=BF16, device="cuda").mul_(0.02)

    def ones(self, n: int) -> Tensor:
        return 1 + 0.1 * torch.randn(n, device="cuda")

    def layer(self) -> LayerWeights | MixtureWeights:
        w, o = self.weight, self.ones
        if self.mixture:
            parts = w(5120, 2048), w(2048, 4096), w(128, 2048), w(128, 1536, 2048), w(128, 2048, 768)
            return MixtureWeights(*parts, o(2048), o(2048), o(128), o(128))
        products = w(4096, 1024), w(1024, 2048), w(6144, 1024), w(1024, 3072)
        return LayerWeights(*products, o(1024), o(1024), o(128), o(128))

    def step(self, kernel: Kernel, defines: Mapping[str, int]) -> DecodeStep:
        module = mixture_step if self.mixture else decode_step
        with patch.dict(module.EXCHANGE, defines):
            words = self.shape.words + 2 * LAYERS * BLOCKS * POINTS
        parts = self.layers, self.kv, self.embedding, self.head, self.norm, self.cos_sin
        made = partial(told, words)
        with (
            patch.object(module, "_kernel", lambda shape: kernel),
            patch.object(decode_step, "told", lambda words, device: made(device)),
        ):
            return DecodeStep(self.shape, *parts, 1e-6, 128**-0.5)

    def run(self, step: DecodeStep, length: int) -> Any:
        ids, slots, kv_len = (torch.tensor([x], dtype=torch.int32, device="cuda") for x in (7, 0, length))
        positions = kv_len - 1
        return lambda: step(ids, positions, slots, kv_len, self.table, self.logits)


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
    parser.add_argument("--mixture", action="store_true", help="Qwen3-30B-A3B instead")
    parser.add_argument("--variants")
    parser.add_argument("--stamps", default="base,all")
    args = parser.parse_args()
    begun = time.monotonic()
    names = (args.variants or ",".join(MIXTURES if args.mixture else DENSE)).split(",")
    stamped = [] if args.mixture else [x for x in args.stamps.split(",") if x]
    kernels = {name: kernel_of(VARIANTS[name], args.mixture) for name in names}
    kernels |= {f"{name} stamps": kernel_of(VARIANTS[name] | {"STAMPS": 1}, False) for name in stamped}
    bench = Bench(args.mixture)
    steps = {name: bench.step(kernel, VARIANTS[name.split()[0]]) for name, kernel in kernels.items()}
    expected: dict[int, Tensor] = {}
    with torch.inference_mode():
        for name in names:
            found = []
            for length in LENGTHS:
                run = bench.run(steps[name], length)
                run()
                wanted = expected.setdefault(length, bench.logits.clone())
                wrong = float((bench.logits - wanted).norm() / wanted.norm())
                us = time_us(lambda run=run: [run() for _ in range(10)], 10, 10)  # type: ignore[misc]
                found.append((length, round(us, 1), f"{wrong:.1e}"))
            line = {
                "bench": "one-row",
                "mixture": args.mixture,
                "variant": name,
                "us": found,
                "defines": VARIANTS[name],
            }
            print(lines.line(line), flush=True)
        for name in stamped:
            for length in (1, 384):
                step = steps[f"{name} stamps"]
                run = bench.run(step, length)
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
                gone = medians(step, copies(VARIANTS[name]))
                line = {"bench": "one-row", "stamps": name, "length": length, "kcycles": gone}
                print(lines.line(line), flush=True)
    print(round(time.monotonic() - begun, 1), "s")


if __name__ == "__main__":
    main()

"""The kernel of a whole decode step of one row alone (``decode_step.cu``; with ``--mixture``
``mixture_step.cu``): one JSON line with microseconds by tokens of context.

    python bench/gpu_one_row.py [--mixture]

Shapes of Qwen3-0.6B, or of twelve layers of Qwen3-30B-A3B with an output layer of 2,048 tokens. Weights are
random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import lines
import torch
from gpu_kernels import time_us
from torch import Tensor

from sgla.kernels.cuda.decode_step import DecodeStep, DenseShape, LayerWeights
from sgla.kernels.cuda.mixture_step import MixtureShape, MixtureWeights
from sgla.kernels.ops import KVLayer

LENGTHS, PAGES, LAUNCHES = (1, 128, 384, 640), 80, 10


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)


def norms(hidden: int) -> list[Tensor]:
    return [1 + 0.1 * torch.randn(n, device="cuda") for n in (hidden, hidden, 128, 128)]


def dense() -> LayerWeights:
    return LayerWeights(
        weight(4096, 1024), weight(1024, 2048), weight(6144, 1024), weight(1024, 3072), *norms(1024)
    )


def mixture() -> MixtureWeights:
    attention = weight(5120, 2048), weight(2048, 4096), weight(128, 2048)
    return MixtureWeights(*attention, weight(128, 1536, 2048), weight(128, 2048, 768), *norms(2048))


def made(shape: Any, layers: list[Any], vocab: int) -> DecodeStep:
    hidden, heads = shape.hidden, shape.kv_heads
    pool = weight(len(layers), 2, PAGES + 1, heads, 16, 128)
    kv = [KVLayer(k, v) for k, v in pool.transpose(3, 4)]
    turns = torch.randn(2048, 128, device="cuda").clamp(-1, 1)
    ends = weight(vocab, hidden), weight(vocab, hidden), norms(hidden)[0]
    step = DecodeStep(shape, layers, kv, *ends, turns, 1e-6, 128**-0.5)
    # No graph has one behind the other, and none may begin before the one before has ended.
    setattr(step._kernel, "launch", partial(step._kernel.launch, dependent=False))  # noqa: B010
    return step


def launches(step: DecodeStep, length: int, vocab: int) -> Callable[[], None]:
    ids, slots, kv_len = (torch.tensor([x], dtype=torch.int32, device="cuda") for x in (7, 0, length))
    positions, logits = kv_len - 1, torch.empty(1, vocab, device="cuda")
    table = (1 + torch.randperm(PAGES, device="cuda").int())[None].contiguous()

    def run() -> None:
        for _ in range(LAUNCHES):
            step(ids, positions, slots, kv_len, table, logits)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixture", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.mixture:
        shape: Any = MixtureShape(2048, 32, 4, 768, 128, 8, True, True, 16)
        layers: list[Any] = [mixture() for _ in range(12)]
        vocab = 2048
    else:
        shape, layers, vocab = DenseShape(1024, 16, 8, 3072, True, 16), [dense() for _ in range(28)], 151_936
    step = made(shape, layers, vocab)
    with torch.inference_mode():
        found = {n: round(time_us(launches(step, n, vocab), LAUNCHES), 1) for n in LENGTHS}
    lines.emit({"bench": "one-row", "mixture": args.mixture, "us": found})


if __name__ == "__main__":
    main()

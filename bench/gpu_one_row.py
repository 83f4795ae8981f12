"""Try the cuts of the kernel that does a whole decode step of one row, and say how long each takes.

    python bench/gpu_one_row.py [--model qwen3-8b] [--kind int4g128] [--context 640] [--seconds 60]

``--kind``: the storage of the layers' weights, of ``decode_step.KINDS``. Each cut is a set of defines of
``csrc/cuda/decode_step.cu``: rows that a warp sums at a time, pieces on their way, places of a ring, blocks
whose parts of a head everyone merges. Times are graph replays of steps over all layers, with random weights.
``floor_ms``: weights and KV at 4.34 TB/s. One JSON line a cut.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import lines
import torch

from sgla.kernels.cuda import decode_step as ds
from sgla.kernels.cuda.build import SHARED, Kernel
from sgla.kernels.ops import KVLayer
from sgla.quant.weight import storage

BANDWIDTH = 4.34e12
BF16 = torch.bfloat16


def kernel(shape: ds.DenseShape, cut: dict[str, int]) -> Kernel:
    """The one that serves, with other defines."""
    defines = ds.defines_of(shape) | cut
    return Kernel("decode_step.cu", "decode_step", defines, ds.shared_of(shape, defines["DEPTH"]))


def weights(shape: ds.DenseShape, layers: int) -> list[ds.LayerWeights]:
    kind, hidden, inner = storage(shape.kind), shape.hidden, shape.inner
    sizes = (shape.qkv, hidden), (hidden, shape.heads * 128), (2 * inner, hidden), (hidden, inner)
    first = [kind.pack(torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5) for n, k in sizes]
    ones = [torch.ones(hidden, device="cuda"), torch.ones(hidden, device="cuda")]
    heads = [torch.ones(128, device="cuda") if shape.qk_norm else None] * 2
    found = []
    for _ in range(layers):
        matrices = [[t.clone() for t in w.tensors] for w in first]
        scales = [w[1] for w in matrices if len(w) > 1]
        found.append(ds.LayerWeights(*(w[0] for w in matrices), *ones, *heads, *scales))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--kind", default="int4g128", choices=list(ds.KINDS))
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    folder = Path(__file__).parent / "models" / args.model
    model = json.loads((folder / "config.json").read_text())
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    layers, vocab = model["num_hidden_layers"], model["vocab_size"]
    norms = model["model_type"] == "qwen3"
    sizes = model["hidden_size"], heads, kv_heads, model["intermediate_size"]
    shape = ds.DenseShape(*sizes, norms, 16, args.kind)
    if not shape.fits(layers, vocab):
        raise SystemExit(f"the kernel does not take {shape}")
    cuts: list[dict[str, int]] = [{}]
    for rows, flying, few in itertools.product((4, 6), (2, 3, 4, 6), (5, 2)):
        cuts.append({"SIDE_BY_SIDE": rows, "FLYING": flying, "FEW": few})
    if shape.bits == 16:
        cuts = [{}, *({"FLYING": flying} for flying in (3, 4))]
    kernels = [kernel(shape, cut) for cut in cuts]
    args.end = time.monotonic() + args.seconds
    measure(args, shape, weights(shape, layers), vocab, list(zip(cuts, kernels, strict=True)))


def measure(
    args: argparse.Namespace,
    shape: ds.DenseShape,
    each: list[ds.LayerWeights],
    vocab: int,
    cuts: list[tuple[dict[str, int], Kernel]],
) -> None:
    hidden, pages = shape.hidden, -(-args.context // 16)
    embedding, head = (torch.randn(vocab, hidden, device="cuda").to(BF16) * 0.02 for _ in range(2))
    pool = torch.randn(len(each), 2, pages + 1, shape.kv_heads, 16, 128, device="cuda").to(BF16)
    kv = [KVLayer(k, v) for k, v in pool.transpose(3, 4)]
    turns = torch.rand(args.context + 1, 128, device="cuda")
    step = ds.DecodeStep(shape, each, kv, embedding, head, each[0].input_norm, turns, 1e-6, 128**-0.5)
    numbers = 7, args.context - 1, 0, args.context  # id, position, slot, length
    one = (torch.tensor([x], dtype=torch.int32, device="cuda") for x in numbers)
    table = torch.arange(1, pages + 1, dtype=torch.int32, device="cuda")[None]
    logits = torch.zeros(1, vocab, device="cuda")
    inputs: Any = *one, table, logits
    size = sum(t.nbytes for w in each for t in w if t is not None) + head.nbytes
    size += pool.nbytes * args.context // ((pages + 1) * 16)
    floor = size / BANDWIDTH * 1e3
    print(f"floor {floor:.3f} ms, {shape}, depth {shape.depth}, piece {shape.piece}", flush=True)
    expected: Any = None
    for cut, made in cuts:
        if time.monotonic() > args.end or made.shared > SHARED[0]:
            print(f"{cut}: left out")
            continue
        step._kernel = made
        step(*inputs)
        torch.cuda.synchronize()
        expected = logits.clone() if expected is None else expected
        apart = float((logits - expected).norm() / expected.norm())
        found = {"w": "one row", "model": args.model, "kind": args.kind, "context": args.context, "cut": cut}
        found |= {"ms": round(replayed(step, inputs), 4), "floor_ms": round(floor, 4)}
        print(lines.line(found | {"apart": round(apart, 5)}), flush=True)


def replayed(step: ds.DecodeStep, inputs: Any, count: int = 50) -> float:
    """Milliseconds of a step in a graph of ten, the best of three."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step(*inputs)
    best = float("inf")
    for _ in range(3):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begun.record()
        for _ in range(count // 10):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, begun.elapsed_time(ended) / count)
    return best


if __name__ == "__main__":
    main()

"""Sums over the ranks of one host inside a CUDA graph, one JSON line a size: ours, NCCL's and torch's
symmetric memory; and of ranks with a part of the rows each, rows to all and sums to their owners.

    python bench/allreduce.py [--ranks 2] [--width 4096] [--rows 1,16,64,256,1024,8192] [--layers 36]

Microseconds of one [rows, width] bf16 sum; ``_norm`` with the add into the residual and the RMSNorm behind
it. Medians over replays, the slowest rank's. With ``--layers``: of a layer of Qwen3-8B without its attention,
whose products are this rank's, in a row of so many (``summed``), with tiles that send what they make
themselves (``sent``), and with the add and the norm alone in the place of the two sums (``apart``). Half of
the difference is what a sum costs among products. ``--own-peer`` does that on one GPU, without the link
(``own_peer.py``).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import lines
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from own_peer import join_alone

from sgla.dist import Shard
from sgla.dist.gpus import MESSAGE, join_gpus
from sgla.dist.lockstep import gathered, scattered
from sgla.kernels.cuda import batch_gemm, prompt_gemm, skinny_gemm
from sgla.kernels.gpu.tuning import Product, algorithm_for
from sgla.kernels.ops import AddedNorm, Sent
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import elementwise

OPS = 20  # in a graph
REPLAYS = 15
SENDS: dict[str, Sent] = {"few rows": "all", "tiles": "all", "prompt tiles": "others"}  # kernels, and to whom


def in_graph(op: Callable[[], object], ops: int = OPS) -> float:
    """Microseconds of ``op``, which is ``ops`` times in a graph, on the slowest rank."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(ops):
                op()
        times = []
        for _ in range(REPLAYS):
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / ops * 1e3)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(slowest.item(), 2)


def variants(shard: Shard, shared: torch.Tensor, rows: int, width: int) -> dict[str, Callable[[], object]]:
    """Ways to sum ``[rows, width]``. ``shared``: symmetric memory for torch's own."""
    x, residual = (torch.randn(rows, width, device="cuda").bfloat16() * 1e-3 for _ in range(2))
    weight = torch.ones(width, device="cuda")
    norm = AddedNorm(residual, weight, 1e-6)
    found: dict[str, Callable[[], object]] = {"nccl": lambda: dist.all_reduce(x)}

    def nccl_norm() -> None:
        dist.all_reduce(x)
        elementwise.add_rms_norm(x, residual, weight, 1e-6)

    found["nccl_norm"] = nccl_norm
    ours: Any = shard.exchange  # an AllReduce
    if ours is not None and ours.takes(x):
        if ours.fits(x, False):
            found["one_shot"] = lambda: ours.sum(x, None, False)
            found["one_shot_norm"] = lambda: ours.sum(x, norm, False)
        if ours.fits(x, True):
            found["two_shot"] = lambda: ours.sum(x, None, True)
            found["two_shot_norm"] = lambda: ours.sum(x, norm, True)
    if rows % shard.size == 0:
        own, counts = x[: rows // shard.size].clone(), [rows // shard.size] * shard.size
        found["nccl_scatter"] = lambda: scattered(x, counts, shard.rank)
        found["nccl_gather"] = lambda: gathered(own, counts, shard.rank)
        if ours is not None and ours.takes_own(x, counts):
            part = AddedNorm(own, weight, 1e-6)
            found["scatter"] = lambda: ours.scatter(x, counts)
            found["scatter_norm"] = lambda: ours.scatter(x, counts, part)
            found["gather"] = lambda: ours.gather(own, counts)
    if x.nbytes <= shared.nbytes:
        y = shared[: x.numel()].view(rows, width)
        group = dist.group.WORLD.group_name
        found["torch_one_shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(y, "sum", group)
        found["torch_two_shot"] = lambda: torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", group)
    return found


def layers(shard: Shard, rows: int, count: int, way: str) -> Callable[[], object]:
    """``count`` layers of Qwen3-8B, each with weights of its own, from the output of attention to q, k, v."""
    d, inner, heads, kv_heads, dim = 4096, 12288 // shard.size, 32 // shard.size, 8 // shard.size, 128
    qkv = (heads + 2 * kv_heads) * dim
    shapes = (d, heads * dim), (2 * inner, d), (d, inner), (qkv, d)
    made = [[torch.randn(n, k, device="cuda").bfloat16() * k**-0.5 for n, k in shapes] for _ in range(count)]
    residual, weight = torch.zeros(rows, d, device="cuda").bfloat16(), torch.ones(d, device="cuda")

    def product(x: torch.Tensor, w: torch.Tensor, gated: bool = False, send: Any = None) -> torch.Tensor:
        kernel, config = algorithm_for(rows, Product(w.shape[0], w.shape[1], gated))
        epilogue = skinny_gemm.SILU if gated else skinny_gemm.STORE
        if isinstance(config, skinny_gemm.Config):
            return skinny_gemm.linear(x, w, epilogue=epilogue, config=config, send=send)
        if isinstance(config, batch_gemm.Config):
            return batch_gemm.linear(x, w, config, epilogue=epilogue, send=send)
        if kernel == "prompt tiles":
            return prompt_gemm.linear(x, w, epilogue=epilogue, send=send)
        y = torch.nn.functional.linear(x, w)
        return elementwise.act_mul(y, "silu") if gated else y

    ours: Any = shard.exchange  # an AllReduce
    norm = AddedNorm(residual, weight, 1e-6)

    def summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The product, and what stands behind it."""
        if way == "apart":
            return plain(product(x, w))
        kernel = algorithm_for(rows, Product(w.shape[0], w.shape[1])).kernel
        sent = SENDS.get(kernel, "") if way == "sent" else ""
        return ours.sum(product(x, w, send=ours.sending(rows, d) if sent else None), norm, sent=sent)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return elementwise.add_rms_norm(x, residual, weight, 1e-6, in_place=True)[0]

    x = torch.randn(rows, heads * dim, device="cuda").bfloat16()

    def run() -> None:
        for o, gate_up, down, projection in made:
            product(summed(product(summed(x, o), gate_up, True), down), projection)

    return run


def check(shard: Shard, rows: int, width: int) -> None:
    """Against NCCL, and the same bits on every rank."""
    torch.manual_seed(shard.rank)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    expected = x.float()
    dist.all_reduce(expected)
    shard.all_reduce(x)
    assert ((x.float() - expected).norm() / expected.norm()).item() < 5e-3, (rows, width)
    low, high = x.float(), x.float()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert torch.equal(low, high), (rows, width)


def work(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    import torch.distributed._symmetric_memory as symmetric

    if args.own_peer:
        shard, note = join_alone(message=args.message)
    else:
        shard, note = join_gpus(rank, ranks, store, message=args.message)
        shared = symmetric.empty(4 << 20, dtype=torch.bfloat16, device=torch.device("cuda", rank))
        symmetric.rendezvous(shared, dist.group.WORLD)
    base = {
        "bench": "allreduce",
        "machine": lines.gpus(ranks),
        "torch": torch.__version__,
    }
    if rank == 0:
        print(note, flush=True)
    for width in () if args.own_peer else map(int, args.width.split(",")):
        for rows in map(int, args.rows.split(",")):
            check(shard, rows, width)
            times = {name: in_graph(op) for name, op in variants(shard, shared, rows, width).items()}
            check(shard, rows, width)
            if rank == 0:
                lines.emit(base | {"rows": rows, "width": width, "us": times})
    counts = [int(rows) for rows in args.layers_rows.split(",")] if args.layers else []
    ways = "apart", "summed", "sent"
    with rehearsing():  # their kernels are compiled beside each other
        for rows, way in itertools.product(counts, ways):
            layers(shard, rows, 1, way)()
    for rows in counts:
        us = {way: in_graph(layers(shard, rows, args.layers, way), 1) for way in ways}
        if rank == 0:
            lines.emit(base | {"rows": rows, "layers": {k: round(v / args.layers, 2) for k, v in us.items()}})
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--width", default="4096")
    parser.add_argument("--rows", default="1,4,16,64,128,256,512,1024,2048,8192")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--layers-rows", default="1,2,4,16,64,128,192,256,4096,8448")
    parser.add_argument("--message", type=int, default=MESSAGE)
    parser.add_argument("--own-peer", action="store_true", help="layers on one GPU")
    args = parser.parse_args()
    if args.own_peer:
        args.ranks = 1
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args.ranks, f"{folder}/store", args), args.ranks)


if __name__ == "__main__":
    main()

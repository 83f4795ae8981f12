"""Attention of decode rows over KV caches of fewer bits: microseconds of a layer, and whether it is right.

    python bench/kv.py [--kinds bfloat16,fp8,int8,int4] [--seconds 100]

Heads are those of Qwen3-8B and of Llama-3.1-8B: 32 query and 8 KV heads of 128. One JSON line a measurement:
``us``, the median of graph replays over a cache larger than the L2; ``times``, how much faster than the
fastest bf16 of the same rows; ``floor``, the microseconds in which the memory gives the bytes. ``error`` is
relative, to the torch body over the same pages. Kernels are tried by ``config``: of ours the warps that
attend, those that merge, the blocks of a multiprocessor and the tiles that are fetched at once; of Triton's
the keys of a block, the stages and the warps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any
from unittest.mock import patch

import lines
import torch
from gpu_kernels import SCORING, decode_rows, shape_of, time_us

from sgla import attention
from sgla.attention import DeviceBatch
from sgla.kernels import ops
from sgla.kernels.cuda import decode_attention
from sgla.kernels.cuda.build import Kernel
from sgla.kernels.ops import KVLayer
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import attention as triton_attention
from sgla.layers.spec import StateTensor
from sgla.model.state import LayerState, kv_groups
from sgla.worker.kv import Arena, allocate_kv, paged

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BANDWIDTH = 4.34e6  # bytes a microsecond
CASES = [(16, 8192), (1, 8192), (64, 2048), (8, 32768)]  # rows, tokens; few configs but on the first
CHECKED = torch.tensor([700, 3, 1500])
NATIVE = [(8, 4, 1, 8), (4, 2, 2, 8), (4, 2, 2, 4), (4, 2, 2, 16), (8, 4, 1, 16), (4, 4, 2, 8), (12, 4, 1, 8)]
TRITON = [(64, 3, 4), (64, 2, 4), (128, 2, 4), (128, 2, 8), (32, 3, 4), (64, 3, 8)]
KERNEL = decode_attention._kernel
Body = Callable[[KVLayer, torch.Tensor, DeviceBatch], torch.Tensor]


def pages_of(kind: str, pages: int) -> tuple[KVLayer, float]:
    """Random keys and values in a cache of ``kind``, and its bytes for a token."""
    state = [LayerState(0, (StateTensor("k", (KV_HEADS, DIM)), StateTensor("v", (KV_HEADS, DIM))))]
    groups = kv_groups(state, 0, kind)
    arena = Arena(groups[0].page_bytes(PAGE) * pages, 4)
    [kv] = paged(allocate_kv(state, groups, [pages], PAGE, kind, arena.zeros))
    if kind == "fp8":
        kv.k_scale, kv.v_scale = 0.02, 0.01
    for begin in range(0, pages, 1024):
        places = torch.arange(begin * PAGE, min(begin + 1024, pages) * PAGE, device="cuda")
        for put in (kv.put_keys, kv.put_values):
            put(torch.randn(len(places), KV_HEADS, DIM, device="cuda"), (places // PAGE, places % PAGE))
    return kv, groups[0].token_bytes


@cache
def kernels(at_once: int) -> Any:
    """In the place of ``decode_attention._kernel``: those that fetch so many tiles at once."""

    def kernel(file: str, name: str, defines: dict[str, int], *rest: int) -> Kernel:
        return Kernel(file, name, defines | {"AT_ONCE": at_once}, *rest)

    @cache
    def made(*given: Any) -> Kernel:
        with patch.object(decode_attention, "Kernel", kernel):
            return KERNEL.__wrapped__(*given)

    return made


def native(shape: attention.AttentionShape, config: tuple[int, ...]) -> Body:
    attend: Any = attention.choose_backend("auto", [shape], decode="native")[0].decode
    attend._kernel.cut = decode_attention.Cut(*config[:3]) if config else None

    def body(kv: KVLayer, q: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        with patch.object(decode_attention, "_kernel", kernels(config[3]) if config else KERNEL):
            return attend.forward(q, kv, batch, SCORING)

    return body


class Warps:
    """A Triton kernel with so many warps."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self._kernel, self._warps = kernel, warps

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *given, **more: self._kernel[grid](*given, **more | {"num_warps": self._warps})


def triton(shape: attention.AttentionShape, config: tuple[int, ...]) -> Body:
    attend: Any = attention.choose_backend("auto", [shape], decode="triton")[0].decode
    kernel, chosen = triton_attention._decode, triton_attention.decode_cut
    tried = Warps(kernel, config[2]) if config else kernel

    def cut(dim: int, rows: int, *rest: int) -> triton_attention.Cut:
        return triton_attention.Cut(rows, *config[:2]) if config else chosen(dim, rows, *rest)

    def body(kv: KVLayer, q: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        with patch.multiple(triton_attention, decode_cut=cut, _decode=tried):
            return attend.forward(q, kv, batch, SCORING)

    return body


def wrong(body: Body, kind: str) -> float:
    """The relative error."""
    batch = decode_rows(CHECKED)
    batch.q_start = torch.arange(len(CHECKED) + 1, dtype=torch.int32, device="cuda")
    kv, _ = pages_of(kind, batch.page_table.numel() + 1)
    q = torch.randn(len(CHECKED), HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    expected = ops.attention.body(q.float(), kv, batch, *SCORING)
    return float((body(kv, q, batch).float() - expected).norm() / expected.norm())


def microseconds(body: Body, kind: str, rows: int, length: int) -> tuple[float, float]:
    """Those measured, and those in which the memory gives the bytes."""
    batch = decode_rows(torch.full((rows,), length))
    q = torch.randn(rows, HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    layers, token_bytes = filled(kind, batch.page_table.numel() + 1, 1 if rows > 1 else 8)

    def run() -> None:
        for kv in layers:
            body(kv, q, batch)

    return time_us(run, len(layers)), rows * length * token_bytes / BANDWIDTH


@cache
def filled(kind: str, pages: int, copies: int) -> tuple[list[KVLayer], float]:
    made = [pages_of(kind, pages) for _ in range(copies)]
    return [kv for kv, _ in made], made[0][1]


def tried(kind: str) -> list[tuple[str, Body]]:
    """All configs, the one that the product chooses first."""
    shape = shape_of(HEADS, KV_HEADS, 64)._replace(kv_dtype="" if kind == "bfloat16" else kind)
    wide = kind == "bfloat16"  # whose tiles leave room for few
    some = [("native", native, config) for config in ((), *NATIVE) if not (wide and 16 in config)]
    some += [("triton", triton, config) for config in ((), *TRITON)]
    return [
        (f"{name} {'x'.join(map(str, config)) or 'chosen'}", make(shape, config))
        for name, make, config in some
    ]


def compile_all(found: dict[str, list[tuple[str, Body]]]) -> None:
    """Side by side; what does not compile says so when it is measured."""
    batch = decode_rows(CHECKED)
    q = torch.zeros(len(CHECKED), HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    with suppress(RuntimeError), rehearsing():
        for kind, some in found.items():
            kv, _ = pages_of(kind, batch.page_table.numel() + 1)
            for _, body in some:
                body(kv, q, batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="bfloat16,fp8,int8,int4")
    parser.add_argument("--seconds", type=float, default=100)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    found = {kind: tried(kind) for kind in args.kinds.split(",")}
    compile_all(found)
    fastest: dict[tuple[int, int], float] = {}
    for case in CASES:
        for kind, some in found.items():
            for name, body in some if case == CASES[0] else [some[0], *some[1:3]]:
                if time.monotonic() > end:
                    return
                line = {"bench": "kv", "kv": kind, "rows": case[0], "length": case[1], "config": name}
                try:
                    error = wrong(body, kind)
                    us, floor = microseconds(body, kind, *case)
                except Exception as problem:
                    lines.emit(line | {"problem": f"{type(problem).__name__}: {problem}"[:200]})
                    if isinstance(problem, torch.AcceleratorError):
                        return  # nothing works behind it
                    continue
                if kind == "bfloat16":
                    fastest[case] = min(us, fastest.get(case, us))
                numbers = {"us": round(us, 2), "floor": round(floor, 1), "error": float(f"{error:.2g}")}
                lines.emit(line | numbers | {"times": round(fastest.get(case, 0.0) / us, 3)})
            filled.cache_clear()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Speed of the native CPU kernels at the shapes of SmolLM2-135M, one JSON object a line.

    python bench/kernels.py --threads 2 [--isa avx2] [--only linear,attention,barrier,model]

``--against``: steps of the whole model by turns with the kernels of another checkout, and its times as
``before_ms``.
Rates to compare with: ``read`` (memory read by the same threads) and ``gemm`` (torch float32 2048^3).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import lines
import torch
from torch import Tensor

from sgla.kernels import build, ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu import native
from sgla.kernels.cpu import program as recorder
from sgla.kernels.cpu.panels import KINDS
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.kernels.ops import KVLayer
from sgla.quant.weight import OF_PANELS, Weight, pack

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, FFN, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
STORAGES = [OF_PANELS.get(kind, kind) for kind in KINDS]
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)]
PAGE = 16


def seconds(fn: Callable[[], object], least: float = 0.3) -> float:
    """Shortest time of a call, over at least ``least`` seconds: what is left of noise from other
    processes."""
    fn()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < least:
        before = time.perf_counter()
        fn()
        times.append(time.perf_counter() - before)
    return min(times)


def batch(rows: int, new: int, history: int, sampled: int) -> ForwardBatch:
    """``rows`` rows of ``new`` tokens after ``history``, each with its own pages."""
    pages = -(-(new + history) // PAGE)
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
    positions = torch.arange(history, history + new, dtype=torch.int32).repeat(rows)
    owner = torch.arange(rows, dtype=torch.int32).repeat_interleave(new)
    out_loc = table[owner.long(), positions.long() // PAGE] * PAGE + positions % PAGE
    return ForwardBatch(
        rows=rows,
        tokens=rows * new,
        ids=torch.randint(0, VOCAB, (rows * new,), dtype=torch.int32),
        positions=positions,
        slots=torch.arange(rows, dtype=torch.int32),
        q_start=torch.arange(0, rows * new + 1, new, dtype=torch.int32),
        kv_len=torch.full((rows,), history + new, dtype=torch.int32),
        out_loc=out_loc,
        page_table=table,
        page_size=PAGE,
        sample_rows=torch.arange(new - 1, rows * new, new, dtype=torch.int32)[:sampled],
    )


def random_kv(shape: tuple[int, ...], dtype: torch.dtype) -> KVLayer:
    if dtype != torch.int8:
        return KVLayer(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    k, v = (torch.randint(-127, 128, shape, dtype=dtype) for _ in range(2))
    scales = [torch.full((shape[0], shape[2], shape[1]), 0.02) for _ in range(2)]
    return KVLayer(k, v, k_scales=scales[0], v_scales=scales[1])


def quartiles(calls: list[Callable[[], object]], least: float) -> list[float]:
    """Lower quartiles of the times of calls by turns, each after a call that brings its caches up."""
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    while len(times[0]) < 5 or time.perf_counter() - start < least:
        for call, found in zip(calls, times):
            call()
            before = time.perf_counter()
            call()
            found.append(time.perf_counter() - before)
            time.sleep(found[-1])  # others have the cores meanwhile, at real-time priority too
    return [sorted(found)[len(found) // 4] for found in times]


class Bench:
    def __init__(self, threads: int, isa: str | None, against: Path | None) -> None:
        self.threads, self.isa = threads, isa
        self.others: native.Library | None = None
        if against is not None:
            with patch.object(build, "source_folder", lambda device: against / "csrc" / device):
                self.others = native.Library(build.build(build.level(isa or native.library().isa)))

    def report(self, what: str, **values: object) -> None:
        shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        name = native.library(self.isa).isa
        print(lines.line({"w": what, "isa": name, "threads": self.threads, **shown}), flush=True)

    def program(self, fn: Callable[[ForwardBatch], Tensor], tokens: int, sampled: int) -> Program:
        return Program.record(fn, ProgramLimits(tokens, sampled), self.threads, self.isa)

    def limits(self) -> None:
        """What the machine can do: memory read and float32 matrix products, by torch."""
        torch.set_num_threads(self.threads)
        big = torch.ones(64 << 20)
        self.report("read", GBps=big.nbytes / seconds(big.sum) / 1e9)
        a = torch.ones(2048, 2048)
        self.report("gemm", GFLOPs=2 * 2048**3 / seconds(lambda: a @ a) / 1e9)
        torch.set_num_threads(1)

    def linear(self) -> None:
        """Each repetition walks over enough copies of the weight that none stays in a cache."""
        for kind in STORAGES:
            for n, k in SHAPES:
                self._linear(kind, n, k)

    def _linear(self, kind: str, n: int, k: int) -> None:
        one = pack(torch.randn(n, k), kind)
        copies = max(1, int(80e6 / one.nbytes))
        weights = [type(one)(n, k, one.data.clone(), *one.tensors[1:]) for _ in range(copies)]
        table = torch.randn(VOCAB, k)
        nbytes = one.nbytes

        def fn(b: ForwardBatch) -> Tensor:
            x = ops.embedding(b.ids, table)
            for w in weights:
                y = ops.linear(x, w)
            return y

        for m in (1, 8, 32, 512):
            if m == 512:
                weights = weights[: max(1, int(1e9 / (2 * m * n * k)))]
            program = self.program(fn, m, 1)
            data = batch(1, m, 0, 1)
            each = seconds(lambda program=program, data=data: program.run(data)) / len(weights)  # type: ignore[misc]
            rate = {"GBps": nbytes / each / 1e9, "GFLOPs": 2 * m * n * k / each / 1e9}
            self.report("linear", kind=kind, n=n, k=k, m=m, us=each * 1e6, **rate)

    def attention(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            for rows, new, history in ((1, 1, 1000), (1, 1, 8000), (32, 1, 1000), (1, 1024, 0), (8, 512, 0)):
                self._attention(dtype, rows, new, history)

    def _attention(self, dtype: torch.dtype, rows: int, new: int, history: int) -> None:
        data = batch(rows, new, history, 1)
        shape = (int(data.page_table.max()) + 1, PAGE, KV_HEADS, DIM)
        layers = [random_kv(shape, dtype) for _ in range(6)]
        table = torch.randn(VOCAB, HEADS * DIM)

        def fn(b: ForwardBatch) -> Tensor:
            x = ops.embedding(b.ids, table)
            for kv in layers:
                y = ops.attention(x, kv, b, DIM**-0.5)
            return y

        program = self.program(fn, data.tokens, 1)
        each = seconds(lambda: program.run(data)) / len(layers)
        pairs = rows * sum(range(history + 1, history + new + 1))
        read = rows * (history + new) * 2 * KV_HEADS * DIM * dtype.itemsize
        self.report(
            "attention", dtype=str(dtype)[6:], rows=rows, new=new, history=history, us=each * 1e6,
            GBps=read / each / 1e9, GFLOPs=4 * pairs * HEADS * DIM / each / 1e9,
        )  # fmt: skip

    def barrier(self) -> None:
        """An instruction of next to no work: one norm of one narrow row."""
        table, weight = torch.randn(VOCAB, 32), torch.ones(32)

        def fn(b: ForwardBatch) -> Tensor:
            x = ops.embedding(b.ids, table)
            for _ in range(1000):
                x = ops.rms_norm(x, weight, 1e-5)
            return x

        program, data = self.program(fn, 1, 1), batch(1, 1, 0, 1)
        self.report("barrier", us=seconds(lambda: program.run(data)) * 1e3)

    def model(self, kinds: list[str]) -> None:
        for kind in kinds:
            self._model(kind)

    def _model(self, kind: str) -> None:
        def weight(n: int, k: int) -> Weight:
            return pack(torch.randn(n, k) * k**-0.5, kind)

        layers = [
            (weight(960, WIDTH), weight(WIDTH, WIDTH), weight(2 * FFN, WIDTH), weight(WIDTH, FFN))
            for _ in range(LAYERS)
        ]
        head, norm, cos_sin = weight(VOCAB, WIDTH), torch.ones(WIDTH), torch.randn(8192, DIM)
        cases = {
            "decode 1": (1, 1, 100),
            "verify 2": (1, 2, 100),
            "verify 3": (1, 3, 100),
            "verify 5": (1, 5, 100),
            "decode 8": (8, 1, 100),
            "decode 32": (32, 1, 100),
            "prefill": (1, 1024, 0),
        }
        shape = (1024, PAGE, KV_HEADS, DIM)
        dtype = torch.float32 if kind == "f32" else torch.bfloat16
        kvs = [KVLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in layers]
        nbytes = sum(w.nbytes for ws in layers for w in ws) + head.nbytes

        def fn(b: ForwardBatch) -> Tensor:
            h = ops.embedding(b.ids, head)
            x = ops.rms_norm(h, norm, 1e-5)
            for (qkv, out, gate_up, down), kv in zip(layers, kvs, strict=True):
                q = ops.qk_norm_rope_store(
                    ops.linear(x, qkv), b.positions, cos_sin, None, None, 0, kv, b.out_loc
                )
                x, h = ops.add_rms_norm(ops.linear(ops.attention(q, kv, b, DIM**-0.5), out), h, norm, 1e-5)
                x, h = ops.add_rms_norm(
                    ops.linear(ops.act_mul(ops.linear(x, gate_up), "silu"), down), h, norm, 1e-5
                )
            return ops.linear(ops.gather(x, b.sample_rows), head)

        programs = [self.program(fn, 1024, 32)]
        if (others := self.others) is not None:
            with patch.object(recorder, "library", lambda isa: others):
                programs.append(self.program(fn, 1024, 32))
        dense = 2 * sum(w.n * w.k for ws in layers for w in ws)
        for name, (rows, new, history) in cases.items():
            data = batch(rows, new, history, rows)
            if name.startswith("verify"):  # a token and the guesses behind it: logits of all
                data.sample_rows = torch.arange(new, dtype=torch.int32)
            each, *before = quartiles([lambda p=p, data=data: p.run(data) for p in programs], 1.0)  # type: ignore[misc]
            pairs = rows * sum(range(history + 1, history + new + 1))
            flops = (
                dense * data.tokens
                + 2 * len(data.sample_rows) * head.n * head.k
                + LAYERS * 4 * pairs * HEADS * DIM
            )
            self.report(
                "model " + name, kind=kind, ms=each * 1e3, tok_s=data.tokens / each, GBps=nbytes / each / 1e9,
                GFLOPs=flops / each / 1e9, **({"before_ms": before[0] * 1e3} if before else {}),
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--only", default="limits,barrier,linear,attention,model")
    parser.add_argument("--kinds", default=",".join(STORAGES), help="weight kinds of the whole model")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.threads, args.isa, args.against)
    for part in args.only.split(","):
        if part == "model":
            bench.model(args.kinds.split(","))
        else:
            getattr(bench, part)()


if __name__ == "__main__":
    main()

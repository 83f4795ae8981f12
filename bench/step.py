"""Decode steps of the CUDA runner alone, without the engine around it: one JSON line a batch size.

    python bench/step.py --model bench/models/qwen3-8b [--batches 1,16,64,256] [--context 640] [--tp 2] [--profile]

``graph_ms``: replays back to back. ``step_ms``: launches as the worker makes them, two in flight. ``step_gap_ms``: idle time of
the GPU between steps. ``floor_ms``: weights and KV that must be read, at 4.34 TB/s. With several ranks the times are those
of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from sgla.config import Config
from sgla.hub.source import open_source
from sgla.messages import SAMPLE, NewRow, RowSampling, StepPlan
from sgla.worker.cuda import CudaRunner

BANDWIDTH = 4.34e12


def ints(values: Any) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def admit(runner: CudaRunner, rows: int, context: int) -> None:
    """Rows whose history nobody computed: the pages hold zeros, which takes as long."""
    per_row = -(-(context + 600) // runner.tables.page_size)
    new = [
        NewRow(
            slot=slot,
            tokens=ints(np.full(context + 1, slot + 5)),
            prompt_len=context,
            pages=ints(1 + slot * per_row + np.arange(per_row)),
            sampling=RowSampling(temperature=0.6, seed=slot),
        )
        for slot in range(rows)
    ]
    runner.execute(plan(0, rows, context, new))


def plan(step: int, rows: int, start: int, new: list[NewRow] | None = None) -> StepPlan:
    return StepPlan(
        step=step,
        slots=ints(np.arange(rows)),
        starts=ints(np.full(rows, start)),
        q_lens=ints(np.ones(rows)),
        flags=bytes([SAMPLE]) * rows,
        new=new or [],
    )


def measure(runner: CudaRunner, rows: int, context: int, steps: int = 100) -> dict[str, float]:
    admit(runner, rows, context)
    size = next(size for size in runner.graphs.sizes if size >= rows)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        runner.graphs._graphs[size].replay()
    end.record()
    end.synchronize()
    graph_ms = begin.elapsed_time(end) / steps
    flights, gaps, host = [], [], 0.0
    begun = time.perf_counter()
    for i in range(steps):
        at = time.perf_counter()
        flights.append(runner.launch(plan(i, rows, context + 1 + i)))
        host += time.perf_counter() - at
        if len(flights) == 2:
            gaps.append(runner.finish(flights.pop(0)).gap)
    runner.finish(flights.pop(0))
    step_ms = (time.perf_counter() - begun) / steps * 1e3
    spec = runner.model.spec
    inner = float(spec.intermediate)
    if spec.moe:  # experts that some row needs, on average
        experts = spec.moe.experts
        inner = spec.moe.intermediate * experts * (1 - (1 - spec.moe.top_k / experts) ** rows)
    layer = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads) + 3 * spec.hidden * inner
    weights = 2 * (spec.layers * layer + spec.vocab * spec.hidden)
    kv = 4 * rows * context * spec.layers * spec.kv_heads * spec.head_dim
    return {
        "bs": rows,
        "graph_ms": round(graph_ms, 4),
        "step_ms": round(step_ms, 4),
        "step_gap_ms": round(sorted(gaps)[len(gaps) // 2] * 1e3, 4),
        "launch_us": round(host / steps * 1e6, 1),
        "floor_ms": round((weights + kv) / runner.shard.size / BANDWIDTH * 1e3, 4),
    }


def profile(step: str, body: Callable[[], object], repeat: int) -> dict[str, object]:
    """Where the time of ``body`` goes: microseconds and calls of each kernel. Kernels that overlap count twice."""
    body()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        body()
    end.record()
    end.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(repeat):
            body()
        torch.cuda.synchronize()
    kernels = [e for e in prof.key_averages() if e.device_time_total > 0]
    kernels.sort(key=lambda e: -e.device_time_total)
    return {
        "profile": step,
        "ms": round(begin.elapsed_time(end) / repeat, 3),
        "kernels": [
            {"name": e.key[:60], "calls": e.count / repeat, "us": round(e.device_time_total / e.count, 2)}
            for e in kernels[:16]
        ],
    }


def profile_decode(runner: CudaRunner, rows: int, context: int) -> dict[str, object]:
    admit(runner, rows, context)
    size = next(size for size in runner.graphs.sizes if size >= rows)
    return profile(f"decode, {rows} rows of {context}", runner.graphs._graphs[size].replay, 5)


def profile_mixed(runner: CudaRunner, rows: int, context: int, tokens: int) -> dict[str, object]:
    """``rows`` decode rows and a prompt of ``tokens``."""
    if rows:
        admit(runner, rows, context)
    row = NewRow(
        slot=rows,
        tokens=ints(np.arange(tokens)),
        prompt_len=tokens,
        pages=ints(1 + rows * 120 + np.arange(-(-tokens // 16))),
        sampling=RowSampling(),
    )
    step = StepPlan(
        step=0,
        slots=ints(np.arange(rows + 1)),
        starts=ints([context] * rows + [0]),
        q_lens=ints([1] * rows + [tokens]),
        flags=bytes([SAMPLE]) * (rows + 1),
        new=[row],
    )
    return profile(
        f"{rows} decode rows of {context} and a prompt of {tokens}", lambda: runner.execute(step), 3
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--extra", default="{}", help="more settings, as JSON")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    if args.tp == 1:
        run(0, args, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), args.tp)


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    begun = time.perf_counter()
    config = Config(
        model=args.model,
        device="cuda",
        load_format="dummy",
        context_length=8192,
        attention_backend=args.backend,
        **json.loads(args.extra),
        quantization=args.quantization,
    )
    source = open_source(args.model, "dummy")
    runner = CudaRunner(config, source, rank, args.tp, folder, lambda progress: None)
    base = {
        "bench": "step",
        "machine": torch.cuda.get_device_name() + (f" x{args.tp}" if args.tp > 1 else ""),
        "torch": torch.__version__,
        "model": Path(args.model).name,
        "context": args.context,
    }
    if args.quantization:
        base["quantization"] = args.quantization
    start = {
        "s": round(time.perf_counter() - begun, 2),
        "timings": runner.facts.timings,
        "notes": runner.facts.notes,
        "ledger": runner.facts.ledger,
    }
    print("JSON " + json.dumps(base | {"w": "startup"} | start), flush=True)
    with torch.inference_mode():
        for rows in map(int, args.batches.split(",")):
            print("JSON " + json.dumps(base | measure(runner, rows, args.context)), flush=True)
        if args.profile:
            for rows in (1, 16, 64, 256):
                print("JSON " + json.dumps(base | profile_decode(runner, rows, args.context)), flush=True)
            for rows, tokens in ((0, 4096), (64, 700), (64, 256)):
                print("JSON " + json.dumps(base | profile_mixed(runner, rows, 1150, tokens)), flush=True)
    if args.tp > 1:
        sys.stdout.flush()
        os._exit(0)  # without asking the other ranks


if __name__ == "__main__":
    main()

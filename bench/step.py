"""Decode steps of the CUDA runner alone, without the engine around it: one JSON line a batch size.

    python bench/step.py --model bench/models/qwen3-8b [--batches 1,16,64,256] [--context 640] [--tp 2]
    python bench/step.py --model bench/models/qwen3-0.6b --batches 1 --guesses 8,5
    python bench/step.py --model bench/models/qwen3-8b --profile [--prompts 0+4096,64+700] [--traces FOLDER]

``graph_ms``: replays of the graph, back to back. ``step_ms``: launches as the worker makes them, two in
flight. ``step_gap_ms``: idle time of the GPU between steps. Each batch is measured twice: with a temperature
alone, whose draw is in the graph, and with Qwen3's ``top_k`` and ``top_p`` behind the graph. ``floor_ms``:
weights and KV that must be read, at 4.34 TB/s. With several ranks the times are those of rank 0, and
``--profile`` tells those of each. ``--own-peer``: one GPU does the work of a rank of two, without the link.
``--guesses``: rows that n-grams guess so many tokens for, which need not be right; the graph is that of all
decode rows, and ``finish_us``, as ``launch_us``, what the host does for a step.
``--profile``: see ``timeline.py``. ``--table``: whether products that are faster alone make a step faster.
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

import lines
import msgspec
import numpy as np
import timeline
import torch
import torch.multiprocessing as mp
from limits import Limits
from own_peer import join_alone
from timeline import Load

from sgla.config import Config
from sgla.dist import gpus
from sgla.kernels.gpu import tuning
from sgla.loading.source import open_source
from sgla.messages import SAMPLE, NewRow, RowSampling, StepPlan
from sgla.model.read import read_decoder
from sgla.resolve import ROWS
from sgla.worker.batch import state_columns
from sgla.worker.cuda import CudaRunner
from sgla.worker.flights import Flight

DRAWN = RowSampling(temperature=0.6)


def ints(values: Any) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def pages_of(runner: CudaRunner, first: int, count: int) -> list[bytes]:
    """So many pages of each cache group. Groups of windows have fewer, which rows then share; of states a row
    has one. Of a memory that groups share each has a part."""
    places, groups = first + np.arange(count), runner.facts.groups
    found = []
    for g, group in enumerate(groups):
        begin, room = 0, group.pages - 1
        if group.slab:
            slabs = room // group.slab
            begin = slabs * g // len(groups) * group.slab
            room = slabs // len(groups) * group.slab
        found.append(ints(1 + begin + (places[:1] // count if group.every else places) % room))
    return found


ROOM = 600  # tokens behind the context


def admit(runner: CudaRunner, rows: int, context: int, sampling: RowSampling) -> None:
    """Rows whose history nobody computed: the pages hold zeros, which takes as long."""
    per_row = -(-(context + ROOM) // runner.steps.tables.page_size)
    new = [
        NewRow(
            slot=slot,
            tokens=ints(np.full(context + 1, slot + 5)),
            prompt_len=context,
            pages=pages_of(runner, slot * per_row, per_row),
            limit=context + ROOM - 10,
            sampling=msgspec.structs.replace(sampling, seed=slot),
        )
        for slot in range(rows)
    ]
    runner.execute(plan(0, rows, context, new))


def plan(step: int, rows: int, start: int, new: list[NewRow] | None = None, guesses: int = 0) -> StepPlan:
    return StepPlan(
        step=step,
        slots=ints(np.arange(rows)),
        starts=ints(np.full(rows, start)),
        q_lens=ints(np.ones(rows)),
        flags=bytes([SAMPLE]) * rows,
        new=new or [],
        drafts=ints(np.full(rows, guesses)) if guesses else b"",
    )


def guess(runner: CudaRunner, rows: int, context: int, guesses: int) -> torch.cuda.CUDAGraph:
    """The graph of rows that verify so many guesses, all of which are there: their columns are on the GPU,
    where it would take those of another size for its own."""
    size = next(size for size in runner.graphs.sizes if size >= rows * (guesses + 1))
    slots = np.repeat(np.arange(rows, dtype=np.int32), guesses + 1)
    starts = np.tile(context - guesses + np.arange(guesses + 1, dtype=np.int32), rows)
    states = state_columns(plan(0, rows, context), slots, starts, runner.steps.tables.host)
    runner.graphs._send(slots, starts, size, states)
    return runner.graphs._graphs[size]


def measure(
    runner: CudaRunner, rows: int, context: int, sampling: RowSampling, steps: int, guesses: int = 0
) -> dict[str, float]:
    admit(runner, rows, context, sampling)
    graph = guess(runner, rows, context, guesses)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    end.synchronize()
    graph_ms = begin.elapsed_time(end) / steps
    flights, gaps, host, behind = [], [], 0.0, 0.0
    begun = time.perf_counter()
    for i in range(steps):
        start = min(context + 1 + i * (guesses + 1), context + ROOM - 20)
        at = time.perf_counter()
        flights.append(runner.launch(plan(i, rows, start, guesses=guesses)))
        host += time.perf_counter() - at
        if len(flights) == 2:
            flight = flights.pop(0)
            if isinstance(flight, Flight):
                flight.end.synchronize()
            at = time.perf_counter()
            gaps.append(runner.finish(flight).gap)
            behind += time.perf_counter() - at
    runner.finish(flights.pop(0))
    step_ms = (time.perf_counter() - begun) / steps * 1e3
    spec, config = runner.steps.model.spec, runner.config
    limits = Limits(spec, config.quantization or spec.quantization, config.kv_dtype("bfloat16"))
    return {
        "bs": rows,
        "graph_ms": round(graph_ms, 4),
        "step_ms": round(step_ms, 4),
        "step_gap_ms": round(sorted(gaps)[len(gaps) // 2] * 1e3, 4),
        "launch_us": round(host / steps * 1e6, 1),
        "finish_us": round(behind / (steps - 1) * 1e6, 1),
        "floor_ms": round(limits.read([context] * rows) / runner.shard.size * 1e3, 4),
    }


def profile_decode(runner: CudaRunner, rows: int, context: int, trace: Path | None) -> dict[str, Any]:
    admit(runner, rows, context, DRAWN)
    size = next(size for size in runner.graphs.sizes if size >= rows)
    return profile(runner, runner.graphs._graphs[size].replay, Load(rows, context, 0), trace)


def profile_guesses(runner: CudaRunner, guesses: int, context: int, trace: Path | None) -> dict[str, Any]:
    """The graph of one row that verifies so many guesses, all of which are there."""
    admit(runner, 1, context, DRAWN)
    graph = guess(runner, 1, context, guesses)
    found = profile(runner, graph.replay, Load(guesses + 1, context, 0), trace)
    return {"guesses": guesses} | found


def profile_prompt(
    runner: CudaRunner, rows: int, context: int, tokens: int, history: int, trace: Path | None
) -> dict[str, Any]:
    """A prompt of ``tokens`` behind a ``history``, and decode rows beside it."""
    if rows:
        admit(runner, rows, context, DRAWN)
    row = NewRow(
        slot=rows,
        tokens=ints(np.arange(history + tokens)),
        prompt_len=history + tokens,
        pages=pages_of(runner, rows * 120, -(-(history + tokens) // 16)),
        sampling=RowSampling(),
    )
    step = StepPlan(
        step=0,
        slots=ints(np.arange(rows + 1)),
        starts=ints([context] * rows + [history]),
        q_lens=ints([1] * rows + [tokens]),
        flags=bytes([SAMPLE]) * (rows + 1),
        new=[row],
    )
    found = profile(runner, lambda: runner.execute(step), Load(rows, context, tokens), trace)
    return {"history": history} | found


def profile(
    runner: CudaRunner, body: Callable[[], object], load: Load, trace: Path | None, repeat: int = 5
) -> dict[str, Any]:
    """``ms``: without the profiler, calls back to back; the rest is ``timeline.table`` of one call."""
    body()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        body()
    end.record()
    end.synchronize()
    ms = round(begin.elapsed_time(end) / repeat, 3)
    ranks, times = runner.shard.size, 3 if runner.shard.size > 1 else 1
    launches = timeline.record(lambda: [body() for _ in range(times)], trace)
    steps = launches[len(launches) // times * (times - 1) :]  # ranks do not begin the first one together
    return {
        "w": "profile",
        **load._asdict(),
        "ms": ms,
        **timeline.table(steps, runner.steps.model.spec, load, ranks),
    }


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
    parser.add_argument("--steps", type=int, default=100, help="of a measurement")
    parser.add_argument("--top-k", type=int, default=20, help="of the rows that are measured again")
    parser.add_argument("--top-p", type=float, default=0.95, help="of the same rows")
    parser.add_argument("--guesses", default="", help="of n-grams, in further measurements")
    parser.add_argument("--profile", action="store_true", help="where a step goes, too")
    parser.add_argument(
        "--prompts",
        default="0+4096,64+700",
        help="with --profile: decode rows + tokens of a prompt, @ what it has behind it",
    )
    parser.add_argument("--traces", type=Path, help="with --profile: a folder to keep them in")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--own-peer", action="store_true", help="with --tp 2: one GPU, see own_peer.py")
    parser.add_argument("--table", type=Path, help="lines that count in place of the card's (see tune.py)")
    args = parser.parse_args()
    if args.own_peer:
        setattr(gpus, "join_gpus", join_alone)  # noqa: B010
    if args.tp == 1 or args.own_peer:
        run(0, args, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), args.tp)


def profile_all(
    runner: CudaRunner,
    base: dict[str, Any],
    batches: list[int],
    args: argparse.Namespace,
) -> None:
    def trace(name: str) -> Path | None:
        if args.traces is None:
            return None
        args.traces.mkdir(parents=True, exist_ok=True)
        path: Path = args.traces / f"{base['model']}-{name}.json"
        return path

    for rows in batches:
        found = profile_decode(runner, rows, args.context, trace(f"decode-{rows}"))
        lines.emit(base | found)
    for guesses in map(int, filter(None, args.guesses.split(","))):
        lines.emit(base | profile_guesses(runner, guesses, args.context, trace(f"guesses-{guesses}")))
    for name in filter(None, args.prompts.split(",")):
        sizes, _, history = name.partition("@")
        rows, tokens = map(int, sizes.split("+"))
        found = profile_prompt(runner, rows, 1150, tokens, int(history or 0), trace(f"prompt-{name}"))
        lines.emit(base | found)


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank. What others than the first tell is where their steps go: who waits in a sum waits for one of
    them."""
    shown = sys.stdout
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    begun = time.perf_counter()
    guessed = [int(count) for count in args.guesses.split(",") if count]
    extra = json.loads(args.extra)
    if guessed:
        extra |= {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": max(guessed)}
    batches = list(map(int, args.batches.split(",")))
    if max(batches) > ROWS:
        extra = {"max_running_requests": max(batches)} | extra
    source = open_source(args.model, "dummy")
    longest = read_decoder(source.config).context_len
    if args.context + ROOM > longest:
        raise SystemExit(f"--context {args.context}: it is {longest - ROOM} at most with this model")
    config = Config(
        model=args.model,
        device="cuda",
        load_format="dummy",
        context_length=min(longest, max(8192, args.context + 1024)),
        attention_backend=args.backend,
        tp=args.tp,
        **extra,
        quantization=args.quantization,
    )
    if args.table:
        table = tuning.Table(
            msgspec.json.decode(line, type=tuning.Line) for line in args.table.read_bytes().splitlines()
        )
        setattr(tuning, "table_of", lambda card: table)  # noqa: B010
    runner = CudaRunner(config, source, rank, args.tp, folder, lambda progress: None)
    base = {
        "bench": "step",
        "machine": lines.gpus(1 if args.own_peer else args.tp),
        "torch": torch.__version__,
        "model": Path(args.model).name,
        "context": args.context,
    }
    if args.quantization:
        base["quantization"] = args.quantization
    if args.table:
        base["table"] = args.table.stem
    if args.own_peer:
        base["own_peer"] = True
    start = {
        "s": round(time.perf_counter() - begun, 2),
        "timings": runner.facts.timings,
        "notes": runner.facts.notes,
        "ledger": runner.facts.ledger,
    }
    lines.emit(base | {"w": "startup"} | start)
    with torch.inference_mode():
        for rows in batches:
            lines.emit(base | measure(runner, rows, args.context, DRAWN, args.steps))
            cut = {"top_k": args.top_k, "top_p": args.top_p}
            sampling = msgspec.structs.replace(DRAWN, **cut)
            lines.emit(base | cut | measure(runner, rows, args.context, sampling, args.steps))
            for guesses in guessed:
                found = measure(runner, rows, args.context, DRAWN, args.steps, guesses)
                lines.emit(base | {"guesses": guesses} | found)
        if args.profile:
            sys.stdout = shown
            profile_all(runner, base | ({"rank": rank} if args.tp > 1 else {}), batches, args)
    if args.tp > 1:
        sys.stdout.flush()
        os._exit(0)  # without asking the other ranks


if __name__ == "__main__":
    main()

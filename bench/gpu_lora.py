"""Decode steps of the CUDA runner whose rows have adapters, as graphs: one JSON line a measurement.

    python bench/gpu_lora.py --model bench/models/qwen3-8b [--modules attention|all] [--rank 16] [--rows 64]
        [--timeline] [--prompts] [--sweep SECONDS [--variants BEGIN]] [--alone]

``base``: the graph of steps without adapters, as on a server without them. The others: rows of one adapter,
and of up to as many as there are rows, in graphs that compute rows of one adapter together and in those that
take them apart. ``above`` is their share of the base's time. ``--timeline``: the kernels of the adapters by
name, and what a step's other kernels take. ``--prompts``: steps in which three rows read prompts of 128
tokens beside the others. ``--sweep``: other kernels, and sizes of their tiles, or those of them whose names
begin so, each kind for so long; rounding flips some of the tokens that are drawn. ``--alone``: nothing but
these kernels of 36 layers, each row with an adapter of its own.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lines
import numpy as np
import timeline
import torch
from lora import ATTENTION, MLP
from step import DRAWN, admit, plan

from sgla.config import Config
from sgla.kernels.lora import Rows, Stack, Tiles, tiles_of
from sgla.kernels.triton import lora as kernels
from sgla.loading.source import open_source
from sgla.messages import SAMPLE
from sgla.worker import gpu_adapters
from sgla.worker.cuda import CudaRunner
from sgla.worker.gpu_adapters import AdaptedPrompts
from sgla.worker.graphs import Capture
from sgla.worker.prompt_graphs import Which

CONTEXT = 640


def runner_of(args: argparse.Namespace, modules: tuple[str, ...]) -> CudaRunner:
    config = Config(
        model=args.model,
        device="cuda",
        load_format="dummy",
        context_length=2048,
        max_running_requests=args.rows,
        enable_lora=True,
        max_loras=args.rows,
        max_lora_rank=args.rank,
        lora_target_modules=list(modules),
    )
    runner = CudaRunner(config, open_source(args.model, "dummy"), 0, 1, "", lambda progress: None)
    assert runner.adapters is not None
    with torch.inference_mode():
        runner.adapters.adapters.memory.normal_(std=0.01)
    return runner


def set_places(runner: CudaRunner, places: list[int]) -> None:
    """Rows whose history nobody computed, with these adapters."""
    admit(runner, len(places), CONTEXT, DRAWN)
    slots = np.arange(len(places))
    table = runner.steps.tables
    table.host.place[slots] = places
    assert table.place is not None
    table.place[: len(places)] = torch.tensor(places, dtype=torch.int32, device="cuda")
    runner.execute(plan(1, len(places), CONTEXT + 1))


def graph_ms(graph: torch.cuda.CUDAGraph, steps: int = 50) -> float:
    """The best of three times of a replay, back to back."""
    graph.replay()
    found = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / steps)
    return round(min(found), 4)


def kernels_of(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """Microseconds from the end of all kernels before to its own end, and how many there are, by name; and
    the kernels of one layer in the middle, in their order."""
    graph.replay()
    torch.cuda.synchronize()
    launched = timeline.record(graph.replay)
    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    order, last = [], launched[0].begin
    for name, begin, end in launched:
        short = name.removeprefix("void ").split("(")[0][:40]
        spent[short][0] += 1
        spent[short][1] += max(0.0, end - last)
        order.append([short, round(begin - launched[0].begin, 1), round(end - begin, 1)])
        last = max(last, end)
    middle = len(order) // 2
    rows = {
        name: [count, round(us, 1)] for name, (count, us) in sorted(spent.items(), key=lambda e: -e[1][1])
    }
    return {"kernels": rows, "middle": order[middle : middle + 26]}


class Other:
    """A kernel with other options."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **given: self.kernel[grid](*args, **given | self.options)


@contextmanager
def changed(changes: dict[tuple[Any, str], Any]) -> Iterator[None]:
    kept = {place: getattr(*place) for place in changes}
    for place, value in changes.items():
        setattr(*place, value)
    try:
        yield
    finally:
        for place, value in kept.items():
            setattr(*place, value)


PROMPTS, READ = 3, 128  # rows that read prompts, and tokens of each


class PromptStep:
    """The graph of a step that reads prompts beside decode rows."""

    def __init__(self, runner: CudaRunner, rows: int) -> None:
        self.runner, self.slots = runner, np.arange(rows, dtype=np.int32)
        self.q_lens = np.ones(rows, np.int32)
        self.q_lens[-PROMPTS:] = READ
        self.starts = np.where(self.q_lens > 1, 0, CONTEXT + 2).astype(np.int32)
        size = next(n for n in runner.prompts.tokens if n >= self.q_lens.sum())
        self.sizes = runner.prompts._pair(rows - PROMPTS, size)

    def ms(self, places: list[int]) -> float:
        """Of rows with these adapters."""
        prompts = self.runner.prompts
        set_places(self.runner, places)
        flags = np.full(len(self.slots), SAMPLE, np.uint8)
        prompts.run(self.slots, self.starts, self.q_lens, flags)
        return graph_ms(prompts._graphs[Which(*self.sizes, False, any(places))], 20)

    def capture(self) -> None:
        """Anew."""
        prompts, adapted = self.runner.prompts, self.runner.steps.adapted
        assert adapted is not None
        prompts._adapted = AdaptedPrompts(adapted, prompts.limit, prompts._samples(prompts._steps.rows), 2)
        self.runner.steps.forward._programs.clear()
        self.runner.steps.forward._records.clear()
        which = Which(*self.sizes, False, True)
        prompts._forward(*which)
        prompts._graphs[which] = Capture()(partial(prompts._forward, *which))


def cuts() -> dict[str, tuple[int, Any]]:
    """Rows of a tile, and how their kernels take it."""
    few, some, many = (kernels.CUTS[size] for size in (kernels.FEW, kernels.SOME, kernels.MANY))
    return {
        "64 rows": (64, many),
        "8 rows": (8, few),
        "16 rows, 512 wide": (16, some._replace(outputs=512)),
        "16 rows, 128 wide": (16, some._replace(outputs=128)),
        "16 rows, 4 splits": (16, some._replace(splits=4)),
        "32 rows": (32, some._replace(outputs=128, warps=4)),
        "64 rows, 4 splits": (64, many._replace(splits=4)),
        "8 rows, 256 wide": (8, few._replace(outputs=256)),
    }


def prompt_steps(runner: CudaRunner, rows: int, base: dict[str, Any], seconds: float) -> None:
    """Of rows of the base, of one adapter, of five and of as many as there are rows; for so many seconds with
    other tiles."""
    begun, step = time.perf_counter(), PromptStep(runner, rows)
    lines.emit(base | {"w": "prompts", "adapters": "base", "ms": step.ms([0] * rows)})

    def tell(name: str) -> None:
        found = {n: step.ms([1 + i % n for i in range(rows)]) for n in (1, 5, rows)}
        lines.emit(base | {"w": "prompts", "variant": name, "ms": found})

    tell("as it is")
    for name, (size, cut) in cuts().items():
        if time.perf_counter() - begun > seconds:
            print("sweep: no time for", name, flush=True)
            continue
        sizes = {(kernels, "CUTS"): kernels.CUTS | {size: cut}, (gpu_adapters, "SOME"): size}
        with changed(sizes):
            step.capture()
            tell(name)


def variants() -> dict[str, dict[tuple[Any, str], Any]]:
    def tiles(x: Any, stack: Stack, rows: Rows, sampled: bool, there: bool = False) -> torch.Tensor:
        return kernels._shrunk(x, stack, rows.tiles[sampled], len(stack.sizes), there)

    return {
        "as it is": {},
        "apart": {},
        "apart, tiles shrink": {(kernels, "_shrunk_rows"): tiles},
        "apart, 128 added": {(kernels, "ADDED"): 128},
        "apart, 512 added": {(kernels, "ADDED"): 512},
        "apart, 128 wide": {(kernels, "APART"): 128},
        "apart, 512 shrunk": {(kernels, "ALONE"): 512},
        "apart, 2048 shrunk": {(kernels, "ALONE"): 2048},
        "apart, 2 warps expand": {(kernels, "_expand_row"): Other(kernels._expand_row, num_warps=2)},
        "apart, 2 warps add": {(kernels, "_expand_added"): Other(kernels._expand_added, num_warps=2)},
        "apart, 64 wide where gated": {(kernels, "GATED"): 64},
        "128 added": {(kernels, "ADDED"): 128},
    }


LAYERS = 36
PRODUCTS = {
    "gate and up": (4096, [12288, 12288]),
    "q, k and v": (4096, [4096, 1024, 1024]),
    "down": (12288, [4096]),
}


class Layers:
    """The kernels of ``LAYERS`` layers of k inputs, whose parts have these sizes."""

    def __init__(self, rows: int, rank: int, k: int, sizes: list[int]) -> None:
        self.x, self.y = (torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for n in (k, sum(sizes)))
        self.stacks, end = list[Stack](), 0
        for _ in range(LAYERS):
            self.stacks.append(Stack(rows, k, sizes, end))
            end = self.stacks[-1].last
        memory = torch.zeros(rows, rank, end, dtype=torch.bfloat16, device="cuda")
        for stack in self.stacks:
            stack.bounds = stack.bounds.cuda()
            stack.lie(memory)
        places = np.arange(1, rows + 1, dtype=np.int32)
        order, runs = (torch.from_numpy(part).cuda() for part in tiles_of(places, kernels.FEW))
        self.rows = Rows()
        self.rows.tiles = (Tiles(order, runs, kernels.FEW),) * 2
        self.bytes = {"shrink": 2 * rows * rank * len(sizes) * k, "expand": 2 * rows * rank * sum(sizes)}

    def shrink(self) -> None:
        for stack in self.stacks:
            kernels.shrink(self.x, stack, self.rows, False)

    def expand(self) -> None:
        inner = kernels.shrink(self.x, self.stacks[0], self.rows, False)
        for stack in self.stacks:
            kernels.expand(self.y, inner, stack, self.rows, False)


def alone(args: argparse.Namespace, base: dict[str, Any]) -> None:
    for layer, (k, sizes) in PRODUCTS.items():
        layers = Layers(args.rows, args.rank, k, sizes)
        for kernel, run in (("shrink", layers.shrink), ("expand", layers.expand)):
            us = graph_ms(Capture()(run), 10) * 1e3 / LAYERS
            told = {"w": "alone", "kernel": kernel, "layer": layer, "us": round(us, 2)}
            lines.emit(base | told | {"tb_s": round(layers.bytes[kernel] / us / 1e6, 2)})


def sweep(
    runner: CudaRunner, rows: int, base: dict[str, Any], without: float, seconds: float, begin: str
) -> None:
    """One row of places for each, in graphs of their own."""
    begun, adapted, tokens = time.perf_counter(), runner.steps.adapted, dict[str, torch.Tensor]()
    assert adapted is not None
    for name, changes in variants().items():
        if not name.startswith(begin):
            continue
        if time.perf_counter() - begun > seconds:
            print("sweep: no time for", name, flush=True)
            continue
        step = partial(runner.graphs._forward_adapted, adapted, rows, apart=name.startswith("apart"))
        try:
            with changed(changes):
                runner.steps.forward._programs.clear()
                runner.steps.forward._records.clear()
                step()  # compiles
                graph = Capture()(step)
        except Exception as error:
            print("sweep:", name, repr(error)[:300], flush=True)
            continue
        found = {}
        for kind, places in (("one", [1] * rows), ("each", list(range(1, rows + 1)))):
            set_places(runner, places)
            found[kind] = round(graph_ms(graph, 30) / without - 1, 4)
            drawn = runner.graphs.out[:rows].clone()
            same = (drawn == tokens.setdefault(kind, drawn)).float().mean()
            found[f"{kind}, same tokens"] = round(float(same), 3)
        lines.emit(base | {"w": "sweep", "variant": name, "above": found})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--modules", choices=["attention", "all"], default="attention")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--sweep", type=float, default=0, help="seconds, at most")
    parser.add_argument("--variants", default="", help="with --sweep: those whose names begin so")
    args = parser.parse_args()
    modules = ATTENTION if args.modules == "attention" else ATTENTION + MLP
    base = {"bench": "gpu_lora", "modules": args.modules, "rank": args.rank, "rows": args.rows}
    if args.alone:
        with torch.inference_mode():
            alone(args, base)
        return
    runner = runner_of(args, modules)
    with torch.inference_mode():
        rows, graphs = args.rows, runner.graphs
        set_places(runner, [0] * rows)
        without = graph_ms(graphs._graphs[rows])
        lines.emit(base | {"w": "step", "adapters": "base", "ms": without})
        kinds = {
            "none, in their graph": [0] * rows,
            "one": [1] * rows,
            "four": [1 + i % 4 for i in range(rows)],
            "a quarter": [1 + i % max(1, rows // 4) for i in range(rows)],
            "half": [1 + i % max(1, rows // 2) for i in range(rows)],
            "each": list(range(1, rows + 1)),
        }
        for kind, places in kinds.items():
            set_places(runner, places)
            for how, adapted in (("together", graphs._adapted), ("apart", graphs._apart)):
                if rows not in adapted:
                    continue
                ms = graph_ms(adapted[rows], 30)
                above = round(ms / without - 1, 4)
                lines.emit(base | {"w": "step", "adapters": kind, "graph": how, "ms": ms, "above": above})
                if args.timeline and (kind, how) in (("one", "together"), ("each", "apart")):
                    lines.emit(base | {"w": "timeline", "adapters": kind, **kernels_of(adapted[rows])})
        if args.timeline:
            lines.emit(base | {"w": "timeline", "adapters": "base", **kernels_of(graphs._graphs[rows])})
        if args.prompts:
            prompt_steps(runner, rows, base, args.sweep)
        if args.sweep:
            sweep(runner, rows, base, without, args.sweep, args.variants)


if __name__ == "__main__":
    main()

"""What adapters cost, through the Python Engine: one JSON line a measurement.

    python bench/lora.py --model bench/models/qwen3-8b [--rank 16] [--modules attention|all] [--loaded 2000]
        [--parts steps,cold,crowd,varied]

``steps``: of 64 rows of 512 tokens in and 256 out, as W5 of ``offline.py``: a server without adapters, then
one with: rows of the base, of one adapter, of 64 different ones. ``cold``: the time to the first token of an
adapter that is in the host's memory, not on the device, and of one whose files are still to be read.
``crowd``: of ``--loaded`` adapters in the host's memory requests choose with equal odds or by Zipf's law,
beside the same requests for five of them, by turns, 64 rows at a time; the device has places for 128. Its
lines tell of the best turn, what steps took that read prompts, and the others; ``below_five``: by how much
fewer requests a second than five adapters in the same turn, the median. ``varied``: the same with outputs of
64 to 192 tokens, so that requests begin one by one. All adapters of a run are the same file, written here
with random values, and share the memory of four that were read, but for those of ``cold`` whose files are
still to be read.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any

import lines
import torch
from safetensors.torch import save_file

from sgla import Engine, SamplingParams
from sgla.config import Config
from sgla.device import platform
from sgla.executor import procs
from sgla.messages import StepResult
from sgla.model.read import read_decoder
from sgla.sched.core import Core
from sgla.worker.adapters import AdapterStore

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ROWS, PROMPT, OUTPUT = 64, 512, 256
TURNS = 3  # of each kind of odds
COLD = 6  # adapters that are not on the device
READ, FRESH = 4, "fresh"  # files that are read, whose memory the others share; a folder of its own each time


def write_adapter(folder: Path, config: dict[str, Any], rank: int, modules: tuple[str, ...]) -> int:
    """Returns the bytes of its file."""
    spec = read_decoder(config)
    tensors = {}
    for i, layer in enumerate(spec.attention):
        heads, kv_heads = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        sizes = {
            "q_proj": (heads, spec.hidden),
            "k_proj": (kv_heads, spec.hidden),
            "v_proj": (kv_heads, spec.hidden),
            "o_proj": (spec.hidden, heads),
            "gate_proj": (spec.intermediate, spec.hidden),
            "up_proj": (spec.intermediate, spec.hidden),
            "down_proj": (spec.hidden, spec.intermediate),
        }
        for module in modules:
            n, k = sizes[module]
            part = "self_attn" if module in ATTENTION else "mlp"
            name = f"base_model.model.model.layers.{i}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, k).mul_(k**-0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = torch.randn(n, rank).mul_(0.01).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return (folder / "adapter_model.safetensors").stat().st_size


class Bench:
    def __init__(self, args: argparse.Namespace, **settings: Any) -> None:
        common = {"load_format": "dummy", "context_length": 2048, "device": args.device}
        self.engine = Engine(args.model, **common | json.loads(args.extra) | settings)
        facts = self.engine._ready().ingress.facts
        assert facts is not None
        self.vocab, self.random = facts.vocab_size, random.Random(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self.random.randrange(10, self.vocab) for _ in range(length)] for _ in range(count)]

    def seconds(self, names: list[str | None], output: int | list[int], length: int = PROMPT) -> float:
        """That a request of each name takes, all at once. ``output``: tokens of all, or of each."""
        outputs = output if isinstance(output, list) else [output] * len(names)
        params = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True) for n in outputs]
        prompts = self.prompts(len(names), length)
        begun = time.perf_counter()
        self.engine.generate(prompts, params, lora_path=names)
        return time.perf_counter() - begun

    def step_ms(self, names: list[str | None]) -> float:
        """A decode step of a row of each name: the best of three."""
        self.seconds(names, 2)
        found = [self.seconds(names, OUTPUT) - self.seconds(names, 1) for _ in range(3)]
        return round(min(found) / (OUTPUT - 1) * 1e3, 4)


def steps(bench: Bench, base: dict[str, Any], without: float) -> None:
    kinds: dict[str, list[str | None]] = {
        "base rows": [None] * ROWS,
        "one adapter": ["a0"] * ROWS,
        "64 adapters": [f"a{i}" for i in range(ROWS)],
        "32 adapters, 32 base rows": [f"a{i}" if i % 2 else None for i in range(ROWS)],
    }
    for kind, names in kinds.items():
        ms = bench.step_ms(names)
        lines.emit(base | {"w": "step", "rows": kind, "ms": ms, "above_base": round(ms / without - 1, 4)})


def cold(bench: Bench, base: dict[str, Any], folder: Path) -> None:
    """The device's 64 places are full, and the adapter is in the host's memory, or only in its file."""
    warm = min(bench.seconds([None], 1, 32) for _ in range(5))
    fresh = folder.with_name(FRESH)
    shutil.copytree(folder, fresh)
    found: dict[str, list[float]] = {"ms": [], "from_file_ms": []}
    for i in range(COLD):
        bench.seconds([f"a{n}" for n in range(ROWS)], 1, 32)
        found["ms"].append(bench.seconds([f"a{ROWS + i}"], 1, 32))
        begun = time.perf_counter()
        bench.engine.load_lora_adapter(f"new{i}", str(fresh))
        bench.seconds([f"new{i}"], 1, 32)
        found["from_file_ms"].append(time.perf_counter() - begun)
    middle = {name: round(sorted(times)[len(times) // 2] * 1e3, 2) for name, times in found.items()}
    lines.emit(base | {"w": "cold", **middle, "base_ms": round(warm * 1e3, 2)})


def runner(config: Config, *more: Any) -> Any:
    """In the worker's process. From the fifth on, adapters are those that were read first, under other
    numbers."""
    read, kept = AdapterStore._load, list[int]()

    def load(self: AdapterStore, number: int, folder: Path) -> dict[str, Any]:
        if folder.name == FRESH:
            return read(self, number, folder)
        if len(kept) < READ:
            kept.append(number)
            return read(self, number, folder)
        self._host[number] = self._host[kept[number % READ]]
        return {"content": f"{number}"}

    AdapterStore._load = load  # type: ignore[method-assign]
    return resolve_name(platform(config.device).runner)(config, *more)


class Steps:
    """Seconds of an engine's steps: ``prompts`` of those that read some, ``decodes`` of the others."""

    def __init__(self) -> None:
        self.prompts, self.decodes = list[float](), list[float]()
        retire = Core.retire

        def retired(core: Core, result: StepResult, now: float) -> Any:
            step = core._queues.flights[0]
            if step.rows:
                kind = self.decodes if step.tokens == step.decodes else self.prompts
                kind.append(result.seconds)
            return retire(core, result, now)

        Core.retire = retired  # type: ignore[method-assign, assignment]

    def told(self) -> dict[str, Any]:
        """Since the last call."""
        found = {
            "prompt_steps": len(self.prompts),
            "prompt_s": round(sum(self.prompts), 3),
            "decode_steps": len(self.decodes),
            "decode_s": round(sum(self.decodes), 3),
            "decode_ms": round(1e3 * median(self.decodes or [0.0]), 3),
        }
        self.prompts, self.decodes = [], []
        return found


def crowd(bench: Bench, base: dict[str, Any], loaded: int, varied: bool, told: Steps) -> None:
    """Requests for a few adapters, and for all, with equal odds and by Zipf's law."""
    weights = [1 / (i + 1) for i in range(loaded)]
    choose = {
        "five": lambda: bench.random.randrange(5),
        "uniform": lambda: bench.random.randrange(loaded),
        "zipf": lambda: bench.random.choices(range(loaded), weights)[0],
    }
    outputs: int | list[int] = [64 + i * 7919 % 129 for i in range(4 * ROWS)] if varied else 128
    found: dict[str, list[dict[str, Any]]] = {odds: [] for odds in choose}
    for _ in range(TURNS):
        for odds, pick in choose.items():
            names: list[str | None] = [f"a{pick()}" for _ in range(4 * ROWS)]
            before = bench.engine.stats().adapter_loads
            seconds = bench.seconds(names, outputs, 128)
            loads = bench.engine.stats().adapter_loads - before
            found[odds].append(
                {"requests_per_s": round(len(names) / seconds, 3), "loads": loads} | told.told()
            )
    rates = {odds: [one["requests_per_s"] for one in runs] for odds, runs in found.items()}
    for odds, runs in found.items():
        best = max(runs, key=lambda one: one["requests_per_s"])
        below = median(1 - rate / five for rate, five in zip(rates[odds], rates["five"]))
        more = {"below_five": round(below, 4), "turns": rates[odds]}
        lines.emit(base | {"w": "varied" if varied else "crowd", "odds": odds} | best | more)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", choices=["attention", "all"], default="attention")
    parser.add_argument("--loaded", type=int, default=2000, help="adapters for the crowd")
    parser.add_argument("--parts", default="steps,cold")
    parser.add_argument("--extra", default="{}", help="more settings, as JSON")
    args = parser.parse_args()
    modules = ATTENTION if args.modules == "attention" else ATTENTION + MLP
    config = json.loads((Path(args.model) / "config.json").read_text())
    base = {"bench": "lora", "model": Path(args.model).name, "rank": args.rank, "modules": args.modules}
    parts = args.parts.split(",")
    without = 0.0
    if "steps" in parts:
        plain = Bench(args)
        without = plain.step_ms([None] * ROWS)
        plain.engine.shutdown()
        lines.emit(base | {"w": "step", "rows": "server without adapters", "ms": without})
    procs.runner_of = lambda config: "lora:runner"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "adapter"
        nbytes = write_adapter(folder, config, args.rank, modules)
        crowds = [part for part in parts if part in ("crowd", "varied")]
        count = args.loaded if crowds else ROWS + COLD
        room = {"enable_lora": True, "max_loras": ROWS, "max_lora_rank": args.rank, "max_cpu_loras": 4096}
        room |= {"max_running_requests": ROWS}
        if crowds:
            room |= {"max_loras": 2 * ROWS}
        bench = Bench(args, lora_target_modules=list(modules), **room)
        print("started", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        for i in range(count):
            bench.engine.load_lora_adapter(f"a{i}", str(folder))
            if i == READ - 1:
                base["load_ms"] = round((time.perf_counter() - begun) / READ * 1e3, 2)
        print("loaded", file=sys.stderr, flush=True)
        base |= {"adapter_bytes": nbytes, "loaded": count}
        if "steps" in parts:
            steps(bench, base, without)
        if "cold" in parts:
            cold(bench, base, folder)
        told = Steps()
        for part in crowds:
            crowd(bench, base, args.loaded, part == "varied", told)
        bench.engine.shutdown()


if __name__ == "__main__":
    main()

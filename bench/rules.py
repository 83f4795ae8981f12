"""Decode steps of a CUDA runner whose rows ask for rules: one JSON line for each kind.

    python bench/rules.py --model bench/models/qwen3-0.6b [--rows 64] [--context 640]

``step_ms``: steps as the worker launches them, two in flight. ``launch_us``: what the host does for one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgla.config import Config
from sgla.hub.source import open_source
from sgla.messages import SAMPLE, NewRow, RowSampling, StepPlan, ThinkLimit
from sgla.worker.cuda import CudaRunner

WORDS = [list(range(100 + n, 103 + n)) for n in range(200)]
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias300": {"logit_bias": [(token, 0.5) for token in range(300)]},
    "penalties": {"repetition": 1.1, "frequency": 0.1, "presence": 0.1},
    "words200": {"bad_words": WORDS},
    "thinking": {"thinking": ThinkLimit(100000, 1, 2, True)},
}


def ints(values: object) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def plan(step: int, rows: int, start: int, new: list[NewRow] | None = None) -> StepPlan:
    return StepPlan(
        step=step, slots=ints(np.arange(rows)), starts=ints(np.full(rows, start)), q_lens=ints(np.ones(rows)),
        flags=bytes([SAMPLE]) * rows, new=new or [],
    )  # fmt: skip


def measure(runner: CudaRunner, rows: int, context: int, kind: str, steps: int = 40) -> dict[str, object]:
    rng = np.random.default_rng(0)
    sampling = RowSampling(temperature=0.6, **KINDS[kind])
    pages = -(-(context + 100) // runner.tables.page_size)
    new = [
        NewRow(
            slot=slot, tokens=ints(rng.integers(0, 50000, context + 1)), prompt_len=context // 2,
            pages=ints(1 + slot * pages + np.arange(pages)), sampling=sampling,
        )
        for slot in range(rows)
    ]  # fmt: skip
    begun = time.perf_counter()
    runner.finish(runner.launch(plan(0, rows, context, new)))
    admitted = time.perf_counter() - begun
    for i in range(3):
        runner.execute(plan(i, rows, context + 1))
    torch.cuda.synchronize()
    flights, host, begun = [], [], time.perf_counter()
    for i in range(steps):
        at = time.perf_counter()
        flights.append(runner.launch(plan(i, rows, context + 1 + i)))
        host.append(time.perf_counter() - at)
        if len(flights) == 2:
            runner.finish(flights.pop(0))
    runner.finish(flights.pop(0))
    step_ms = (time.perf_counter() - begun) / steps * 1e3
    return {
        "rules": kind, "rows": rows, "context": context, "step_ms": round(step_ms, 3),
        "launch_us": round(sorted(host)[steps // 2] * 1e6, 1), "admission_ms": round(admitted * 1e3, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="64")
    parser.add_argument("--context", type=int, default=640)
    args = parser.parse_args()
    config = Config(model=args.model, device="cuda", load_format="dummy", context_length=8192)
    runner = CudaRunner(config, open_source(args.model, "dummy"), 0, 1, "", lambda progress: None)
    base = {
        "bench": "rules", "machine": torch.cuda.get_device_name(), "torch": torch.__version__,
        "model": Path(args.model).name, "activations_mib": runner.ledger["activations"] >> 20,
    }  # fmt: skip
    for rows in map(int, args.rows.split(",")):
        for kind in KINDS:
            print(json.dumps(base | measure(runner, rows, args.context, kind)), flush=True)


if __name__ == "__main__":
    main()

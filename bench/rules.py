"""Decode steps of a CUDA runner whose rows ask for rules: as ``step.py``, one JSON line for each kind.

python bench/rules.py --model bench/models/qwen3-0.6b [--rows 64,256] [--context 640]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lines
import step

from sgla.config import Config
from sgla.loading.source import open_source
from sgla.messages import RowSampling, ThinkLimit
from sgla.worker.cuda import CudaRunner

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "300 biases": {"logit_bias": [(token, 0.5) for token in range(300)]},
    "penalties": {"repetition": 1.1, "frequency": 0.1, "presence": 0.1},
    "200 words": {"bad_words": [[token, token + 1, token + 2] for token in range(200)]},
    "thinking": {"thinking": ThinkLimit(100_000, 1, 2, True)},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--context", type=int, default=640)
    args = parser.parse_args()
    config = Config(model=args.model, device="cuda", load_format="dummy", context_length=8192)
    runner = CudaRunner(config, open_source(args.model, "dummy"), 0, 1, "", lambda progress: None)
    base = {
        "bench": "rules",
        "machine": lines.gpus(),
        "model": Path(args.model).name,
        "context": args.context,
        "activations_mib": runner.facts.ledger["activations"] >> 20,
    }
    for rows in map(int, args.rows.split(",")):
        for kind, rules in KINDS.items():
            sampling = RowSampling(temperature=0.6, **rules)
            found = step.measure(runner, rows, args.context, sampling, 40)
            lines.emit(base | {"rules": kind} | found)


if __name__ == "__main__":
    main()

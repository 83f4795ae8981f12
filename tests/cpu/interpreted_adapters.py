"""Rows of several adapters on the runner of a GPU (``interpreted_gpu.py``), whose graphs run as what they
were captured from, and on that of the CPU: prints what both answer, and how often graphs of each kind have
run.

``python interpreted_adapters.py [MODEL]``: one of ``MODELS``, the first if none is named."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from adapters import invent
from config_cases import qwen3_next
from interpreted_drafts import Capture
from interpreted_gpu import DECODER, become_gpu, shown, source
from msgspec.structs import replace
from tiny import VOCAB, make_core, run, submit, tiny_config

from sgla.kernels.triton import attention
from sgla.messages import Submit
from sgla.worker import gpu_model, gpu_setup
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner

MODELS = {
    "dense": DECODER,
    "hybrid": qwen3_next(num_hidden_layers=3, full_attention_interval=2, vocab_size=VOCAB),
}
RANKS = 6, 1, 3, 2  # of the adapters
SETTINGS = {
    "enable_lora": True,
    "max_loras": len(RANKS),
    "max_lora_rank": 6,
    "max_running_requests": 10,
}


def requests() -> list[Submit]:
    """Ten rows of four adapters and the base, one of which is longer than the others."""
    numbers = (1, 2, 3, 4, 0, 1, 0, 3, 2, 1)
    asked = [submit(str(i), [5, 9, i], 12 if i == 9 else 8, logprobs=0) for i in range(len(numbers))]
    return [replace(one, adapter=n, namespace=str(n)) for one, n in zip(asked, numbers)]


def answers(make: Callable[..., Any], model: str, **settings: Any) -> tuple[dict[str, Any], Counter[str]]:
    files = source(Path("."), MODELS[model])
    runner = make(tiny_config(**SETTINGS | settings), files, 0, 1, "", lambda _: None)
    for number, rank in enumerate(RANKS, 1):
        invent(runner, number, rank)
    ran = Counter[str]()
    for kind in ("_graphs", "_adapted", "_apart") if "device" in settings else ():
        graphs = getattr(runner.graphs, kind)
        for size, graph in graphs.items():

            def replay(graph: Any = graph, kind: str = kind) -> None:
                ran[kind] += 1
                graph.replay()

            graphs[size] = SimpleNamespace(replay=replay)
    core = make_core(runner.facts, adapters=runner.facts.adapters)
    return shown(run(runner, requests(), core)), ran


def main() -> None:
    torch.manual_seed(0)
    model = sys.argv[1] if len(sys.argv) > 1 else "dense"
    found: dict[str, Any] = {"cpu": answers(cpu_runner, model)[0]}
    become_gpu()
    gpu_model.rehearse, gpu_setup.Capture = (lambda *args: None), Capture  # type: ignore[assignment, misc]
    attention.splits_for = lambda *args: 1
    found["gpu"], found["ran"] = answers(cuda_runner, model, device="cuda", attention_backend="triton")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

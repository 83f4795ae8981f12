"""A GPU that is full to the brim serves whatever is legal. Each test has a process of its own: what others
have left in torch's caches would count as memory that the runner takes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_runner import plan

from sgla.config import Config
from sgla.errors import OutOfMemory
from sgla.hub.source import ModelSource
from sgla.messages import PROMPT_LOGPROBS, SAMPLE, NewRow, RowSampling
from sgla.sampling.constraints import Masks, Taken

MODEL: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "bench/models/qwen3-0.6b/config.json").read_text()
) | {"num_hidden_layers": 2}
pytestmark = pytest.mark.slow  # .ci/full runs it by itself, since it leaves no memory to other tests
GIB = 1 << 30
ROOM = 5 * GIB  # that others leave of the GPU
SLOTS, STEP, PAGE, LENGTH = 256, 8192, 16, 40000
WORST = RowSampling(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    logprobs=20,
    prompt_logprobs=20,
    logprob_ids=[0],
    frequency=0.1,
    presence=0.1,
    repetition=1.1,
    logit_bias=[(0, 0.1)],
    bad_words=[[0, 1]],
    allowed=list(range(100)),
    grammar="",
)


class Open:
    """Grammars of all rows that let everything through."""

    def __init__(self) -> None:
        self.words = torch.full(
            (SLOTS, -(-MODEL["vocab_size"] // 32)), -1, dtype=torch.int32, pin_memory=True
        )

    def admit(self, new: NewRow) -> None: ...

    def any(self, slots: Any) -> bool:
        return True

    def masks(
        self, slots: Any, positions: Any, device: torch.device, read: Any
    ) -> tuple[Masks, list[tuple[int, str]]]:
        rows = torch.arange(len(slots), dtype=torch.int32, device=device)
        return Masks(rows, self.words[: len(slots)].to(device, non_blocking=True)), []

    def take(self, *args: Any) -> Taken:
        return Taken([], {}, set())


def alone(name: str) -> None:
    """Call a function of this file in a new process."""
    gc.collect()
    torch.cuda.empty_cache()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert not done.returncode, done.stderr[-3000:]


def test_nothing_runs_out() -> None:
    """Prompts in full steps with logprobs, histories, decode rows beside them, all rows at high positions
    with everything that a request may ask for, and steps of all sizes."""
    alone("fill")


def test_a_part_of_the_memory_stays_free() -> None:
    alone("leave")


def full_runner() -> Any:
    """And what takes the memory that it is not to have."""
    from sgla.worker.cuda import CudaRunner

    torch.manual_seed(0)
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - ROOM, dtype=torch.uint8, device="cuda")
    config = Config(device="cuda", load_format="dummy", max_running_requests=SLOTS, step_tokens=STEP)
    source = ModelSource("dummy", Path("."), (), MODEL, {})
    return CudaRunner(config, source, 0, 1, "", lambda progress: None), ballast


def admit(slot: int) -> NewRow:
    """All rows share their history but for the last page of the prompt and what comes behind."""
    whole = LENGTH // PAGE - 1
    pages = np.array([*range(1, 1 + whole), *range(1 + whole + 9 * slot, 10 + whole + 9 * slot)], np.int32)
    tokens = np.random.default_rng(slot).integers(0, 1000, LENGTH).astype(np.int32)
    return NewRow(
        slot=slot, tokens=tokens.tobytes(), prompt_len=LENGTH, pages=[pages.tobytes()], sampling=WORST
    )


def fill() -> None:
    runner, ballast = full_runner()
    facts = runner.facts
    ledger = facts.ledger
    assert facts.context_len == MODEL["max_position_embeddings"]
    assert facts.groups[0].pages > LENGTH // PAGE + 9 * SLOTS
    free, idle = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    assert free < sum(ledger[name] for name in ("activations", "fragments", "reserve")) + (1 << 20)
    torch.cuda.reset_peak_memory_stats()
    runner.constraints = runner.flights._constraints = Open()
    scores = SAMPLE | PROMPT_LOGPROBS
    for start in range(0, LENGTH, STEP):
        count = min(STEP, LENGTH - start)
        runner.execute(plan(0, [(0, start, count, scores)], [admit(0)] if start == 0 else None))
    for slot in range(1, SLOTS):
        runner.execute(plan(0, [(slot, LENGTH - PAGE, PAGE, scores)], [admit(slot)]))
    for i in range(4):
        runner.execute(plan(0, [(slot, LENGTH + i, 1, SAMPLE) for slot in range(SLOTS)]))
    rng = np.random.default_rng(0)
    for n in (STEP, *rng.integers(STEP // 8, STEP, 12).tolist()):
        decodes = int(rng.integers(1, SLOTS - 1))
        rows = [(slot, LENGTH + 4, 1, scores) for slot in range(decodes)]
        half = (n - decodes) // 2
        rows += [(decodes, 0, half, scores), (decodes + 1, LENGTH // 2, n - decodes - half, scores)]
        runner.execute(plan(0, rows))
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    least = torch.cuda.mem_get_info()[0]
    peak = torch.cuda.max_memory_allocated() - idle
    print(ledger, "peak", peak, "free", free, least, "retries", stats["num_alloc_retries"])
    assert stats["num_ooms"] == 0
    assert peak <= ledger["activations"]
    assert least > 0
    del ballast


def leave() -> None:
    from sgla.worker.cuda import CudaRunner

    total = torch.cuda.mem_get_info()[1]

    def make(fraction: float) -> CudaRunner:
        config = Config(
            device="cuda",
            load_format="dummy",
            max_running_requests=8,
            step_tokens=512,
            memory_fraction=fraction,
        )
        source = ModelSource("dummy", Path("."), (), MODEL, {})
        return CudaRunner(config, source, 0, 1, "", lambda progress: None)

    runner = make(0.5)
    assert 0.49 * total < torch.cuda.mem_get_info()[0] < 0.52 * total
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    with pytest.raises(OutOfMemory, match="raise --memory-fraction"):
        make(0.001)


if __name__ == "__main__":
    {"fill": fill, "leave": leave}[sys.argv[1]]()

"""A tiny random model and a driver that runs requests through the scheduler and an executor."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from forked import ForkedExecutor
from msgspec.structs import replace

from sgla.config import Config
from sgla.executor.base import Executor
from sgla.hub.source import ModelSource
from sgla.messages import Delta, Facts, Moved, RowSampling, StepPlan, StepResult, Submit
from sgla.sched.core import Core
from sgla.sched.limits import Limits

VOCAB = 331
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
ENTRIES: dict[str, Any] = {  # some layers keep something beside their windows
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 3000,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "compress_ratios": [0, 4, 128],
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_topk": 32,
    "index_n_heads": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "num_hash_layers": 1,
}


def tiny_source(**changes: Any) -> ModelSource:
    return ModelSource("dummy", Path("tiny"), (), LLAMA | changes, {})


def tiny_config(**changes: Any) -> Config:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_running_requests": 8,
        "step_tokens": 64,
    }
    settings |= {"kv_cache_bytes": 1 << 20, "random_seed": 1, "native_kernels": False}
    return Config(**settings | changes)


def make_core(facts: Facts, *, pages: int = 0, windows: Sequence[int] = (), **changes: Any) -> Core:
    """``pages`` of the first cache group and of the ``windows``, if they are not those of the worker; of a
    memory that groups share there is as much as they take together."""
    first, *others = facts.groups
    if first.slab and pages:
        wanted = [pages, *(windows or [pages] * len(others))]
        slabs = sum(-(-(count - 1) // group.slab) for count, group in zip(wanted, facts.groups))
        first, *others = [replace(group, pages=1 + slabs * group.slab) for group in facts.groups]
    else:
        first = replace(first, pages=pages) if pages else first
        others = [replace(group, pages=pages) for group, pages in zip(others, windows)] or others
    limits: dict[str, Any] = {
        "slots": facts.slots,
        "groups": [first, *others],
        "page_size": facts.page_size,
        "context_len": facts.context_len,
        "step_tokens": facts.step_tokens,
        "hidden": facts.hidden,
        "canvas": facts.canvas,
        "experts": facts.experts,
        "tiers": facts.tiers,
    }
    return Core(Limits(**limits | changes), facts.found)


def submit(rid: str, tokens: list[int], max_new: int, **sampling: Any) -> Submit:
    stop_ids = frozenset(sampling.get("stop_ids", []))
    return Submit(
        rid=rid,
        parent=rid,
        index=0,
        tokens=tokens,
        max_new=max_new,
        stop_ids=stop_ids,
        sampling=RowSampling(**sampling),
    )


class Synchronous:
    """A Runner as an executor that works when it is drained, so plans really are made ahead of results."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def drain(self) -> list[StepResult | Moved]:
        if self.plans:
            return [self.runner.execute(self.plans.popleft()), *self.runner.moved()]
        while not (moved := self.runner.moved()):  # everybody waits for a copy
            time.sleep(0.0005)
        return list(moved)


class Launching:
    """An executor that launches a step when it is planned, unless the one before is held, and finishes it
    when it is drained."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.held = runner, 0
        self._plans: deque[StepPlan] = deque()
        self._flights: deque[Any] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._go_on()

    def drain(self) -> list[StepResult]:
        self._go_on()
        result = self._runner.finish(self._flights.popleft())
        self._go_on()
        return [result]

    def _go_on(self) -> None:
        while self._plans and not (self._flights and self._flights[-1].held):
            self._flights.append(self._runner.launch(self._plans.popleft()))
        if self._flights and self._flights[0].held:
            self._runner.release(self._flights[0])
            self.held += 1


class Transcript(dict[str, list[Delta]]):
    """Deltas by rid."""

    def tokens(self) -> dict[str, list[int]]:
        return {rid: [t for delta in deltas for t in delta.tokens] for rid, deltas in self.items()}

    def finish(self) -> dict[str, str | None]:
        return {rid: deltas[-1].finish for rid, deltas in self.items()}


def _take(core: Core, results: Sequence[StepResult | Moved], transcript: Transcript) -> None:
    for result in results:
        if isinstance(result, Moved):
            core.moved(result)
            continue
        assert result.error is None, result.error
        for delta in core.retire(result, 0.0):
            transcript.setdefault(delta.rid, []).append(delta)


def check_draws(runner: Any) -> None:
    """From now on every draw of the runner's sampler must come out the same with noise on its logits, hundred
    times what rounding gives. Torch's products round otherwise in other batches: tokens may be compared only
    where rounding cannot decide."""
    sample, noise = runner.sampler._sample_row, np.random.default_rng(0)

    def check(logits: Any, *row: Any) -> int:
        shaken = [logits + noise.normal(0, 1e-4, len(logits)).astype(np.float32) for _ in range(2)]
        tokens = {sample(values, *row[:-1], []) for values in shaken}
        token: int = sample(logits, *row)
        assert tokens == {token}, "take another seed: rounding decides a draw of this one"
        return token

    runner.sampler._sample_row = check


def run(
    runner: Any, submits: list[Submit], core: Core | None = None, executor: Any = None, **limits: Any
) -> Transcript:
    """All requests at once through a runner in this thread; ``executor``: of it, if it is no Synchronous
    one."""
    core = core or make_core(runner.facts, **limits)
    executor, transcript = executor or Synchronous(runner), Transcript()
    for request in submits:
        core.offer(request, 0.0)
    while not core.idle:
        while (plan := core.plan(0.0)) is not None:
            executor.submit(plan)
        _take(core, executor.drain(), transcript)
        core.check()
    return transcript


async def run_executor(
    executor: Executor, facts: Facts, submits: list[Submit], core: Any = None, **limits: Any
) -> Transcript:
    """All requests at once through a started executor; ``core``: one that knows it already."""
    core, transcript, done = core or make_core(facts, **limits), Transcript(), asyncio.Event()

    def advance() -> None:
        while (plan := core.plan(0.0)) is not None:
            executor.submit(plan)

    def on_results() -> None:
        _take(core, executor.drain(), transcript)
        advance()
        if core.idle:
            done.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(executor.results_fd(), on_results)
    try:
        for request in submits:
            core.offer(request, 0.0)
        advance()
        await asyncio.wait_for(done.wait(), 60)
    finally:
        loop.remove_reader(executor.results_fd())
    return transcript


async def over_two_ranks(source: ModelSource, submits: list[Submit], **changes: Any) -> Transcript:
    """All requests at once through two processes that share the model."""
    executor = ForkedExecutor(tiny_config(tp=2, **changes), source)
    try:
        return await run_executor(executor, await executor.start(lambda progress: None), submits)
    finally:
        await executor.close()

"""The runner of a model that generates, on an NVIDIA GPU:
state lives on the device, decode steps are graph replays, and results are read a step late.

A step is launched without waiting for the one before it: plans carry no token ids, the token table on the
device does. ``launch`` returns a ``Flight``; once its event has passed, ``finish`` turns it into the
StepResult.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels.rehearsal import compilers
from sgla.messages import SAMPLE, CacheGroup, Facts, Progress, StepCost, StepPlan, StepResult
from sgla.model.base import CausalLM
from sgla.model.load import load_model
from sgla.model.spec import ModelSpec
from sgla.model.state import token_bytes
from sgla.sampling.constraints import Constraints, mask_threads
from sgla.sampling.device import Pending, Scored
from sgla.worker.device_state import upload
from sgla.worker.flights import Flight, Flights
from sgla.worker.gpu_load import choose_kernels, choose_sizes, dtype_of, weights_of
from sgla.worker.gpu_memory import FEWER_ROWS, FEWER_TOKENS, Budget, graph_bytes, within_memory
from sgla.worker.gpu_steps import GpuSteps, Kernels, Sizes
from sgla.worker.graphs import Capture, DecodeGraphs
from sgla.worker.kv import zero_pages
from sgla.worker.memory import mib
from sgla.worker.place import Gpu
from sgla.worker.prompt_graphs import HISTORY, REAL, PromptGraphs
from sgla.worker.runner import Runner
from sgla.worker.state import column
from sgla.worker.warm_up import measure, rehearse, wake_triton, warm_up

STEP_TILE = 256  # tokens of a tile of cuBLAS's fast products
# Tokens of a step that reads prompts beside decode rows, if weights are of more bytes:
# then more steps have more to share.
MIXED, HEAVY = 512, 4 << 30
DECODE_FLAGS = bytes([SAMPLE])


class CudaRunner(Runner):
    """Launches steps. ``steps``: those without a graph, and what all have in common."""

    place: Gpu
    steps: GpuSteps

    def _load(self, config: Config, source: ModelSource) -> None:
        woken = compilers().submit(wake_triton, self.shard.rank)
        spec, dtype = ModelSpec.from_config(source.config), dtype_of(config)
        sizes = choose_sizes(config, spec)
        kernels, self.notes = choose_kernels(config, spec, self.place, sizes)
        self.notes += self.place.notes
        torch.cuda.empty_cache()  # what a runner before in this process had would count as free later only
        self.budget = Budget(weights_of(config, spec, self.place), sizes.step_tokens, sizes.slots)
        self.budget.weights.check(self.place.free())
        begin = partial(self._begin, kernels, sizes, woken, torch.cuda.memory_allocated())
        with self.place.torch, within_memory("loading the weights", self.budget.lighter):
            load_model(
                source,
                dtype,
                config.quantization,
                self.shard,
                sizes.context_len,
                self._report,
                config.random_seed or 0,
                begin,
            )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _begin(
        self, kernels: Kernels, sizes: Sizes, woken: Future[None], before: int, model: CausalLM
    ) -> None:
        """Work with a model whose weights are still to come.
        ``before``: bytes that were allocated before it was made; ``woken``: Triton is ready."""
        made = torch.cuda.memory_allocated()
        with within_memory("allocating the tables of rows", lambda: FEWER_ROWS):
            self.steps = GpuSteps(model, kernels, sizes)
        self.budget.ledger = {"weights": made - before, "tables": torch.cuda.memory_allocated() - made}
        self._captures = kernels.attention.captures
        pool = ThreadPoolExecutor(1, "rehearse")
        self._rehearsal = pool.submit(rehearse, self.steps, woken) if self._captures else None
        pool.shutdown(wait=False)

    def _settle(self, config: Config) -> None:
        with self._phase("kernels"):
            self._report(Progress(phase="compile", message="CUDA kernels"))
            if self._rehearsal is not None:
                with within_memory("rehearsing steps", lambda: FEWER_TOKENS):
                    self._rehearsal.result()
        with self._phase("warmup"), within_memory("measuring steps", lambda: FEWER_TOKENS):
            self._size(config)
        self._report(Progress(phase="warmup", message="graphs"))
        with self._phase("graphs"), within_memory("capturing graphs", self.budget.smaller_pool):
            self._capture()

    def _size(self, config: Config) -> None:
        """Run the largest step once to see what it needs, then give the rest of the memory to the KV pool."""
        steps, vocab = self.steps, self.steps.model.spec.vocab
        page = int(token_bytes(steps.model.state(), steps.kv_dtype) * config.page_size)
        if steps.kv_dtype == "fp8":
            steps.scales = steps.measure_scales()
            self.notes.append(
                "KV cache: e4m3, a scale for k and one for v of each layer, measured on random tokens"
            )
        steps.kv = steps.allocate(1, config.page_size, steps.kv_dtype)
        self.graphs, self.prompts = DecodeGraphs(steps), PromptGraphs(steps)
        peak = measure(steps)
        steps.forget_rows()
        self.constraints = None
        if self.shard.rank == 0:
            self.matchers = Matchers(mask_threads())
            jumps = self.shard.size == 1  # other ranks are told one token a row
            host = steps.tables.host.tokens
            self.constraints = Constraints(host, vocab, self.matchers, jumps=jumps, pin=True)
        self.flights = Flights(steps.tables, steps.sampler, self.constraints)
        pages = self.budget.pool(config, page, peak, self._graph_bytes(peak.prompts))
        with within_memory("allocating the KV cache", self.budget.smaller_pool):
            steps.kv = steps.allocate(pages, config.page_size, steps.kv_dtype)
        context_len = min(steps.context_len, (pages - 1) * config.page_size)
        if context_len < steps.context_len:
            self.notes.append(
                f"context cut from {steps.context_len} to {context_len} tokens, what the KV cache holds"
            )
        self.facts = Facts(
            groups=[CacheGroup(pages, page_bytes=page)],
            page_size=config.page_size,
            slots=steps.slots,
            context_len=context_len,
            vocab_size=vocab,
            step_tokens=steps.step_tokens,
            costs=self._costs(),
            dtype=dtype_of(config),
            device=self.place.device.name,
            ledger=self.budget.ledger,
            notes=self.notes,
            grammars=True,
        )

    def _graph_bytes(self, prompts: int) -> int:
        """What graphs are going to take. ``prompts``: what the largest step takes beside weights and KV."""
        if not self._captures:
            return 0
        largest = max(self.steps.slots, self.prompts.limit)  # tokens of a graph
        count = self.graphs.count + (0 if self.steps.deterministic else len(self.prompts.pairs))
        layers = self.steps.model.spec.layers
        return graph_bytes(count, layers, prompts * largest // max(largest, self.steps.step_tokens))

    def _costs(self) -> list[StepCost]:
        """Steps that run as a graph read prompts more cheaply than larger ones.
        Not those of mixtures; several ranks were not measured."""
        every = StepCost(tokens=self.steps.step_tokens, tile=STEP_TILE)
        if self.steps.deterministic or self.steps.model.spec.moe or self.shard.size > 1:
            return [every]
        limit = self.prompts.limit
        tokens = min(limit, MIXED) if self.budget.ledger["weights"] > HEAVY else limit
        return [StepCost(tokens=tokens, prompts=REAL, longest=HISTORY, tile=STEP_TILE), every]

    def _capture(self) -> None:
        before = self.place.free()
        if self._captures:
            capture = Capture()
            self.graphs.capture(capture)
            if not self.steps.deterministic:
                self.prompts.capture(capture)
            torch.cuda.synchronize()
        self.notes += self.budget.captured(before - self.place.free())
        ledger = self.budget.ledger
        self.notes.append("memory: " + ", ".join(f"{name} {mib(size)}" for name, size in ledger.items()))

    def _warm_up(self) -> None:
        with within_memory("warming up", self.budget.smaller_pool):
            warm_up(self.steps, self.execute)
        self.flights.forget()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Queue the step on the GPU. Waits for nothing."""
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        self.steps.tables.apply(plan, self.steps.sampler)
        if plan.zeroed:
            zero_pages(self.steps.kv, [upload(column(plan.zeroed[0])).long()])
        if self.constraints is not None:
            for new in plan.new:
                self.constraints.admit(new)
        slots, starts = column(plan.slots), column(plan.starts)
        rows = len(slots)
        landed: Tensor | None = None
        scored: list[Scored] = []
        if self._decodes(plan, rows):
            count = rows
            out, landed, pending = self.graphs.run(slots, starts)
        else:
            out, count, scored, pending = self._extend(plan, slots, starts)
        return self.flights.begin(plan, begin, out, count, landed, pending, scored)

    def _decodes(self, plan: StepPlan, rows: int) -> bool:
        """It is a step of decode rows alone, and there is a graph for it."""
        return (
            self._captures
            and rows <= self.graphs.limit
            and plan.flags == DECODE_FLAGS * rows
            and len(plan.q_lens) == 4 * rows
            and int(column(plan.q_lens).max()) == 1
        )

    @torch.inference_mode()
    def release(self, flight: Flight) -> None:
        """Queue the rest of a step that is held. The steps before have been finished."""
        self.flights.release(flight)

    @torch.inference_mode()
    def finish(self, flight: Flight) -> StepResult:
        """The result of a launched step, in order; blocks until it is there."""
        result = self.flights.finish(flight)
        self.profiler.step()
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        flight = self.launch(plan)
        if flight.held:
            self.release(flight)
        return self.finish(flight)

    def _extend(
        self, plan: StepPlan, slots: Any, starts: Any
    ) -> tuple[Tensor, int, list[Scored], Pending | None]:
        """A step with prompt tokens."""
        q_lens, flags = column(plan.q_lens), np.frombuffer(plan.flags, np.uint8)
        graphs = self._captures and not self.steps.deterministic and self.prompts.takes(starts, q_lens, flags)
        if graphs and not self.steps.share_much(slots[q_lens == 1], starts[q_lens == 1]):
            out, count, pending = self.prompts.run(slots, starts, q_lens, flags)
            return out, count, [], pending
        return self.steps.run_eagerly(plan)

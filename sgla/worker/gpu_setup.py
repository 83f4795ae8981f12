"""How a runner on an NVIDIA GPU gets ready behind its weights: it measures what steps need, allocates the KV
pool, captures graphs and runs requests of every kind."""

from __future__ import annotations

from functools import partial

import torch

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.kernels.rehearsal import rehearsing
from sgla.messages import CacheGroup, Facts, Progress, StepCost
from sgla.model.cache_scales import read_scales
from sgla.model.diffusion_gemma_spec import denoising_of
from sgla.model.state import Demand, Pool, whole_heads
from sgla.sampling.constraints import Constraints, mask_threads
from sgla.worker.device_outputs import DeviceOutputs
from sgla.worker.facts import answer_facts, drafts_of
from sgla.worker.flights import Flights
from sgla.worker.forward import compiling
from sgla.worker.gpu_canvases import GpuCanvases, gpu_canvas_bytes
from sgla.worker.gpu_lent import GpuLending
from sgla.worker.gpu_load import dtype_of
from sgla.worker.gpu_memory import FEWER_TOKENS, Peak, graph_bytes, within_memory
from sgla.worker.gpu_model import GpuModel
from sgla.worker.gpu_tiers import ABREAST, GpuMemory, HostTier, by_lanes, open_host, thread_bytes
from sgla.worker.graphs import Capture, DecodeGraphs, TriedCapture, numbers_again
from sgla.worker.kv import memory_of
from sgla.worker.lent import HostLending
from sgla.worker.memory import cache_groups, mib
from sgla.worker.parts import parts_of_units
from sgla.worker.prompt_graphs import HISTORY, REAL, PromptGraphs
from sgla.worker.tier_setup import Units, open_tiers, threaded
from sgla.worker.warm_up import measure, measure_scales, warm_up

STEP_TILE = 256  # tokens of a tile of cuBLAS's fast products
# Tokens of a step that reads prompts beside decode rows, if weights are of more bytes:
# then more steps have more to share.
MIXED, HEAVY = 512, 4 << 30


class GpuSetup(GpuModel):
    """Ready to run steps: ``graphs`` of decode rows and ``prompts`` of mixed steps, if the attention
    ``_captures``; ``flights``, which draw; ``constraints`` on the rank that samples; ``identity`` of the KV
    in tiers, if there are any; ``host``: that in the host's memory; ``outputs``: where these are looked up
    for guesses."""

    host: HostTier | None = None
    outputs: DeviceOutputs | None = None
    canvases: GpuCanvases | None = None  # of a model that writes blocks

    def _settle(self, config: Config) -> None:
        with self._phase("kernels"):
            self._report(Progress(phase="compile", message="CUDA kernels"))
            if self._rehearsal is not None:
                with within_memory("rehearsing steps", lambda: FEWER_TOKENS):
                    self._rehearsal.result()
            if config.enable_torch_compile:
                compiling(self.steps.model, config, self._report)
        with self._phase("warmup"), within_memory("measuring steps", lambda: FEWER_TOKENS):
            self._size(config)
        self._report(Progress(phase="warmup", message="graphs"))
        with self._phase("graphs"), within_memory("capturing graphs", self.budget.smaller_pool):
            self._capture()

    def _size(self, config: Config) -> None:
        """Run the largest step once to see what it needs, then give the rest of the memory to the KV pool."""
        peak = self._measure(config)
        self._make_flights()
        groups, context_len = self._make_pool(config, peak)
        self._open_tiers(groups, context_len)
        self.facts = self._facts(config, groups, context_len)

    def _measure(self, config: Config) -> Peak:
        """With a KV cache of dummy pages."""
        steps = self.steps
        dummies = [1] * len(steps.groups)
        if steps.kv_dtype == "fp8":
            spec, stored = steps.model.spec, steps.model.cache_scales
            given = read_scales(config, spec, self.shard.rank, self.source.config)
            steps.scales = given or stored or measure_scales(steps)
            origin = "of the checkpoint" if stored else "measured on random tokens"
            origin = f"of {config.quantization_param_path}" if given else origin
            self.notes.append(f"KV cache: e4m3, a scale for k and one for v of each layer, {origin}")
        steps.kv = steps.allocate(dummies, config.page_size, steps.kv_dtype)
        self.graphs, self.prompts = DecodeGraphs(steps), PromptGraphs(steps)
        peak = measure(steps)
        steps.forget_rows()
        return peak

    def _make_flights(self) -> None:
        steps, vocab = self.steps, self.steps.model.spec.vocab
        if steps.model.spec.canvas:
            how = denoising_of(self.source.generation_config, self.config.diffusion_config)
            self.canvases = GpuCanvases(steps, how)
            self.budget.ledger["canvas"] = gpu_canvas_bytes(steps.model.spec, steps.slots)
        self.constraints = None
        if self.shard.draws:
            self.matchers = Matchers(mask_threads())
            skip_forced = self.shard.count == 1  # other ranks are told one token a row
            host = steps.tables.host.tokens
            rows = steps.rows
            self.constraints = Constraints(host, vocab, self.matchers, skip_forced, pin=True, rows=rows)
        if steps.drafts is not None and steps.drafts.searches and self.shard.samples:
            answers = steps.drafts.others.answers
            self.outputs = DeviceOutputs(steps.slots + 1, answers, self.shard.pipe)
        labels = self.pooling is None
        self.flights = Flights(steps.tables, steps.sampler, self.constraints, labels)

    def _make_pool(self, config: Config, peak: Peak) -> tuple[list[CacheGroup], int]:
        """The KV pool, and the context that it holds."""
        steps = self.steps
        demand = Demand(steps.slots, steps.step_tokens, config.prefix_cache, config.window_ratio)
        spec, groups = steps.model.spec, steps.groups
        shared = whole_heads(config, spec, steps.state, groups, steps.kv_dtype)
        pool = Pool(groups, config.page_size, demand, shared)
        spare = steps.spare * steps.groups[-1].page_bytes(config.page_size)
        copies = threaded(config) * thread_bytes(pool.page_bytes)
        pages = self.budget.pool(config, pool, peak, self._graph_bytes(peak.prompts), spare, copies)
        if staged := sum(x.nbytes for x in (self._staging, self._handing) if x is not None):
            self.budget.ledger["copies"] = copies + staged
        with within_memory("allocating the KV cache", self.budget.smaller_pool):
            make = None if self.regions is None else self.regions.kv.empty
            units = [*pages[:-1], pages[-1] + steps.spare]
            steps.kv = steps.allocate(units, config.page_size, steps.kv_dtype, make, pool.slab)
            steps.tables.tokens.resize(pages[0])
        if self.chains is not None:
            self.chains.take(steps.kv[steps.own :])
        context_len = min(steps.context_len, pool.one([n - 1 for n in pages]))
        if context_len < steps.context_len:
            self.notes.append(
                f"context cut from {steps.context_len} to {context_len} tokens, what the KV cache holds"
            )
        return cache_groups(pool, pages), context_len

    def _facts(self, config: Config, groups: list[CacheGroup], context_len: int) -> Facts:
        steps = self.steps
        answers = answer_facts(config, steps.model.spec, self.pooling)
        if self.chains is not None:
            answers["drafts"] = min(answers["drafts"], self.chains.most * config.speculative_eagle_topk)
        return Facts(
            groups=groups,
            page_size=config.page_size,
            slots=steps.slots,
            context_len=context_len,
            vocab_size=steps.model.spec.vocab,
            step_tokens=steps.step_tokens,
            costs=self._costs(),
            padded_drafts=config.speculative_adaptive and self.shard.pipe is None,
            searched_drafts=drafts_of(config) > 0 and config.speculative_algorithm == "ngram",
            guided_drafts=True,
            dtype=dtype_of(config),
            device=self.place.device.name,
            ledger=self.budget.ledger,
            adapters=0 if self.adapters is None else self.adapters.adapters.places,
            notes=self.notes,
            media=self.seeing.media,
            untaken=self.seeing.untaken or {},
            speech=self.seeing.speech,
            dictation=self.seeing.dictation,
            **self.copies.facts,
            **answers,
        )

    def _open_tiers(self, groups: list[CacheGroup], context_len: int) -> None:
        """Raises ConfigError and OutOfMemory."""
        config, tensors = self.config, memory_of(self.steps.kv, len(groups))
        if self._staging is not None:
            tier, self.host = open_host(config, self.shard.size, groups, tensors, self._staging)
            self.copies.add_tier(tier, self.host, [b""] * len(groups))
        memory = [GpuMemory(found, self.place.begin_thread) for found in tensors]
        spec, kv = self.steps.model.spec, self.steps.kv
        long, parts = spec.long_ropes(context_len), parts_of_units(kv, spec, len(groups))
        mover = partial(by_lanes, tensors, self._handing, self.place.begin_thread)
        on_gpu = config.kv_transfer_backend == "cuda_ipc"
        lending = GpuLending(self.place.begin_thread) if on_gpu else HostLending()
        units = Units(groups, memory, parts, ["cuda", self.steps.scales], long, mover, lending, ABREAST)
        self.identity = open_tiers(self.copies, config, self.source, self.shard, units)

    def _graph_bytes(self, prompts: int) -> int:
        """What graphs are going to take. ``prompts``: what the largest step takes beside weights and KV."""
        if not self._captures:
            return 0
        largest = max(self.steps.slots, self.prompts.limit)  # tokens of a graph
        count = self.graphs.count + self.prompts.count
        layers = self.steps.model.spec.layers
        if self.chains is not None:
            prompts += self.chains.graph_bytes
        return graph_bytes(count, layers, prompts * largest // max(largest, self.steps.step_tokens))

    def _costs(self) -> list[StepCost]:
        """Steps that run as a graph read prompts more cheaply than larger ones.
        Not those of mixtures, and several ranks gain nothing from them."""
        every = StepCost(tokens=self.steps.step_tokens, tile=STEP_TILE)
        several = self.shard.count > 1 or self.shard.lockstep is not None
        if not self.steps.reads_in_graphs or self.steps.model.spec.moe or several:
            return [every]
        limit = self.prompts.limit
        tokens = min(limit, MIXED) if self.budget.ledger["weights"] > HEAVY else limit
        return [StepCost(tokens=tokens, prompts=REAL, longest=HISTORY, tile=STEP_TILE), every]

    def _capture(self) -> None:
        before = self.place.free()
        if self._captures:
            self._captures = self._captured()
        if self.chains is not None:
            with rehearsing():
                self.chains.rehearse()
            self.chains.capture(Capture())
            if self._captures:
                self.chains.time(self.graphs)
        torch.cuda.synchronize()
        self.notes += self.budget.captured(before - self.place.free())
        ledger = self.budget.ledger
        self.notes.append("memory: " + ", ".join(f"{name} {mib(size)}" for name, size in ledger.items()))

    def _captured(self) -> bool:
        """Whether there are graphs now. What is not made of our ops may do what no graph can."""
        foreign = bool(self.steps.model.unrecorded)
        capture = TriedCapture() if foreign else Capture()
        try:
            self.graphs.capture(capture)
            if self.steps.reads_in_graphs:
                self.prompts.capture(capture)
        except RuntimeError as error:
            if not foreign or isinstance(error, torch.OutOfMemoryError):
                raise
            numbers_again()
            why = str(error).strip().partition("\n")[0][:200]
            self.notes.append(f"no graphs, which costs speed: steps of this model cannot be captured ({why})")
            return False
        return True

    def _warm_up(self) -> None:
        with within_memory("warming up", self.budget.smaller_pool):
            warm_up(self.steps, self.execute)
        self.notes += dict.fromkeys(self.steps.forward.notes)
        self.flights.forget()

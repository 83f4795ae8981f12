"""How a runner on an NVIDIA GPU gets ready: it loads the weights and rehearses steps beside, measures what
steps need, allocates the KV pool, captures graphs and runs requests of every kind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels.rehearsal import compilers, rehearsing
from sgla.loading.load import load_model
from sgla.loading.offload import Offload, copying
from sgla.loading.pooled import load_decoder
from sgla.messages import CacheGroup, Facts, Progress, StepCost
from sgla.model.base import CausalLM
from sgla.model.drafting import draft_bytes, draft_state, read_guessing
from sgla.model.read import read_decoder
from sgla.model.state import Demand, LayerState, Pool
from sgla.quant.weight import Make, anywhere
from sgla.sampling.constraints import Constraints, mask_threads
from sgla.worker.adapters import AdapterStore, places_of
from sgla.worker.chain_setup import load_chains, told_of
from sgla.worker.chains import Chains
from sgla.worker.disk import identity_of
from sgla.worker.facts import answer_facts, drafts_of
from sgla.worker.flights import Flights
from sgla.worker.forward import compiling
from sgla.worker.gpu_adapters import AdapterCopies
from sgla.worker.gpu_load import choose_kernels, choose_sizes, dtype_of, weights_of
from sgla.worker.gpu_memory import FEWER_ROWS, FEWER_TOKENS, Budget, graph_bytes, within_memory
from sgla.worker.gpu_places import Places, open_places
from sgla.worker.gpu_steps import GpuSteps, Kernels, Sizes
from sgla.worker.gpu_tiers import STAGED, HostTier
from sgla.worker.graphs import Capture, DecodeGraphs, TriedCapture
from sgla.worker.kv import memory_of
from sgla.worker.memory import cache_groups, mib
from sgla.worker.place import Gpu
from sgla.worker.pooler import Pooler
from sgla.worker.prompt_graphs import HISTORY, REAL, PromptGraphs
from sgla.worker.region import Region, gpu_memory, let_go
from sgla.worker.runner import Runner
from sgla.worker.tiers import FileTier
from sgla.worker.warm_up import measure, rehearse, wake_triton, warm_up

STEP_TILE = 256  # tokens of a tile of cuBLAS's fast products
# Tokens of a step that reads prompts beside decode rows, if weights are of more bytes:
# then more steps have more to share.
MIXED, HEAVY = 512, 4 << 30


class Regions(NamedTuple):
    """What can be given back while the server sleeps."""

    weights: Region
    kv: Region


class GpuSetup(Runner):
    """Ready to run steps: ``steps`` without a graph, with what all have in common; ``graphs`` of decode rows
    and ``prompts`` of mixed steps, if the attention ``_captures``; ``flights``, which draw; ``constraints``
    on the rank that samples; ``copies`` of adapters, if there are any; ``host``: a tier in its memory;
    ``chains``: of guesses, if a model guesses. ``regions``: None where memory cannot be given back;
    ``fixed``: what weights cannot be changed beside, or ""."""

    place: Gpu
    regions: Regions | None = None
    copies: AdapterCopies | None = None
    tiers: dict[str, HostTier | FileTier]
    chains: Chains | None = None
    steps: GpuSteps

    def _load(self, config: Config, source: ModelSource) -> None:
        woken = compilers().submit(wake_triton, self.shard.rank)
        self.config, self.source = config, source
        spec = read_decoder(source.config)
        sizes = choose_sizes(config, spec, self.pooling)
        kernels, self.notes = choose_kernels(config, spec, self.place, sizes)
        self.notes += self.place.notes
        let_go()
        if (memory := gpu_memory(self.shard.rank)) is not None:
            self.regions = Regions(*(Region(memory, self.place.usage()["total"]) for _ in range(2)))
        torch.cuda.empty_cache()  # what a runner before in this process had would count as free later only
        self._states = config.enable_return_hidden_states
        guessing = None
        if drafts_of(config):
            guessing = read_guessing(config, None if source.draft is None else source.draft.config, spec)
        weights = weights_of(config, spec, self.place)
        weights = weights._replace(beside=draft_bytes(config, guessing, dtype_of(config)))
        self.budget = Budget(weights, sizes.step_tokens, sizes.slots)
        self.budget.weights.check(self.place.free())
        places = places_of(config, dtype_of(config))
        if places is not None:
            self.adapters = AdapterStore(places, self._pin)
            self.copies = AdapterCopies(self.adapters)
        self._staging = None
        if config.kv_host_bytes:
            self._staging = torch.empty(2, STAGED, dtype=torch.uint8, device="cuda")
        kept, before = draft_state(guessing), torch.cuda.memory_allocated()
        begin = partial(self._begin, config, source, kernels, sizes, woken, before, kept)
        with self.place.torch, within_memory("loading the weights", self.budget.lighter):
            layers = self.budget.weights.offloaded.layers
            offload = Offload(layers) if layers else None
            self._load_model(config, source, sizes.context_len, begin, offload)
            if guessing is not None:
                before = torch.cuda.memory_allocated() + self._mapped
                self.chains = load_chains(
                    config, source, guessing, self.place, sizes, self.steps, self._report, self._make
                )
                more = torch.cuda.memory_allocated() + self._mapped - before
                self.budget.ledger["weights"] += more
        beside = (
            ("adapters", self.adapters is not None),
            ("an 8-bit KV cache, whose scales are those of the old ones", config.kv_cache_dtype == "fp8"),
            ("a head for vectors", self.pooling is not None),
            ("what guesses", config.speculative_algorithm is not None),
            ("modules of transformers", self.steps.model.declared is None),
        )
        self.fixed = next((what for what, there in beside if there), "")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if offload is not None:
            self.notes.append(copying(len(layers), spec.layers, offload.nbytes, offload.measure()))

    @property
    def _make(self) -> Make:
        """Where weights lie."""
        return anywhere if self.regions is None else self.regions.weights.empty

    @property
    def _mapped(self) -> int:
        """Bytes of weights that torch's allocator does not know of."""
        return 0 if self.regions is None else self.regions.weights.size

    def _load_model(
        self,
        config: Config,
        source: ModelSource,
        context_len: int,
        begin: Callable[[CausalLM], None],
        offload: Offload | None,
    ) -> None:
        seed, dtype = config.random_seed or 0, dtype_of(config)
        how: dict[str, Any] = {
            "dtype": dtype,
            "quantization": config.quantization,
            "shard": self.shard,
            "context_len": context_len,
            "on_progress": self._report,
            "seed": seed,
            "on_model": begin,
            "make": self._make,
        }
        if self.pooling is None:
            places = None if self.adapters is None else self.adapters.adapters
            load_model(source, offload=offload, adapters=places, **how)
            return
        head = load_decoder(source, self.pooling, **how).head
        self.steps.pooler = Pooler(self.pooling, head, self.steps.slots, self.steps.model.spec.hidden)

    def _begin(
        self,
        config: Config,
        source: ModelSource,
        kernels: Kernels,
        sizes: Sizes,
        woken: Future[None],
        before: int,
        beside: list[LayerState],
        model: CausalLM,
    ) -> None:
        """``load_model`` calls this when it has made the model, whose weights are still to come: tables are
        allocated and steps rehearsed while these load. ``before``: bytes that were allocated before it was
        made; ``woken``: Triton is ready; ``beside``: what the layers of a model keep that guesses."""
        made = torch.cuda.memory_allocated()
        with within_memory("allocating the tables of rows", lambda: FEWER_ROWS):
            places = None if self.adapters is None else self.adapters.adapters
            told = told_of(config, source, model, sizes)
            self.steps = GpuSteps(model, kernels, sizes, places, beside=beside, told=told)
        adapters = 0 if places is None else places.nbytes
        tables = torch.cuda.memory_allocated() - made
        self.budget.ledger = {
            "weights": made - before - adapters + self._mapped,
            "adapters": adapters,
            "tables": tables,
        }
        self._captures = kernels.attention.captures and self.pooling is None
        pool = ThreadPoolExecutor(1, "rehearse")
        self._rehearsal = pool.submit(rehearse, self.steps, woken) if self._captures else None
        pool.shutdown(wait=False)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a thread that reads adapters."""
        torch.cuda.set_device(self.shard.rank)
        return tensor.pin_memory()

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
        steps, vocab = self.steps, self.steps.model.spec.vocab
        dummies = [1] * len(steps.groups)
        if steps.kv_dtype == "fp8":
            stored = steps.model.cache_scales
            steps.scales = stored or steps.measure_scales()
            origin = "of the checkpoint" if stored else "measured on random tokens"
            self.notes.append(f"KV cache: e4m3, a scale for k and one for v of each layer, {origin}")
        steps.kv = steps.allocate(dummies, config.page_size, steps.kv_dtype)
        self.graphs, self.prompts = DecodeGraphs(steps), PromptGraphs(steps)
        peak = measure(steps)
        steps.forget_rows()
        self.constraints = None
        if self.shard.rank == 0:
            self.matchers = Matchers(mask_threads())
            skip_forced = self.shard.size == 1  # other ranks are told one token a row
            host = steps.tables.host.tokens
            self.constraints = Constraints(host, vocab, self.matchers, skip_forced=skip_forced, pin=True)
        labels = self.pooling is None
        self.flights = Flights(steps.tables, steps.sampler, self.constraints, labels)
        pool = Pool(
            steps.groups, config.page_size, Demand(steps.slots, steps.step_tokens, config.prefix_cache)
        )
        pages = self.budget.pool(config, pool, peak, self._graph_bytes(peak.prompts))
        with within_memory("allocating the KV cache", self.budget.smaller_pool):
            make = None if self.regions is None else self.regions.kv.empty
            steps.kv = steps.allocate(pages, config.page_size, steps.kv_dtype, make)
        if self.chains is not None:
            self.chains.take(steps.kv[steps.own :])
        context_len = min(steps.context_len, (pages[0] - 1) * config.page_size)
        if context_len < steps.context_len:
            self.notes.append(
                f"context cut from {steps.context_len} to {context_len} tokens, what the KV cache holds"
            )
        groups = cache_groups(pool, pages)
        places = self._open_places(config, groups, context_len)
        self.tiers = places.by_name
        self.facts = Facts(
            groups=groups,
            page_size=config.page_size,
            slots=steps.slots,
            context_len=context_len,
            vocab_size=vocab,
            step_tokens=steps.step_tokens,
            costs=self._costs(),
            padded_drafts=config.speculative_adaptive,
            dtype=dtype_of(config),
            device=self.place.device.name,
            ledger=self.budget.ledger,
            adapters=0 if self.adapters is None else self.adapters.adapters.places,
            notes=self.notes,
            tiers=places.told,
            found=places.found,
            **answer_facts(config, steps.model.spec, self.pooling),
        )

    def _open_places(self, config: Config, groups: list[CacheGroup], context_len: int) -> Places:
        """Places that keep prefixes. Raises ConfigError and OutOfMemory."""
        tensors = memory_of(self.steps.kv, len(groups))
        layers = self.steps.model.spec.attention
        long = [layer.rope is not None and layer.rope.long(context_len) for layer in layers]
        layout = "cuda", [[tensor.shape[1] for tensor in found] for found in tensors], self.steps.scales
        self.identity = partial(identity_of, config, self.source, layout, long)
        self.begun_as = self.identity()
        return open_places(config, self.place, groups, tensors, self.begun_as, self._staging)

    def close(self) -> None:
        for tier in self.tiers.values():
            if isinstance(tier, FileTier):
                tier.close()

    def _graph_bytes(self, prompts: int) -> int:
        """What graphs are going to take. ``prompts``: what the largest step takes beside weights and KV."""
        if not self._captures:
            return 0
        largest = max(self.steps.slots, self.prompts.limit)  # tokens of a graph
        count = self.graphs.count + (0 if self.steps.deterministic else len(self.prompts.pairs))
        layers = self.steps.model.spec.layers
        if self.chains is not None:
            prompts += self.chains.graph_bytes
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
            if not self.steps.deterministic:
                self.prompts.capture(capture)
        except RuntimeError as error:
            if not foreign or isinstance(error, torch.OutOfMemoryError):
                raise
            why = str(error).strip().partition("\n")[0][:200]
            self.notes.append(f"no graphs, which costs speed: steps of this model cannot be captured ({why})")
            return False
        return True

    def _warm_up(self) -> None:
        with within_memory("warming up", self.budget.smaller_pool):
            warm_up(self.steps, self.execute)
        self.notes += dict.fromkeys(self.steps.forward.notes)
        self.flights.forget()

"""How a runner of a model that generates gets ready on a CPU: it sizes the pools, loads the weights and makes
the forward pass fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.layers.adapters import Adapters
from sgla.loading.load import load_model
from sgla.loading.pooled import load_decoder
from sgla.messages import VERIFIED, CacheGroup, Facts, Moved, Tier
from sgla.model.base import CausalLM
from sgla.model.drafting import draft_bytes, draft_state, read_guessing
from sgla.model.read import read_decoder
from sgla.model.sizes import weight_bytes
from sgla.model.state import Demand, Pool, kv_groups, state_of, with_draft
from sgla.sampling import Sampler
from sgla.sampling.draw import draw
from sgla.sampling.native import find_draw
from sgla.sampling.processors import Factory, declared
from sgla.sampling.processors import load as load_processors
from sgla.worker.adapters import AdaptedForward, AdapterStore, places_of
from sgla.worker.disk import identity_of, open_disk
from sgla.worker.draft_setup import DraftSetup
from sgla.worker.facts import answer_facts, drafts_of, most_rows
from sgla.worker.forward import Forward, Kept, compiled, compiling, make_forward
from sgla.worker.kv import allocate_kv, memory_of
from sgla.worker.memory import cache_groups, check_weights, size_kv
from sgla.worker.place import Cpu
from sgla.worker.pooler import Pooler
from sgla.worker.rewind import Rewind
from sgla.worker.runner import Runner
from sgla.worker.state import SlotTables
from sgla.worker.store import open_store
from sgla.worker.tiers import FileTier, HostMemory

SLOTS, STEP_TOKENS = 32, 512  # where the configuration leaves them open
LOGIT_ROWS = 64  # rows of logits that exist at a time, at least


class CpuSetup(Runner):
    """Ready to run steps: ``model`` with its pages ``kv``, the ``tables`` of slots, and the ``sampler``,
    which has the ``matchers`` of grammars on the rank that samples. ``fixed``: what the weights cannot be
    changed beside; "". With tiers of files ``identity`` tells what their KV depends on, ``begun_as`` what it
    was at the start."""

    place: Cpu

    def _load(self, config: Config, source: ModelSource) -> None:
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        processors = load_processors(config.logits_processors)
        spec, step_tokens = read_decoder(source.config), config.step_tokens or STEP_TOKENS
        slots = most_rows(config, spec.hidden, self.pooling, SLOTS)
        weights = weight_bytes(spec, dtype, config.quantization, self.shard.size)
        guessing = read_guessing(config, None if source.draft is None else source.draft.config, spec)
        weights += draft_bytes(config, guessing, dtype)
        check_weights(weights, self.place.free())
        own = state_of(spec, self.shard.size, self.shard.rank)
        state = with_draft(own, draft_state(guessing))
        kv_dtype = config.kv_dtype(dtype)
        groups = kv_groups(state, config.context_length or spec.context_len, kv_dtype)
        pool = Pool(groups, config.page_size, Demand(slots, step_tokens, config.prefix_cache))
        size = size_kv(
            pool,
            budget=config.kv_cache_bytes,
            available=self.place.free() - weights,
            wanted_context=config.context_length,
            model_context=spec.context_len,
        )
        states = groups[-1].unit_bytes > 0
        spare = VERIFIED if states and drafts_of(config) else 0
        pages = [*size.pages[:-1], size.pages[-1] + spare]
        self.kv = allocate_kv(state, groups, pages, config.page_size, kv_dtype)
        self._rewind = Rewind(self.kv, size.pages[-1]) if spare else None
        self._own = self.kv[: len(own)]
        units = cache_groups(pool, size.pages)
        long = [layer.rope is not None and layer.rope.long(size.context_len) for layer in spec.attention]
        tiers = self._open_tiers(config, source, units, long)
        places = places_of(config, dtype)
        self.config, self.source = config, source
        self._model_again = partial(self._load_model, config, dtype, size.context_len, places)
        self.model = self._model_again(source)
        self.adapters = None if places is None else AdapterStore(places)
        self._moved: list[Moved] = []
        self._most_logits = max(slots, LOGIT_ROWS)
        self._kept = Kept() if config.enable_return_hidden_states else None
        self.tables = SlotTables(slots, size.context_len, config.page_size, len(groups) - states, states)
        limits = ProgramLimits(step_tokens, self._most_logits)
        drafts = DraftSetup(config, source, self.model, dtype, self._report)
        self._forward_again = partial(self._make_forward, limits, config.native_kernels, drafts.tell)
        self._forward, kernels = self._forward_again()
        beside = (
            ("adapters", places),
            ("what guesses", config.speculative_algorithm),
            ("a head for vectors", self.pooling),
        )
        self.fixed = next((what for what, there in beside if there is not None), "")
        self.sampler = self._make_sampler(spec.vocab, config.native_kernels, processors)
        kept = self.kv[len(own) :]
        self._drafter = drafts.make(self.tables, self.sampler, kept, step_tokens, self.place.threads)
        self.facts = Facts(
            groups=units,
            page_size=config.page_size,
            slots=slots,
            context_len=size.context_len,
            vocab_size=spec.vocab,
            step_tokens=step_tokens,
            dtype=dtype,
            device=self.place.device.name,
            ledger={"weights": weights, "kv": size.bytes, "adapters": places.nbytes if places else 0},
            adapters=places.places if places else 0,
            notes=[note for note in (kernels, size.note) if note],
            guided_drafts=True,
            **tiers,
            **answer_facts(config, spec, self.pooling, declared(processors)),
        )

    def _open_tiers(
        self, config: Config, source: ModelSource, groups: list[CacheGroup], long: list[bool]
    ) -> dict[str, Any]:
        """The fields of ``Facts`` that tell of places which keep prefixes."""
        self._tiers: dict[str, FileTier] = {}
        if config.kv_disk is None and config.kv_store is None:
            return {}
        tensors = memory_of(self.kv, len(groups))
        memory = [HostMemory([tensor.numpy() for tensor in found]) for found in tensors]
        layout = [[tensor.shape[1] for tensor in found] for found in tensors]
        self.identity = partial(identity_of, config, source, layout, long)
        identity = self.begun_as = self.identity()
        place, tiers, found = (self.shard.rank, self.shard.size), list[Tier](), list[list[bytes]]()
        if config.kv_disk is not None:
            self._tiers["disk"], tier, keys = open_disk(config.kv_disk, identity, groups, memory, *place)
            tiers, found = [*tiers, tier], [*found, keys]
        if config.kv_store is not None:
            size = config.page_size
            self._tiers["store"], tier = open_store(config.kv_store, identity, memory, size, *place)
            tiers, found = [*tiers, tier], [*found, [b""] * len(groups)]
        return {"tiers": tiers, "found": found}

    def load_again(self, source: ModelSource) -> None:
        """The model of ``source``, after the one before has gone."""
        self.model = self._model_again(source)
        self._forward, _ = self._forward_again()

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()

    def _load_model(
        self, config: Config, dtype: str, context_len: int, places: Adapters | None, source: ModelSource
    ) -> CausalLM:
        quantization, seed, report = config.quantization, config.random_seed or 0, self._report
        self._pooler: Pooler | None = None
        if self.pooling is None:
            made = load_model(
                source, dtype, quantization, self.shard, context_len, report, seed, adapters=places
            )
            if config.enable_torch_compile:
                compiling(made, config, report)
            return made
        model, head = load_decoder(
            source, self.pooling, dtype, quantization, self.shard, context_len, report, seed
        )
        slots = most_rows(config, model.spec.hidden, self.pooling, SLOTS)
        self._pooler = Pooler(self.pooling, head, slots, model.spec.hidden)
        return model

    def _make_sampler(self, vocab: int, native: bool, processors: dict[str, Factory]) -> Sampler:
        self.matchers = Matchers() if self.shard.rank == 0 else None
        pick = find_draw() if native else draw
        skip_forced = self.shard.size == 1  # other ranks are told one token a row
        return Sampler(self.tables.tokens, vocab, self.matchers, pick, skip_forced, processors)

    def _make_forward(
        self, limits: ProgramLimits, native: bool, tell: Callable[[torch.Tensor], None] | None
    ) -> tuple[Forward, str]:
        if self._pooler is None:
            made = self.model, self._own, limits, self.place.threads, native, self._kept, tell
            if self.adapters is None:
                return make_forward(*made)
            return self._make_adapted(self.adapters.adapters, lambda: make_forward(*made))
        whole = self._pooler.whole

        def hidden(batch: ForwardBatch) -> torch.Tensor:
            return self.model.forward(batch, self._own, None if whole else batch.sample_rows)

        return compiled(hidden, limits, self.place.threads, native)

    def _make_adapted(
        self, adapters: Adapters, make: Callable[[], tuple[Forward, str]]
    ) -> tuple[Forward, str]:
        """Two programs: what knows of adapters is slower where no row has one."""
        plain, note = make()
        adapters.rows.active = True
        adapted, _ = make()
        adapters.rows.active = False
        return AdaptedForward(adapters, self.tables, plain, adapted), note

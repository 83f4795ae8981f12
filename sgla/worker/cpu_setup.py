"""How a runner of a model that generates gets ready on a CPU: it sizes the pools, loads the weights and makes
the forward pass fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.program import ProgramLimits
from sgla.layers.adapters import Adapters
from sgla.loading.load import load_model
from sgla.loading.pooled import load_decoder
from sgla.messages import CacheGroup, Facts
from sgla.model.base import CausalLM
from sgla.model.read import read_decoder
from sgla.model.state import Demand
from sgla.sampling import Sampler
from sgla.sampling.draw import draw
from sgla.sampling.native import find_draw
from sgla.sampling.processors import Factory, declared
from sgla.sampling.processors import load as load_processors
from sgla.worker.adapters import AdaptedForward, AdapterStore, DirectCopies, places_of
from sgla.worker.copies import open_files, open_peers
from sgla.worker.cpu_kv import take_kv
from sgla.worker.disk import identity_of
from sgla.worker.draft_setup import DraftSetup
from sgla.worker.facts import answer_facts, most_rows
from sgla.worker.forward import Forward, Kept, compiled, compiling, make_forward
from sgla.worker.kv import memory_of
from sgla.worker.peering import peer_identity
from sgla.worker.place import Cpu
from sgla.worker.pooler import Pooler
from sgla.worker.runner import Runner
from sgla.worker.state import SlotTables
from sgla.worker.tiers import HostMemory

SLOTS, STEP_TOKENS = 32, 512  # where the configuration leaves them open
LOGIT_ROWS = 64  # rows of logits that exist at a time, at least


class CpuSetup(Runner):
    """Ready to run steps: ``model`` with its pages ``kv``, the ``tables`` of slots, and the ``sampler``,
    which has the ``matchers`` of grammars on the rank that samples. With tiers ``identity`` tells what their
    KV depends on, ``begun_as`` what it was at the start."""

    place: Cpu
    identity: Callable[[], str]

    def _load(self, config: Config, source: ModelSource) -> None:
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        processors = load_processors(config.logits_processors)
        spec, step_tokens = read_decoder(source.config), config.step_tokens or STEP_TOKENS
        slots = most_rows(config, spec.hidden, self.pooling, SLOTS)
        demand = Demand(slots, step_tokens, config.prefix_cache)
        kv = take_kv(config, source, spec, self.place, dtype, demand)
        self.kv, self._own, self._rewind = kv.layers, kv.own, kv.rewind
        self.config, self.source = config, source
        context_len = kv.size.context_len
        self._open_tiers(kv.groups, spec.long_ropes(context_len))
        places = self._open_adapters(dtype)
        self._model_again = partial(self._load_model, dtype, context_len, places)
        self.model = self._model_again(source)
        self._most_logits = max(slots, LOGIT_ROWS)
        self._kept = Kept() if config.enable_return_hidden_states else None
        states = kv.paged < len(kv.groups)
        self.tables = SlotTables(slots, context_len, config.page_size, kv.paged, states)
        limits = ProgramLimits(step_tokens, self._most_logits)
        drafts = DraftSetup(config, source, self.model, dtype, self._report)
        self._forward_again = partial(self._make_forward, limits, config.native_kernels, drafts.tell)
        self._forward, kernels = self._forward_again()
        self.sampler = self._make_sampler(spec.vocab, config.native_kernels, processors)
        threads = self.place.threads
        self._drafter = drafts.make(self.tables, self.sampler, kv.guessing, step_tokens, threads)
        self.facts = Facts(
            groups=kv.groups,
            page_size=config.page_size,
            slots=slots,
            context_len=context_len,
            vocab_size=spec.vocab,
            step_tokens=step_tokens,
            dtype=dtype,
            device=self.place.device.name,
            ledger={"weights": kv.weights, "kv": kv.size.bytes, "adapters": places.nbytes if places else 0},
            adapters=places.places if places else 0,
            notes=[note for note in (kernels, kv.size.note) if note],
            guided_drafts=True,
            tiers=self.copies.tiers,
            found=self.copies.found,
            peer_ports=self.copies.peer_ports,
            identity=self.copies.identity,
            **answer_facts(config, spec, self.pooling, declared(processors)),
        )

    def _open_tiers(self, groups: list[CacheGroup], long: list[bool]) -> None:
        """Raises ConfigError."""
        config = self.config
        if config.kv_disk is None and config.kv_store is None and config.role == "both":
            return
        tensors = memory_of(self.kv, len(groups))
        memory = [HostMemory([tensor.numpy() for tensor in found]) for found in tensors]
        layout = [[tensor.shape[1] for tensor in found] for found in tensors]
        self.identity = partial(identity_of, config, self.source, layout, long)
        self.begun_as = self.identity()
        open_files(self.copies, config, self.shard, self.begun_as, groups, memory)
        if config.role != "both":
            told = peer_identity(config, self.source, ("cpu", layout), long, self.shard.size)
            open_peers(self.copies, config, self.shard, told, groups, memory)

    def _open_adapters(self, dtype: str) -> Adapters | None:
        """The places that there are for them."""
        places = places_of(self.config, dtype)
        if places is not None:
            self.adapters = AdapterStore(places)
            self.copies.add("adapters", DirectCopies(self.adapters))
        return places

    def load_again(self, source: ModelSource) -> None:
        """The model of ``source``, after the one before has gone."""
        self.model = self._model_again(source)
        self._forward, _ = self._forward_again()

    def _load_model(
        self, dtype: str, context_len: int, places: Adapters | None, source: ModelSource
    ) -> CausalLM:
        config = self.config
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

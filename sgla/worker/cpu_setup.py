"""How a runner of a model that generates gets ready on a CPU around its model: it sizes the pools, and makes
what samples and what guesses."""

from __future__ import annotations

from functools import partial

from sgla.config import Config
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels.cpu.program import ProgramLimits
from sgla.messages import CacheGroup, Facts
from sgla.model.diffusion_gemma_spec import denoising_of
from sgla.model.spec import ModelSpec
from sgla.model.state import Demand
from sgla.sampling import Sampler
from sgla.sampling.draw import draw
from sgla.sampling.native import find_draw
from sgla.sampling.processors import Factory, declared
from sgla.sampling.processors import load as load_processors
from sgla.sampling.warp import WIDTH
from sgla.worker.aligning import Aligner
from sgla.worker.canvases import Canvases, canvas_bytes
from sgla.worker.cpu_kv import CpuKV, take_kv
from sgla.worker.cpu_model import CpuModel
from sgla.worker.draft_setup import DraftSetup
from sgla.worker.facts import answer_facts, most_rows
from sgla.worker.forward import KeptHidden
from sgla.worker.kv import memory_of
from sgla.worker.lent import HostLending
from sgla.worker.listening import open_listening
from sgla.worker.parts import parts_of_units
from sgla.worker.peering import by_threads
from sgla.worker.seeing import open_pictures
from sgla.worker.state import SlotTables
from sgla.worker.tier_setup import Units, asks_for_tiers, open_tiers
from sgla.worker.tiers import HostMemory

SLOTS, STEP_TOKENS = 32, 512  # where the configuration leaves them open
LOGIT_ROWS = 64  # rows of logits that exist at a time, at least


class CpuSetup(CpuModel):
    """Ready to run steps: ``kv``, the pages of all layers, and the ``sampler``, which has the ``matchers`` of
    grammars on the rank that samples; ``identity`` of the KV in tiers, if there are any."""

    def _load(self, config: Config, source: ModelSource) -> None:
        self.config, self.source = config, source
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        processors = load_processors(config.logits_processors)
        spec, step_tokens = self._stage(source), config.step_tokens or STEP_TOKENS
        slots = most_rows(config, spec, self.pooling, SLOTS)
        demand = Demand(slots, step_tokens, config.prefix_cache, config.window_ratio)
        if spec.heard:
            own = slots, self.shard.count, self.place
            self._listening, seeing = open_listening(config, source, spec, dtype, *own)
        else:
            self._pictures, seeing = open_pictures(config, source, spec, self.place.torch, dtype)
        self.copies.identity = seeing.identity or {}
        canvases = canvas_bytes(spec, slots)
        kv = take_kv(config, source, spec, self.place, dtype, demand, seeing.taken + canvases)
        self.kv, self._own, self._rewind = kv.layers, kv.own, kv.rewind
        context_len = kv.size.context_len
        self._open_tiers(kv.groups, spec, context_len)
        self._open_adapters(dtype)
        self._model_again = partial(self._load_model, dtype, context_len, slots, spec.stage)
        self.model = self._model_again(source)
        states = kv.paged < len(kv.groups)
        spare = self.shard.lockstep is not None  # a slot of nobody
        self.tables = SlotTables(slots + spare, context_len, config.page_size, kv.paged, states)
        if seeing.speech is not None and seeing.speech.aligned:
            width = source.config.get("median_filter_width", WIDTH)
            self._aligner = Aligner(seeing.speech.aligned, width, self.tables.labels)
        kernels = self._make_steps(kv, dtype, step_tokens, processors)
        adapters = None if self.adapters is None else self.adapters.adapters
        ledger = {
            "weights": kv.weights,
            "kv": kv.size.bytes,
            "adapters": adapters.nbytes if adapters else 0,
            **({"canvas": canvases} if canvases else {}),
            **seeing.ledger,
        }
        self.facts = Facts(
            groups=kv.groups,
            page_size=config.page_size,
            slots=slots,
            context_len=context_len,
            vocab_size=spec.vocab,
            step_tokens=step_tokens,
            dtype=dtype,
            device=self.place.device.name,
            ledger=ledger,
            adapters=adapters.places if adapters else 0,
            notes=[note for note in (kernels, kv.size.note, seeing.note) if note],
            media=seeing.media,
            untaken=seeing.untaken or {},
            speech=seeing.speech,
            dictation=seeing.dictation,
            guided_drafts=True,
            **self.copies.facts,
            **answer_facts(config, spec, self.pooling, declared(processors)),
        )

    def _make_steps(self, kv: CpuKV, dtype: str, step_tokens: int, processors: dict[str, Factory]) -> str:
        """What computes a step, samples and guesses; a note on the kernels."""
        spec, config, slots = self.model.spec, self.config, len(self.tables.limit)
        lockstep = self.shard.lockstep
        native = config.native_kernels and lockstep is None  # a program has as many rows behind attention
        self._most_logits = max(slots, LOGIT_ROWS)
        self._kept = KeptHidden() if config.enable_return_hidden_states else None
        limits = ProgramLimits(step_tokens, self._most_logits)
        drafts = DraftSetup(config, self.source, self.model, dtype, self._report)
        self._forward_again = partial(self._make_forward, limits, native, drafts.hook)
        self._forward, kernels = self._forward_again()
        if lockstep is not None:
            kernels = "CPU kernels in torch (slow): ranks share out MLPs alone (--dp-attention)"
        self.sampler = self._make_sampler(spec.vocab, processors)
        if spec.canvas:
            how = denoising_of(self.source.generation_config, config.diffusion_config)
            pick = find_draw() if native else draw
            self._canvases = Canvases(self.tables, spec, how, pick)
        threads = self.place.threads
        self._drafter = drafts.make(self.tables, self.sampler, kv.guessing, step_tokens, threads)
        return kernels

    def _open_tiers(self, groups: list[CacheGroup], spec: ModelSpec, context_len: int) -> None:
        """Raises ConfigError."""
        if not asks_for_tiers(self.config):
            return
        tensors = memory_of(self.kv, len(groups))
        memory = [HostMemory([tensor.numpy() for tensor in found]) for found in tensors]
        long, parts = spec.long_ropes(context_len), parts_of_units(self.kv, spec, len(groups))
        units = Units(groups, memory, parts, ["cpu"], long, partial(by_threads, memory), HostLending())
        self.identity = open_tiers(self.copies, self.config, self.source, self.shard, units)

    def _make_sampler(self, vocab: int, processors: dict[str, Factory]) -> Sampler:
        self.matchers = Matchers() if self.shard.draws else None
        pick = find_draw() if self.config.native_kernels else draw
        skip_forced = self.shard.count == 1  # other ranks are told one token a row
        return Sampler(self.tables.tokens, vocab, self.matchers, pick, skip_forced, processors)

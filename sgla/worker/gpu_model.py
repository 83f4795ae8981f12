"""How a runner on an NVIDIA GPU gets its model: it chooses kernels, loads the weights, and rehearses steps
beside."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.kernels.rehearsal import compilers
from sgla.loading.load import load_model
from sgla.loading.offload import Offload, copying
from sgla.loading.pooled import load_decoder
from sgla.model.base import CausalLM
from sgla.model.drafting import Guessing, draft_state, read_guessing
from sgla.model.spec import ModelSpec
from sgla.model.vision.served import vision_of
from sgla.quant.weight import Make, anywhere
from sgla.sampling.warp import WIDTH
from sgla.worker.adapters import AdapterStore, places_of
from sgla.worker.aligning import Aligner
from sgla.worker.chain_setup import load_chains, target_hidden
from sgla.worker.chains import Chains
from sgla.worker.facts import drafts_of
from sgla.worker.gpu_adapters import AdapterCopies
from sgla.worker.gpu_canvases import gpu_canvas_bytes
from sgla.worker.gpu_load import choose_kernels, choose_sizes, dtype_of, weights_of
from sgla.worker.gpu_memory import FEWER_ROWS, OTHER_MODEL, Budget, within_memory
from sgla.worker.gpu_steps import GpuSteps, Kernels, Sizes
from sgla.worker.gpu_tiers import staging
from sgla.worker.listening import Listening, open_listening
from sgla.worker.peering import gpu_room
from sgla.worker.pictures import Pictures
from sgla.worker.place import Gpu
from sgla.worker.pooler import Pooler
from sgla.worker.region import LARGE, Region, gpu_memory, let_go
from sgla.worker.runner import Runner
from sgla.worker.seeing import open_pictures
from sgla.worker.warm_up import rehearse, wake_triton


class Regions(NamedTuple):
    """What can be given back while the server sleeps."""

    weights: Region
    kv: Region


class GpuModel(Runner):
    """Has its model: ``steps`` without a graph, with what all steps have in common, which are rehearsed by
    then if graphs are going to be ``_captured``; ``chains``: of guesses, if a model guesses. ``regions``:
    None where memory cannot be given back; ``budget``: of the GPU's memory; ``notes``: for ``Facts``."""

    place: Gpu
    regions: Regions | None = None
    chains: Chains | None = None
    pictures: Pictures | None = None
    listening: Listening | None = None
    steps: GpuSteps

    def _load(self, config: Config, source: ModelSource) -> None:
        woken = compilers().submit(wake_triton, self.place.index)
        self.config, self.source = config, source
        spec = self._stage(source)
        sizes = choose_sizes(config, spec, self.pooling)
        vision, _ = vision_of(config, source)
        together = vision is not None and vision.ahead
        kernels, self.notes = choose_kernels(config, spec, self.place, sizes, together)
        self.notes += self.place.notes
        self._make_room()
        if self.shard.lockstep is not None and self.shard.lockstep.traffic is not None:
            assert spec.moe is not None
            tokens = sizes.step_tokens + sizes.rows - sizes.slots  # with guesses
            with self.place.torch:
                self.shard.lockstep.traffic.open(spec.hidden, spec.moe.routing.top_k, tokens)
        guessing = self._guessing(spec)
        with within_memory("loading the tower of pictures", lambda: OTHER_MODEL):
            if spec.heard:
                own = sizes.slots + 1, self.shard.size, self.place
                self.listening, self.seeing = open_listening(config, source, spec, dtype_of(config), *own)
            else:
                self.pictures, self.seeing = open_pictures(
                    config, source, spec, self.place.torch, dtype_of(config)
                )
        if config.speculative_eagle_topk > 1 and self.pictures is not None and self.pictures.turns:
            raise ConfigError(
                "--speculative-eagle-topk 2 cannot be honoured with a model that reads pictures whose tokens "
                "have positions of their own; leave it out",
                param="speculative_eagle_topk",
            )
        self.copies.identity = self.seeing.identity or {}
        self.notes += [self.seeing.note] if self.seeing.note else []
        canvases = gpu_canvas_bytes(spec, sizes.slots)
        beside = self.seeing.taken + canvases + gpu_room(config, self.shard.size)
        self.budget = Budget(
            weights_of(config, spec, self.place, guessing), sizes.step_tokens, sizes.slots, beside
        )
        self.budget.weights.check(self.place.free())
        self._begin_copies()
        before = torch.cuda.memory_allocated()
        kept = draft_state(guessing, self.shard.size, self.shard.rank)
        begin = partial(self._begin, kernels, sizes, woken, before, kept)
        layers = self.budget.weights.offloaded.layers
        with self.place.torch, within_memory("loading the weights", self.budget.lighter):
            offload = Offload(layers) if layers else None
            how = {"context_len": sizes.context_len, "on_model": begin, "make": self._make}
            self._load_model(how, offload, spec.stage)
            if guessing is not None:
                self._load_chains(guessing, sizes)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if offload is not None:
            self.notes.append(copying(len(layers), spec.layers, offload.nbytes, offload.measure()))

    def _make_room(self) -> None:
        let_go()
        if (memory := gpu_memory(self.place.index)) is not None:
            total = self.place.usage()["total"]
            self.regions = Regions(Region(memory, total), Region(memory, total, LARGE))
        torch.cuda.empty_cache()  # what a runner before in this process had would count as free later only

    def _guessing(self, spec: ModelSpec) -> Guessing | None:
        """The shape of what guesses, if it has weights."""
        if not drafts_of(self.config):
            return None
        draft = self.source.draft
        return read_guessing(self.config, None if draft is None else draft.config, spec)

    def _begin_copies(self) -> None:
        """Take the memory of the GPU that copies need beside steps."""
        places = places_of(self.config, dtype_of(self.config))
        if places is not None:
            self.adapters = AdapterStore(places, self._pin)
            self.copies.add("adapters", AdapterCopies(self.adapters))
        self._staging = staging() if self.config.kv_host_bytes or self.config.kv_host_ratio else None
        self._handing = staging() if self.config.role != "both" else None  # of units for another server

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """In a thread that reads adapters."""
        self.place.begin_thread()
        return tensor.pin_memory()

    @property
    def _make(self) -> Make:
        """Where weights lie."""
        return anywhere if self.regions is None else self.regions.weights.empty

    @property
    def _mapped(self) -> int:
        """Bytes of weights that torch's allocator does not know of."""
        return 0 if self.regions is None else self.regions.weights.size

    def _load_model(self, how: dict[str, Any], offload: Offload | None, stage: range | None) -> None:
        config = self.config
        how |= {
            "dtype": dtype_of(config),
            "quantization": config.quantization,
            "shard": self.shard,
            "on_progress": self._report,
            "seed": config.random_seed or 0,
        }
        if self.pooling is None:
            places = None if self.adapters is None else self.adapters.adapters
            load_model(self.source, offload=offload, adapters=places, stage=stage, **how)
            return
        head = load_decoder(self.source, self.pooling, **how).head
        self.steps.pooler = Pooler(self.pooling, head, self.steps.slots, self.steps.model.spec.hidden)

    def _load_chains(self, guessing: Guessing, sizes: Sizes) -> None:
        before = torch.cuda.memory_allocated() + self._mapped
        self.chains = load_chains(
            self.config, self.source, guessing, self.place, sizes, self.steps, self._report, self._make
        )
        self.budget.ledger["weights"] += torch.cuda.memory_allocated() + self._mapped - before

    def _begin(
        self, kernels: Kernels, sizes: Sizes, woken: Future[None], before: int, beside: Any, model: CausalLM
    ) -> None:
        """``load_model`` calls this when it has made the model, whose weights are still to come: tables are
        allocated and steps rehearsed while these load. ``before``: bytes that were allocated before it was
        made; ``woken``: Triton is ready; ``beside``: what the layers of a model keep that guesses."""
        made = torch.cuda.memory_allocated()
        with within_memory("allocating the tables of rows", lambda: FEWER_ROWS):
            places = None if self.adapters is None else self.adapters.adapters
            hidden = target_hidden(self.config, self.source, model, sizes)
            self.steps = GpuSteps(
                model,
                kernels,
                sizes,
                places,
                beside=beside,
                hidden=hidden,
                pictures=self.pictures,
                leaves=self.config.speculative_eagle_topk > 1,
            )
        adapters = 0 if places is None else places.nbytes
        tables = torch.cuda.memory_allocated() - made
        if self.listening is not None:
            with within_memory("allocating the tables of sounds", lambda: FEWER_ROWS):
                model.seat(sizes.slots + 1, self.listening.dtype)  # one is nobody's
            self.steps.listening = self.listening
            if self.seeing.speech is not None and self.seeing.speech.aligned:
                width = self.source.config.get("median_filter_width", WIDTH)
                labels = self.steps.tables.host.labels
                self.steps.aligner = Aligner(self.seeing.speech.aligned, width, labels)
        self.budget.ledger = {
            "weights": made - before - adapters + self._mapped,
            "adapters": adapters,
            "tables": tables,
            **self.seeing.ledger,
        }
        canvas = model.spec.canvas > 0  # a step is never of decode rows alone
        self._captures = kernels.attention.captures and self.pooling is None and not canvas
        pool = ThreadPoolExecutor(1, "rehearse")
        self._rehearsal = (
            pool.submit(rehearse, self.steps, self.place.index, woken) if self._captures else None
        )
        pool.shutdown(wait=False)

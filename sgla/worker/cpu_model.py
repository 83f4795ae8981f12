"""How a runner of a model that generates gets its model on a CPU: the weights, and the forward pass as one
function of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgla.config import Config
from sgla.errors import UnsupportedField
from sgla.hub.source import ModelSource
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.products import op_by_op
from sgla.kernels.cpu.program import ProgramLimits
from sgla.kernels.expert_counts import uncounted
from sgla.kernels.ops import Layer
from sgla.loading.load import load_model
from sgla.loading.pooled import load_decoder
from sgla.model.base import CausalLM
from sgla.model.whisper import Whisper
from sgla.worker.adapters import AdaptedForward, AdapterStore, DirectCopies, places_of
from sgla.worker.aligning import AlignedForward, Aligner
from sgla.worker.canvases import Canvases
from sgla.worker.context import ContextForward
from sgla.worker.experts import counted
from sgla.worker.forward import Forward, KeptHidden, compiled, compiling, eager_forward, make_forward
from sgla.worker.listening import Listening
from sgla.worker.pictures import PicturedForward, Pictures
from sgla.worker.place import Cpu
from sgla.worker.pooler import Pooler
from sgla.worker.runner import COUNTS, Command, Runner
from sgla.worker.shared_cache import sharing
from sgla.worker.state import SlotTables
from sgla.worker.together import Together


class CpuModel(Runner):
    """Has its ``model``, and the ``_forward`` pass over ``_own``, the pages of its layers. ``tables``: of
    slots; ``_pooler``: of a model that answers with vectors; ``_kept``: its hidden states, if requests may
    want them; ``_pictures``: if it takes any; ``_listening``: if its layers attend to sounds; ``_canvases``:
    if it writes blocks; ``_aligner``: if it tells when tokens were said."""

    place: Cpu
    config: Config
    source: ModelSource
    model: CausalLM
    tables: SlotTables
    _own: list[Layer]
    _pooler: Pooler | None = None
    _kept: KeptHidden | None = None
    _pictures: Pictures | None = None
    _listening: Listening | None = None
    _canvases: Canvases | None = None
    _aligner: Aligner | None = None
    _forward: Forward
    _together: Together | None = None
    _divided: ContextForward | None = None
    _model_again: Callable[[ModelSource], CausalLM]
    _forward_again: Callable[[], tuple[Forward, str]]
    _counting = False  # experts; the last layer has all tokens then, for those whose logits nobody wants

    def _commands(self) -> dict[str, Command]:
        """Beside those of all runners ``COUNTS``, of mixtures: ``experts_dump`` has the numbers by layer, of
        one rank of each stage, since all route alike, or of all."""
        return super()._commands() | {verb: partial(self._count, verb) for verb in COUNTS}

    def _count(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self, "model") or self.model.spec.moe is None:
            raise UnsupportedField("the model has no experts, or sleeps, so there is nothing to count")
        if self.shard.context is not None and self.shard.lockstep is not None:
            raise UnsupportedField(
                "experts are not counted with --cp and --dp-attention: ranks see parts of others' steps"
            )
        if verb == "experts_dump":
            told, lockstep = counted(self.model, self.shard.of_mlps), self.shard.lockstep
            alone = lockstep is not None and lockstep.traffic is not None  # it routes its own tokens alone
            return told if alone or self.shard.of_mlps.rank == 0 else {}
        self._counting = verb == "experts_start"
        if self._counting:
            counted(self.model, self.shard.of_mlps)  # what there was is not told
        self._begin()
        return {}

    def load_again(self, source: ModelSource) -> None:
        """The model of ``source``, after the one before has gone."""
        self.model = self._model_again(source)
        self._begin()

    def _begin(self) -> None:
        for counts in self.model.counts.values():
            counts.active = self._counting
        self._forward, _ = self._forward_again()

    def _open_adapters(self, dtype: str) -> None:
        places = places_of(self.config, dtype)
        if places is not None:
            self.adapters = AdapterStore(places)
            self.copies.add("adapters", DirectCopies(self.adapters))

    def _load_model(
        self, dtype: str, context_len: int, slots: int, stage: range | None, source: ModelSource
    ) -> CausalLM:
        config, places = self.config, None if self.adapters is None else self.adapters.adapters
        quantization, seed, report = config.quantization, config.random_seed or 0, self._report
        if self.pooling is None:
            shared = dtype, quantization, self.shard, context_len, report, seed
            made = load_model(source, *shared, adapters=places, stage=stage)
            if self._listening is not None:
                made.seat(slots, self._listening.dtype)
            if config.enable_torch_compile:
                compiling(made, config, report)
            return made
        model, head = load_decoder(
            source, self.pooling, dtype, quantization, self.shard, context_len, report, seed
        )
        self._pooler = Pooler(self.pooling, head, slots, model.spec.hidden)
        return model

    def _make_forward(
        self, limits: ProgramLimits, native: bool, hook: Callable[[Tensor], None] | None
    ) -> tuple[Forward, str]:
        """``hook``: see ``make_forward``. Also a note for the start-up report."""
        threads = self.place.threads
        hook = hook or (_nobody if self._counting else None)
        context, lockstep = self.shard.context, self.shard.lockstep
        if lockstep is not None or context is not None:
            if lockstep is None:
                with uncounted(self.model.counts, context is not None and context.rank > 0):
                    plain, note = self._make_plain(limits, threads, native, hook)
            else:
                torch.set_num_threads(threads)
                plain, note = self._leave, ""
                if self.shard.samples:
                    plain = eager_forward(self.model, self._own, self._kept, hook)
            if context is not None:
                shared = self._own, context, self.tables, self._kept, threads, hook, not self.shard.samples
                plain = self._divided = ContextForward(plain, self.model, *shared)
            if lockstep is not None:
                plain = self._together = Together(plain, lockstep, self.tables)
            return plain, note
        if self.config.dcp > 1:
            plain = eager_forward(self.model, self._own, self._kept, hook)
            return sharing(plain, self.shard, threads), ""
        if self._pooler is not None:
            plain, note = compiled(self._hidden, limits, threads, native)
            if self._pictures is not None:
                return PicturedForward(plain, op_by_op(self._hidden, plain), threads), note
            return plain, note
        make = partial(self._make_plain, limits, threads, native, hook)
        plain, note = make()
        if self._aligner is not None and isinstance(self.model, Whisper):
            eager = eager_forward(self.model, self._own, self._kept, hook)
            return AlignedForward(plain, eager, self._aligner, self._watch, threads), note
        if self._pictures is not None:
            eager = op_by_op(eager_forward(self.model, self._own, self._kept, hook), plain)
            return PicturedForward(plain, eager, threads), note
        if self.adapters is None:
            return plain, note
        # What knows of adapters is slower where no row has one, so it is a program of its own.
        adapters = self.adapters.adapters
        adapters.rows.active = True
        adapted, _ = make()
        adapters.rows.active = False
        return AdaptedForward(adapters, self.tables, plain, adapted), note

    def _watch(self, aligner: Aligner | None) -> None:
        assert isinstance(self.model, Whisper)
        self.model.watch(None if aligner is None else aligner.take)

    def _make_plain(
        self, limits: ProgramLimits, threads: int, native: bool, hook: Callable[[Tensor], None] | None
    ) -> tuple[Forward, str]:
        if not self.shard.samples:
            return compiled(self._leave, limits, threads, native)
        return make_forward(self.model, self._own, limits, threads, native, self._kept, hook)

    def _leave(self, batch: ForwardBatch) -> Tensor:
        """Of a stage that is not the last: what it hands on."""
        return self.model.forward(batch, self._own)

    def _hidden(self, batch: ForwardBatch) -> Tensor:
        """What the pooler wants: the hidden states of all tokens, or of the last one of each prompt."""
        assert self._pooler is not None
        return self.model.forward(batch, self._own, None if self._pooler.whole else batch.sample_rows)


def _nobody(hidden: Tensor) -> None:
    """In the place of who wants the hidden states of all tokens."""

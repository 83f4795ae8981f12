"""How a runner on a CPU gets what guesses for its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.kernels import ops
from sgla.kernels.cpu.program import ProgramLimits
from sgla.kernels.ops import Layer
from sgla.loading.drafter import (
    load_block,
    load_eagle,
    load_medusa,
    load_predictor,
    narrow,
    repack,
    with_embedding,
)
from sgla.loading.load import load_model
from sgla.messages import VERIFIED, Progress
from sgla.model.base import CausalLM, Decoder
from sgla.model.dflash import DFlash
from sgla.model.drafting import head_kind, layers_read, read_block, read_eagle, read_medusa, read_tokens
from sgla.model.eagle import Eagle
from sgla.model.medusa import Medusa
from sgla.model.predictor import Head
from sgla.sampling import Sampler
from sgla.worker.blocks import BlockDrafts, BlockForward
from sgla.worker.draft_head import WAITING, HeadDrafts, HeadForward, StepHidden
from sgla.worker.draft_model import ModelDrafts, with_vocab
from sgla.worker.drafts import Drafter, Guessing, agreed
from sgla.worker.forward import make_forward
from sgla.worker.hooked import show
from sgla.worker.kv import paged
from sgla.worker.medusa import MedusaDrafts, MedusaForward
from sgla.worker.ngrams import Both, NGrams
from sgla.worker.others import Outputs
from sgla.worker.pace import Pace
from sgla.worker.state import SlotTables


class DraftSetup:
    """Loads what guesses for ``target``, before its forward pass is recorded, of which hooks for a head are
    part. ``hook``: is to be called with the final hidden states of all tokens of a step."""

    hook: Callable[[Tensor], None] | None = None

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        target: CausalLM,
        dtype: str,
        report: Callable[[Progress], None],
    ) -> None:
        self._config, self._hidden, self._vocab = config, list[StepHidden](), target.spec.vocab
        self._shard = target.shard.of_guesses
        self._model: CausalLM | None = None
        self._head: Head | None = None
        self._medusa: Medusa | None = None
        self._block: DFlash | None = None
        seed, quantization = config.random_seed or 0, config.speculative_quantization
        told = dtype, config.quantization, report, seed
        match config.speculative_algorithm if target.spec.last else None:
            case "draft_model":
                assert source.draft is not None
                shared = self._shard, target.positions
                self._model = load_model(source.draft, dtype, quantization, *shared, report, seed)
            case "mtp":
                assert isinstance(target, Decoder)
                self._head = load_predictor(source, with_embedding(source, target, *told), *told)
                narrow(self._head, read_tokens(config, self._vocab))
                self._hidden.append(StepHidden())
                self.hook = self._hidden[0].hook
            case "medusa":
                assert isinstance(target, Decoder)
                assert source.draft is not None
                medusa = read_medusa(source.draft.config, target.spec)
                self._medusa = load_medusa(source.draft, target, medusa, dtype, quantization, report, seed)
                self._hidden.append(StepHidden())
                self.hook = self._hidden[0].hook
            case "dflash":
                assert isinstance(target, Decoder)
                assert source.draft is not None
                block, positions = read_block(source.draft.config, target.spec), target.positions
                seen = with_embedding(source, target, *told)
                self._block = load_block(
                    source.draft, seen, block, dtype, quantization, positions, report, seed
                )
                self._hook(target, block.layers)
            case "eagle" | "eagle3" as name:
                assert isinstance(target, Decoder)
                assert source.draft is not None
                eagle = read_eagle(source.draft.config, target.spec, third=name == "eagle3")
                seen, positions = with_embedding(source, target, *told), target.positions
                self._head = load_eagle(
                    source.draft, seen, eagle, dtype, quantization, positions, report, seed
                )
                if isinstance(self._head, Eagle):
                    narrow(self._head, read_tokens(config, self._vocab))
                self._hook(target, eagle.layers)
        if not target.spec.last and isinstance(target, Decoder):
            draft = None if source.draft is None else source.draft.config
            show(target, layers_read(config, draft, target.spec), ())
        for head in (self._head, self._block):
            if head is not None:
                repack(head, head_kind(config, "cpu"))

    def _hook(self, target: Decoder, layers: Sequence[int]) -> None:
        """Keep what goes into these ``layers``; without any, the final hidden states."""
        self._hidden += [StepHidden() for _ in layers or (0,)]
        if not layers:
            self.hook = self._hidden[0].hook
        else:
            show(target, layers, [partial(ops.tap, hidden.hook) for hidden in self._hidden])

    def make(
        self, tables: SlotTables, sampler: Sampler, kv: list[Layer], step_tokens: int, threads: int
    ) -> Drafter:
        """``kv``: of what guesses."""
        slots, native = len(tables.limit), self._config.native_kernels
        adaptive = self._config.speculative_adaptive
        pace, guessing = Pace(slots, adaptive, shard=self._shard), Guessing(sampler, tables, self._shard)
        if self._head is not None:
            limits = ProgramLimits(step_tokens + WAITING, slots)
            head = HeadForward(self._head, paged(kv), limits, threads, native)
            return self._beside(HeadDrafts(tables, guessing, head, self._hidden, pace), tables, sampler, pace)
        if self._medusa is not None:
            heads = MedusaForward(self._medusa, ProgramLimits(slots, slots), threads, native)
            medusa = MedusaDrafts(tables, guessing, heads, self._hidden[0], pace)
            return self._beside(medusa, tables, sampler, pace)
        if self._block is not None:
            blocks = BlockForward(self._block, kv, step_tokens + WAITING, threads, native)
            drafts = BlockDrafts(tables, guessing, blocks, self._hidden, pace)
            return self._beside(drafts, tables, sampler, pace)
        if self._model is not None:
            spare = slots + VERIFIED
            limits = ProgramLimits(step_tokens + spare, slots)
            forward, _ = make_forward(self._model, kv, limits, threads, native)
            forward = with_vocab(forward, self._model.spec.vocab, self._vocab)
            return self._beside(ModelDrafts(tables, guessing, forward, pace, spare), tables, sampler, pace)
        if self._config.speculative_algorithm is None:
            return NGrams(tables, sampler, Pace(slots, adaptive=False))
        return agreed(NGrams(tables, sampler, Pace(slots, adaptive), Outputs(slots)), tables, self._shard)

    def _beside(self, model: Drafter, tables: SlotTables, sampler: Sampler, pace: Pace) -> Drafter:
        """With n-grams beside ``model``, where the clock chooses."""
        if not pace.adaptive:
            return model
        slots = len(tables.limit)
        own = Pace(slots, adaptive=True)
        ngrams = NGrams(tables, sampler, own, Outputs(slots))
        return agreed(Both(ngrams, model, (own, pace), tables, self._shard), tables, self._shard)

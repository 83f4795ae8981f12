"""How a runner on a GPU gets what guesses for its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sgla.config import Config
from sgla.hub.source import ModelSource
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
from sgla.model.drafting import (
    EagleSpec,
    Guessing,
    MedusaSpec,
    head_kind,
    layers_read,
    read_block,
    read_eagle,
    read_tokens,
)
from sgla.model.eagle import Eagle, Eagle3
from sgla.model.predictor import Head, Predictor
from sgla.model.spec import ModelSpec
from sgla.quant.weight import Make
from sgla.worker.block_chains import BlockChains, BlockModel
from sgla.worker.chains import ROWS, Chains
from sgla.worker.facts import drafts_of, guesses_of
from sgla.worker.gpu_load import choose_kernels, dtype_of
from sgla.worker.gpu_steps import GpuSteps, Kernels, Sizes
from sgla.worker.head_chains import Hand, HeadChains, HeadModel
from sgla.worker.hooked import show
from sgla.worker.kv import DTYPES
from sgla.worker.medusa_chains import MedusaChains
from sgla.worker.model_chains import ModelChains
from sgla.worker.place import Gpu
from sgla.worker.target_hidden import TargetHidden

READERS = "mtp", "eagle", "eagle3", "medusa", "dflash"  # algorithms that read hidden states of the target


def eagle_of(config: Config, source: ModelSource, target: ModelSpec) -> EagleSpec | None:
    """The head of EAGLE that guesses, if one does."""
    if config.speculative_algorithm not in ("eagle", "eagle3"):
        return None
    assert source.draft is not None
    return read_eagle(source.draft.config, target, third=config.speculative_algorithm == "eagle3")


def target_hidden(config: Config, source: ModelSource, target: CausalLM, sizes: Sizes) -> TargetHidden | None:
    """The hidden states that a head reads of ``target``, which keeps them from its next recording on; a stage
    before the last hands them on."""
    if config.speculative_algorithm not in READERS or not drafts_of(config):
        return None
    assert isinstance(target, Decoder)
    draft = None if source.draft is None else source.draft.config
    layers = layers_read(config, draft, target.spec)
    if not target.spec.last:
        show(target, layers, ())
        return None
    dtype = DTYPES[dtype_of(config)]
    tokens = sizes.step_tokens + sizes.rows
    return TargetHidden(target, layers, tokens, sizes.slots + 1, guesses_of(config), dtype)


def adaptive(config: Config) -> bool:
    """Whether a clock says how many tokens rows guess: not where ranks have rows of their own, which read in
    the plan how many that are, unless it tells the guesses themselves."""
    return config.speculative_adaptive and not (config.dp_attention and config.pp == 1)


def load_chains(
    config: Config,
    source: ModelSource,
    spec: Guessing,
    place: Gpu,
    sizes: Sizes,
    target: GpuSteps,
    report: Callable[[Progress], None],
    make: Make,
) -> Chains:
    """``spec``: of what guesses; ``sizes``: of its ``target``."""
    assert target.drafts is not None
    if isinstance(spec, MedusaSpec):
        return _load_medusa(config, source, spec, target, report)
    kernels, _ = choose_kernels(config, spec, place, sizes._replace(rows=2 * VERIFIED))
    sizes, dtype, seed = sizes._replace(rows=ROWS[-1]), dtype_of(config), config.random_seed or 0
    common = target, target.drafts, drafts_of(config), adaptive(config)
    if target.hidden is None:
        assert source.draft is not None
        quantization, length = config.speculative_quantization, sizes.context_len
        model = load_model(
            source.draft, dtype, quantization, place.shard.of_guesses, length, report, seed, make=make
        )
        return ModelChains(GpuSteps(model, kernels, sizes, tables=target.tables), *common)
    assert isinstance(target.model, Decoder)
    stored = target.model.spec.quantized(config.quantization, "cuda")
    model = with_embedding(source, target.model, dtype, stored, report, seed)
    if config.speculative_algorithm == "dflash":
        return _load_blocks(config, source, spec, kernels, sizes, target, model, report)
    head = _load_head(config, source, model, dtype, report, seed)
    exact = repack(head, head_kind(config, "cuda"))
    hand = Hand(ROWS[-1], head.width, kernels.dtype)
    if exact is not None and isinstance(head, Eagle3):  # which goes on with another state
        hand.show_rows(ROWS[-1])
    spec = replace(spec, vocab=target.model.spec.vocab)
    first, further = (HeadModel(head, model, spec, hand, reads) for reads in (True, False))
    steps = GpuSteps(further, kernels, sizes, tables=target.tables)
    return HeadChains(steps, *common, first, hand, target.hidden, head.ids, exact)


def _load_blocks(
    config: Config,
    source: ModelSource,
    spec: ModelSpec,
    kernels: Kernels,
    sizes: Sizes,
    target: GpuSteps,
    model: Decoder,
    report: Callable[[Progress], None],
) -> BlockChains:
    """``model``: that of ``target``, with its embedding."""
    seed = config.random_seed or 0
    assert source.draft is not None
    assert target.drafts is not None
    assert target.hidden is not None
    block, kind = read_block(source.draft.config, model.spec), config.speculative_quantization
    head = load_block(source.draft, model, block, dtype_of(config), kind, model.positions, report, seed)
    exact = repack(head, head_kind(config, "cuda"))
    hand = Hand(ROWS[-1], head.width, kernels.dtype)
    if exact is not None:
        hand.show_rows(2 * VERIFIED)
    spec = replace(spec, vocab=model.spec.vocab)
    first, blocks = (BlockModel(head, model, spec, hand, reads) for reads in (True, False))
    steps = GpuSteps(blocks, kernels, sizes._replace(rows=2 * VERIFIED), tables=target.tables)
    common = target, target.drafts, drafts_of(config), adaptive(config)
    return BlockChains(steps, *common, first, hand, target.hidden, head.mask, exact)


def _load_medusa(
    config: Config,
    source: ModelSource,
    spec: MedusaSpec,
    target: GpuSteps,
    report: Callable[[Progress], None],
) -> MedusaChains:
    assert isinstance(target.model, Decoder)
    assert source.draft is not None
    assert target.drafts is not None
    assert target.hidden is not None
    quantization, seed = config.speculative_quantization, config.random_seed or 0
    heads = load_medusa(source.draft, target.model, spec, dtype_of(config), quantization, report, seed)
    settings = drafts_of(config), adaptive(config), target.hidden
    return MedusaChains(heads, target, target.drafts, *settings)


def _load_head(
    config: Config,
    source: ModelSource,
    target: Decoder,
    dtype: str,
    report: Callable[[Progress], None],
    seed: int,
) -> Head:
    eagle = eagle_of(config, source, target.spec)
    if eagle is None:
        quantization = target.spec.quantized(config.quantization, "cuda")
        head: Head = load_predictor(source, target, dtype, quantization, report, seed)
    else:
        assert source.draft is not None
        kind, length = config.speculative_quantization, target.positions
        head = load_eagle(source.draft, target, eagle, dtype, kind, length, report, seed)
    if isinstance(head, Predictor | Eagle):
        narrow(head, read_tokens(config, target.spec.vocab))
    return head

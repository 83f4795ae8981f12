"""What an engine is made of, by its settings: the model's files, the workers, the scheduler."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from sgla.actors.pictures import PictureRoom
from sgla.config import Config
from sgla.defaults import Defaults, find_defaults
from sgla.media.pool import processes_of
from sgla.messages import Facts, Opened, Progress
from sgla.observe.steplog import RecordedCore
from sgla.sched.core import Core
from sgla.sched.limits import Limits
from sgla.sched.parts import PartedCore
from sgla.text.output import OutputStream
from sgla.text.pictures import Speller

if TYPE_CHECKING:
    from sgla.executor.base import Executor
    from sgla.executor.nodes import NodesExecutor
    from sgla.executor.procs import ProcsExecutor
    from sgla.hub.source import ModelSource
    from sgla.resolve import Resolved
    from sgla.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def find_model(config: Config, report: Callable[[Progress], None]) -> tuple[Config, ModelSource, Defaults]:
    """The model's files, downloaded if need be,
    ``config`` with every open value filled in, and how to sample. Blocks.

    Raises ConfigError.
    """
    found, source = look_up(config, report)
    defaults = find_defaults(config, source)
    for note in (*source.notes, *found.notes, *defaults.notes):
        log.warning("%s", note)
    return found.config, source, defaults


def look_up(config: Config, report: Callable[[Progress], None]) -> tuple[Resolved, ModelSource]:
    """The model's files, downloaded if need be, and its settings. Blocks. Raises ConfigError."""
    from sgla.hub.fetch import resolve_model
    from sgla.loading.source import configured_source, drafting
    from sgla.model.pooling import read_pooling
    from sgla.resolve import resolve

    source = configured_source(resolve_model(config, report), config)
    if config.speculative_model is not None:
        other = drafting(config)
        source = dataclasses.replace(source, draft=configured_source(resolve_model(other, report), other))
    pooled = read_pooling(source, config.task) is not None
    draft = None if source.draft is None else source.draft.config
    return resolve(config, model=source.config, pooled=pooled, draft=draft), source


def settle_device(config: Config) -> Config:
    """``config`` with the device chosen, which decides what a worker imports, and the number of nodes."""
    from sgla.resolve import resolve

    found = resolve(config).config
    return msgspec.structs.replace(config, device=found.device, nnodes=found.nnodes)


def spawn_workers(config: Config) -> ProcsExecutor | NodesExecutor | None:
    """Worker processes, which begin to import torch at once; None if the executor lives in this process."""
    if config.executor == "inline" or (config.executor == "fake" and not config.fake_step_ms):
        return None
    from sgla.executor.procs import ProcsExecutor, runner_for

    executor: ProcsExecutor | NodesExecutor
    if config.nnodes > 1:
        from sgla.executor.nodes import NodesExecutor
        from sgla.executor.ray import RayExecutor
        from sgla.observe.machine import detect

        kind = RayExecutor if config.executor == "ray" else NodesExecutor
        executor = kind(config, runner=runner_for(config), torch=detect().torch or "")
    else:
        executor = ProcsExecutor(config, runner=runner_for(config))
    executor.spawn()
    return executor


def make_local(config: Config, source: ModelSource) -> Executor:
    """The executor in this process that ``config.executor`` names. Imported late: inline needs torch."""
    if config.executor == "fake":
        from sgla.executor.fake import FakeExecutor

        return FakeExecutor.from_config(config, source)
    from sgla.executor.inline import InlineExecutor

    return InlineExecutor(config, source)


def make_core(config: Config, facts: Facts) -> Core | PartedCore:
    limits = make_limits(config, facts)
    if config.dp_attention:
        return PartedCore(limits, config.tp)
    if config.step_log:
        return RecordedCore(limits, config.step_log, facts.found)
    return Core(limits, facts.found)


def make_limits(config: Config, facts: Facts) -> Limits:
    """The scheduler's limits: what the workers have (facts) and what the user wants (config)."""
    return Limits(
        slots=facts.slots,
        groups=facts.groups,
        page_size=facts.page_size,
        context_len=facts.context_len,
        step_tokens=facts.step_tokens,
        costs=facts.costs,
        drafts=facts.drafts,
        leaves=facts.leaves,
        padded_drafts=facts.padded_drafts,
        searched_drafts=facts.searched_drafts,
        guided_drafts=facts.guided_drafts,
        canvas=facts.canvas,
        depth=config.depth or 2,
        brief_depth=config.brief_depth or 0,
        stages=config.pp,
        itl_target=config.itl_target_ms / 1000 if config.itl_target_ms else None,
        policy=config.policy,
        eviction=config.eviction,
        # Only the last token's hidden state can be had without those before it.
        prefix_cache=config.prefix_cache and (facts.pooling is None or facts.pooling.kind == "last"),
        encoder=facts.pooling is not None and facts.pooling.encoder,
        hidden=facts.hidden,
        experts=facts.experts,
        tiers=facts.tiers,
        write_policy=config.kv_write_policy,
        adapters=facts.adapters,
    )


def make_pictures(config: Config, source: ModelSource) -> tuple[Speller, PictureRoom] | tuple[None, None]:
    """What spells pictures in prompts, and what prepares them, for a model that takes them."""
    from sgla.model.vision.served import settings_of, vision_of

    vision, _ = vision_of(config, source)
    if vision is None:
        return None, None
    settings = settings_of(source.folder)
    room = PictureRoom(
        vision,
        source.config,
        settings,
        config.mm_processor_kwargs,
        processes_of(config.media_processes),
        config.media_cpu_seconds,
        config.media_kept,
        config.isolate_keys,
    )
    return Speller(vision, source.config, settings), room


def make_output(tokenizer: Tokenizer, opened: Opened) -> OutputStream:
    return OutputStream(tokenizer, opened.sampling, opened.submit.tokens)

"""The KV cache of a runner on a CPU: how much of the memory it gets beside the weights, and its tensors."""

from __future__ import annotations

from typing import NamedTuple

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.kernels.ops import Layer
from sgla.messages import VERIFIED, CacheGroup
from sgla.model.drafting import draft_bytes, draft_state, read_guessing
from sgla.model.sizes import weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import Demand, Pool, kv_groups, shared_out, state_of, whole_heads, with_draft
from sgla.model.whole_experts import with_copies
from sgla.worker.facts import drafts_of
from sgla.worker.kv import allocate_kv
from sgla.worker.memory import KVSize, cache_groups, check_weights, size_kv
from sgla.worker.place import Cpu
from sgla.worker.rewind import Rewind


class CpuKV(NamedTuple):
    """``own``: layers of the model; ``guessing``: of what guesses for it; ``weights``: bytes of both;
    ``paged``: groups of pages; ``rewind``: if rows with states guess."""

    own: list[Layer]
    guessing: list[Layer]
    groups: list[CacheGroup]
    paged: int
    size: KVSize
    weights: int
    rewind: Rewind | None

    @property
    def layers(self) -> list[Layer]:
        return self.own + self.guessing


def take_kv(
    config: Config,
    source: ModelSource,
    spec: ModelSpec,
    place: Cpu,
    dtype: str,
    demand: Demand,
    taken: int = 0,
) -> CpuKV:
    """``spec``: as this rank's stage has it. ``taken``: bytes of what is free that others will take. Raises
    OutOfMemory, also for weights that do not fit, and ConfigError."""
    shard = place.shard
    guessing = read_guessing(config, None if source.draft is None else source.draft.config, spec)
    ranks = shard.of_mlps.size
    whole = with_copies(config, spec)
    over = shard.size, config.mlps_over
    weights = weight_bytes(whole, dtype, config.quantization, ranks, "cpu", *over)
    weights += draft_bytes(config, guessing, spec, dtype, ranks=shard.size)
    check_weights(weights, place.free() - taken)
    own = shared_out(state_of(spec, shard.size, shard.rank), config.dcp)
    state = with_draft(own, draft_state(guessing, shard.size, shard.rank))
    kv_dtype = config.kv_dtype(dtype)
    groups = kv_groups(state, config.context_length or spec.context_len, kv_dtype)
    shared = whole_heads(config, spec, state, groups, kv_dtype)
    pool = Pool(groups, config.page_size, demand, shared)
    size = size_kv(
        pool,
        budget=config.kv_cache_bytes,
        available=place.free() - taken - weights,
        wanted_context=config.context_length,
        model_context=spec.context_len,
    )
    states = groups[-1].unit_bytes > 0
    # With stages the scheduler has rows leave checkpoints behind guesses.
    spare = VERIFIED if states and drafts_of(config) and shard.pipe is None else 0
    pages = [*size.pages[:-1], size.pages[-1] + spare]
    kv = allocate_kv(state, groups, pages, config.page_size, kv_dtype, slab=pool.slab)
    rewind = Rewind(kv, size.pages[-1]) if spare else None
    units = cache_groups(pool, size.pages)
    return CpuKV(kv[: len(own)], kv[len(own) :], units, len(groups) - states, size, weights, rewind)

"""Which places beside a GPU keep prefixes: the host's memory, a disk, a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sgla.config import Config
from sgla.errors import OutOfMemory
from sgla.messages import CacheGroup, Tier
from sgla.worker.disk import open_disk
from sgla.worker.gpu_tiers import GpuMemory, HostTier
from sgla.worker.memory import mib, tier_units
from sgla.worker.place import Gpu
from sgla.worker.store import open_store
from sgla.worker.tiers import FileTier

ABREAST = 8  # units of a copy that threads read or write at a time


class Places(NamedTuple):
    """``by_name``; what ``Facts`` ``told`` of them, and the keys that each has from the start."""

    by_name: dict[str, HostTier | FileTier]
    told: list[Tier]
    found: list[list[bytes]]


def open_places(
    config: Config,
    place: Gpu,
    groups: Sequence[CacheGroup],
    tensors: Sequence[Sequence[Tensor]],
    identity: str,
    staging: Tensor | None,
) -> Places:
    """``tensors``: of each cache group (``kv.memory_of``); ``identity``: what their KV depends on;
    ``staging``: see ``HostTier``. Raises ConfigError and OutOfMemory."""
    made = Places({}, [], [])
    nothing = [b""] * len(groups)
    if staging is not None:
        made.by_name["host"], tier = _host(config, place.shard.size, groups, tensors, staging)
        made.told.append(tier)
        made.found.append(nothing)
    memory = [GpuMemory(found, place.begin_thread) for found in tensors]
    rank = place.shard.rank, place.shard.size
    if config.kv_disk is not None:
        made.by_name["disk"], tier, keys = open_disk(config.kv_disk, identity, groups, memory, *rank, ABREAST)
        made.told.append(tier)
        made.found.append(keys)
    if config.kv_store is not None:
        size = config.page_size
        made.by_name["store"], tier = open_store(config.kv_store, identity, memory, size, *rank, ABREAST)
        made.told.append(tier)
        made.found.append(nothing)
    return made


def _host(
    config: Config,
    ranks: int,
    groups: Sequence[CacheGroup],
    tensors: Sequence[Sequence[Tensor]],
    staging: Tensor,
) -> tuple[HostTier, Tier]:
    assert config.kv_host_bytes is not None
    nbytes = [sum(tensor.shape[1] for tensor in found) for found in tensors]
    room = config.kv_host_bytes // ranks
    units = tier_units(room, [group.pages for group in groups], nbytes)
    if not all(units):
        raise OutOfMemory(
            f"--kv-host-bytes {config.kv_host_bytes} has no room for one page; raise it, or leave it out",
            param="kv_host_bytes",
        )
    try:
        return HostTier(tensors, units, staging), Tier("host", units)
    except RuntimeError as error:  # of pages that cannot be locked
        raise OutOfMemory(
            f"the host's memory ran out while {mib(room)} for prefixes were taken ({error}); lower "
            "--kv-host-bytes",
            param="kv_host_bytes",
        ) from error

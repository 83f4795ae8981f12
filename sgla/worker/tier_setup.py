"""How a rank gets the tiers of its KV cache that the settings ask for: files, stores and other servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgla.config import Config
from sgla.dist import Shard
from sgla.hub.source import ModelSource
from sgla.messages import CacheGroup
from sgla.worker.copies import Copies
from sgla.worker.disk import identity_of, open_disk
from sgla.worker.lent import Lending, Mover
from sgla.worker.parts import Part
from sgla.worker.peering import open_peer, peer_identity
from sgla.worker.store import open_store
from sgla.worker.tiers import UnitMemory


class Units(NamedTuple):
    """What tiers have copies of. ``memory``: of each cache group, where its units are on the device;
    ``parts``: of each, how they lie there; ``layout``: what else of that matters, the same on all ranks;
    ``long``: see ``identity_of``; ``mover``: of what other servers read or lend, and ``lending``, where that
    lies; ``abreast``: see ``FileTier``."""

    groups: Sequence[CacheGroup]
    memory: Sequence[UnitMemory]
    parts: Sequence[Sequence[Part]]
    layout: Sequence[object]
    long: Sequence[bool]
    mover: Mover
    lending: Lending
    abreast: int = 1


class Identity:
    """What the KV in tiers depends on beside the text: ``text`` tells what it was at the start."""

    def __init__(self, config: Config, source: ModelSource, units: Units) -> None:
        layout = [*units.layout, units.parts, [memory.nbytes for memory in units.memory]]
        self._of = lambda source: identity_of(config, source, layout, units.long)
        self.follow(source)

    def follow(self, source: ModelSource) -> None:
        """KV is of these weights from now on, which the scheduler keeps apart from that of others."""
        self._source, self.text = source, self._of(source)

    @property
    def changed(self) -> bool:
        return self._of(self._source) != self.text


def asks_for_tiers(config: Config) -> bool:
    """Beside one in the host's memory, which GPUs alone have."""
    return config.kv_disk is not None or config.kv_store is not None or config.role != "both"


def threaded(config: Config) -> int:
    """Tiers whose units threads read and write."""
    return (config.kv_disk is not None) + (config.kv_store is not None) + (config.role == "decode")


def open_tiers(
    copies: Copies, config: Config, source: ModelSource, shard: Shard, units: Units
) -> Identity | None:
    """Add the tiers of ``--kv-disk`` and ``--kv-store``, and what a server with a role has for the other one.
    None if there are no tiers at all. Raises ConfigError and OutOfMemory."""
    if not (copies.tiers or asks_for_tiers(config)):
        return None
    groups, memory, parts, layout, long, mover, lending, abreast = units
    identity, rank, size = Identity(config, source, units), shard.number, shard.count
    if config.kv_disk is not None:
        disk, tier, keys = open_disk(config.kv_disk, identity.text, groups, memory, rank, size, abreast)
        copies.add_tier(tier, disk, keys)
    if config.kv_store is not None:
        store, tier = open_store(
            config.kv_store, identity.text, memory, config.page_size, rank, size, abreast
        )
        copies.add_tier(tier, store, [b""] * len(groups))
    if config.role != "both":
        told = peer_identity(config, source, [*layout, parts], long)
        peer = open_peer(config, told, groups, memory, mover, lending, parts, shard, abreast)
        copies.add_tier(peer.told, peer.tier, [b""] * len(groups))
        copies.peer_ports, copies.identity = peer.ports, told
    return identity

"""What plans copy to and from beside the device's memory: tiers, and adapters in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from sgla.config import Config
from sgla.dist import Shard
from sgla.messages import CacheGroup, Copy, Moved, Tier
from sgla.worker.disk import open_disk
from sgla.worker.peering import open_peer
from sgla.worker.store import open_store
from sgla.worker.tiers import Memory


class Source(Protocol):
    """One of them, and what copies are made by. A tier is a target as well."""

    @property
    def under_way(self) -> bool:
        """Some copy has not been told of by ``ended``."""

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call."""

    def close(self) -> None: ...


class Copies:
    """Those of a rank. ``tiers``, ``found``, ``peer_ports`` and ``identity``: as in ``Facts``."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self.tiers: list[Tier] = []
        self.found: list[list[bytes]] = []
        self.peer_ports: list[int] = []
        self.identity: dict[str, str] = {}

    def add(self, name: str, source: Source) -> None:
        """``name``: that which a ``Copy`` has."""
        self._sources[name] = source

    def add_tier(self, tier: Tier, source: Source, keys: list[bytes]) -> None:
        """One behind those that there are. ``keys``: of what it has from the start, of each cache group."""
        self.add(tier.name, source)
        self.tiers.append(tier)
        self.found.append(keys)

    @property
    def under_way(self) -> bool:
        return any(source.under_way for source in self._sources.values())

    def begin(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            inward = copy.target in ("", "device", "places")
            self._sources[copy.source if inward else copy.target].begin(copy)

    def ended(self) -> list[Moved]:
        return [moved for source in self._sources.values() for moved in source.ended()]

    def close(self) -> None:
        for source in self._sources.values():
            source.close()


def open_files(
    copies: Copies,
    config: Config,
    shard: Shard,
    identity: str,
    groups: Sequence[CacheGroup],
    memory: Sequence[Memory],
    abreast: int = 1,
) -> None:
    """Add the tiers of ``--kv-disk`` and ``--kv-store``. ``identity``: what KV depends on
    (``disk.identity_of``); ``memory``: of each cache group; ``abreast``: see ``FileTier``. Raises
    ConfigError."""
    if config.kv_disk is not None:
        disk, tier, keys = open_disk(
            config.kv_disk, identity, groups, memory, shard.rank, shard.size, abreast
        )
        copies.add_tier(tier, disk, keys)
    if config.kv_store is not None:
        store, tier = open_store(
            config.kv_store, identity, memory, config.page_size, shard.rank, shard.size, abreast
        )
        copies.add_tier(tier, store, [b""] * len(groups))


def open_peers(
    copies: Copies,
    config: Config,
    shard: Shard,
    identity: dict[str, str],
    groups: Sequence[CacheGroup],
    memory: Sequence[Memory],
    abreast: int = 1,
) -> None:
    """Add what a server with a role has for the other one. ``identity``: what the two are to have in common
    (``peering.peer_identity``); see ``open_files``. Raises ConfigError."""
    peer = open_peer(config, identity, groups, memory, shard.rank, shard.size, abreast)
    copies.add_tier(peer.told, peer.tier, [b""] * len(groups))
    copies.peer_ports, copies.identity = peer.ports, identity

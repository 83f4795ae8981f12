"""What plans copy to and from beside the device's memory: tiers, and adapters in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgla.messages import Copy, Moved, Tier
from sgla.worker.tiers import Source


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
    def facts(self) -> dict[str, Any]:
        """The fields of ``Facts`` that tell of tiers."""
        names = ("tiers", "found", "peer_ports", "identity")
        return {name: getattr(self, name) for name in names}

    @property
    def under_way(self) -> bool:
        return any(source.under_way for source in self._sources.values())

    def begin(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            inward = copy.target in ("", "device", "places")
            self._sources[copy.source if inward else copy.target].begin(copy)

    def drop(self, transfers: Iterable[int]) -> None:
        """Nobody wants these any more: what can be given up ends soon, and has failed."""
        for transfer in transfers:
            for source in self._sources.values():
                source.drop(transfer)

    def ended(self) -> list[Moved]:
        return [moved for source in self._sources.values() for moved in source.ended()]

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

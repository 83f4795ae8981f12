"""Copies between the fake model's pages and tiers, each of which is checked."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sgla.messages import KEY, Copy, Tier, keys_in

WRONG = -1  # what means nothing


class FakeTiers:
    """``stores``: pages of each cache group that has them, on the device; ``states``: units of the last group
    where it has none. ``there``: of each tier and cache group, what its units hold and under which key."""

    def __init__(
        self, tiers: Sequence[Tier], groups: int, stores: list[list[list[int]]], states: list[tuple[int, int]]
    ) -> None:
        self.there: dict[str, list[dict[Any, tuple[bytes, Any]]]] = {
            tier.name: [{} for _ in range(groups)] for tier in tiers
        }
        self._shared = {tier.name for tier in tiers if tier.shared}  # whose units are known by their keys
        self._tiers, self._stores, self._states = tiers, stores, states
        self._copying: dict[int, tuple[Copy, list[list[Any]]]] = {}  # with what the sources held at first

    def begin(self, copy: Copy) -> None:
        """Its targets mean nothing until it has ended."""
        if not copy.target:
            self._copying[copy.transfer] = copy, []
        elif copy.source:
            self._copying[copy.transfer] = copy, self._contents(copy.source, copy.sources, copy.keys)
        for g, units in enumerate(copy.targets if copy.target not in self._shared else ()):
            for unit in array("i", units):
                self._put(copy.target, g, unit, b"", self._wrong(g))

    def end(self, transfer: int, ok: bool) -> list[bytes]:
        """Moved.there"""
        if transfer not in self._copying:
            return []
        copy, contents = self._copying.pop(transfer)
        if not copy.target:
            there = zip(copy.keys, self.there[copy.source])
            return [bytes(key in found for key in keys_in(keys)) for keys, found in there]
        assert self._contents(copy.source, copy.sources, copy.keys) == contents, (
            "a unit was written to while it was copied"
        )
        for g, (units, new) in enumerate(zip(copy.targets, contents, strict=True)):
            for unit, content, key in zip(array("i", units), new, keys_in(copy.keys[g]), strict=True):
                if copy.target not in self._shared:
                    found = self._get(copy.target, g, unit, b"")
                    assert found == self._wrong(g), "a unit was used before its copy had come"
                if ok:
                    self._put(copy.target, g, unit, key, content)
        return []

    def found(self) -> list[list[bytes]]:
        """Facts.found of the server after this one."""

        def keys(count: int, there: dict[int, tuple[bytes, Any]]) -> bytes:
            none = bytes(KEY), None
            return b"".join(there.get(unit, none)[0] or none[0] for unit in range(1, count + 1))

        return [
            [
                keys(count if tier.lasting else 0, there)
                for count, there in zip(tier.units, self.there[tier.name])
            ]
            for tier in self._tiers
        ]

    def _wrong(self, g: int) -> Any:
        return [WRONG] * len(self._stores[g][0]) if g < len(self._stores) else (WRONG, WRONG)

    def _contents(self, place: str, columns: list[bytes], keys: list[bytes]) -> list[list[Any]]:
        """Of a tier it is what it holds under these keys, as far as there are any."""
        found: list[list[Any]] = []
        for g, column in enumerate(columns):
            named = keys_in(keys[g]) or [b""] * (len(column) // 4)
            found.append([self._get(place, g, unit, key) for unit, key in zip(array("i", column), named)])
        return found

    def _get(self, place: str, g: int, unit: int, key: bytes) -> Any:
        if place == "device":
            return list(self._stores[g][unit]) if g < len(self._stores) else self._states[unit]
        name, content = self.there[place][g][key if place in self._shared else unit]
        assert key in (b"", name), "a tier is asked for what it has not"
        return content

    def _put(self, place: str, g: int, unit: int, key: bytes, content: Any) -> None:
        if place != "device":
            self.there[place][g][key if place in self._shared else unit] = key, content
        elif g < len(self._stores):
            self._stores[g][unit] = list(content)
        else:
            self._states[unit] = content

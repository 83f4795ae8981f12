"""What several ranks say, as one: of a host, and of several hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from sgla.messages import KEY, Facts, Moved, StepResult, Tier


class Results:
    """Of steps, which each of ``count`` ranks answers in part, or each of so many hosts."""

    def __init__(self, count: int) -> None:
        self._told = [deque[StepResult]() for _ in range(count)]

    def add(self, at: int, results: Iterable[StepResult]) -> None:
        """Of the ``at``-th, in the order of the steps."""
        self._told[at] += results

    def whole(self) -> list[StepResult]:
        """Of the steps that all have answered, in order."""
        count = min(map(len, self._told), default=0)
        return [_joined([told.popleft() for told in self._told]) for _ in range(count)]


def _joined(parts: Sequence[StepResult]) -> StepResult:
    if len(parts) == 1:
        return parts[0]
    return StepResult(
        step=0,
        tokens=b"",
        seconds=max(part.seconds for part in parts),
        gap=min(part.gap for part in parts),
        parts=[each for part in parts for each in part.parts or [part]],
    )


class Ends:
    """Of copies: what those of ``count`` that are done have told."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._told: dict[int, list[Moved]] = {}

    def add(self, moved: Moved) -> Moved | None:
        """The end of the copy when all have told of it."""
        told = self._told.setdefault(moved.transfer, [])
        told.append(moved)
        return common_end(self._told.pop(moved.transfer)) if len(told) == self._count else None


def common_end(told: Sequence[Moved]) -> Moved:
    """What all ranks can say of a copy."""
    there = [bytes(map(min, zip(*columns))) for columns in zip(*(moved.there for moved in told))]
    cached = min(moved.cached for moved in told)
    full = [b"".join(columns) for columns in zip(*(moved.full for moved in told if moved.full))]
    return Moved(told[0].transfer, all(moved.ok for moved in told), there, cached, full)


def common_facts(facts: Sequence[Facts]) -> Facts:
    """The first one's, with no more pages than any has, and no longer contexts."""
    slabs = {tuple(group.slab for group in f.groups) for f in facts}
    assert len(slabs) == 1, "ranks cut the memory of cache groups in other ways"
    same = zip(*(f.groups for f in facts))
    facts[0].groups = [min(groups, key=lambda group: group.pages) for groups in same]
    facts[0].context_len = min(f.context_len for f in facts)
    facts[0].tiers, facts[0].found = _common_tiers(facts)
    facts[0].peer_ports = [port for f in facts for port in f.peer_ports]
    return facts[0]


def _common_tiers(facts: Sequence[Facts]) -> tuple[list[Tier], list[list[bytes]]]:
    """No more units than any rank has, and what all ranks have found in them."""
    tiers, found = list[Tier](), list[list[bytes]]()
    for t, same in enumerate(zip(*(f.tiers for f in facts))):
        units = [min(counts) for counts in zip(*(tier.units for tier in same))]
        tiers.append(replace(same[0], units=units))
        if facts[0].found:
            columns = zip(*(f.found[t] for f in facts))
            found.append([_common_keys(keys, count) for keys, count in zip(columns, units)])
    return tiers, found


def _common_keys(columns: Sequence[bytes], units: int) -> bytes:
    first, *others = columns
    if all(other[: units * KEY] == first[: units * KEY] for other in others):
        return first[: units * KEY]
    keys = bytearray(units * KEY)
    for at in range(0, units * KEY, KEY):
        if len({column[at : at + KEY] for column in columns}) == 1:
            keys[at : at + KEY] = first[at : at + KEY]
    return bytes(keys)

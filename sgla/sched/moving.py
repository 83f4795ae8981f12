"""Units on their way between the device and tiers, and what those share who send and bring them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sgla.cache.pages import PagePool
from sgla.cache.radix import RadixCache
from sgla.cache.states import StatePool
from sgla.cache.tier import StorePool, TierPool
from sgla.cache.tree import TOKEN_BYTES, Marks, Node
from sgla.cache.window import WindowPool
from sgla.messages import Copy, Tier, int32
from sgla.sched.request import Request
from sgla.sched.stats import TierStats


class Numbers:
    """Of copies: 1, 2, 3 ..."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    def take(self) -> int:
        self._last += 1
        return self._last


@dataclass(slots=True)
class Arrival:
    """What a transfer to the device brings: units of the first ``count`` pages of a text, which belong to it
    until the tree takes them over. Of each group of pages ``pages`` has one a page, 0 where none comes;
    ``state`` stands behind the last; ``keys`` are of each group. ``rest``: of each group of pages the one in
    which the prompt of the request ``rid`` ends, or nothing."""

    namespace: str
    tokens: bytes
    marks: Marks
    count: int
    pages: list[list[int]]
    state: int
    keys: list[list[bytes]]
    rest: list[int]
    rid: str


@dataclass(slots=True)
class Transfer:
    """Units on their way between the device and the ``tier``, where it holds ``places``. It keeps ``node``
    locked, and holds ``held`` of what the tree has beside that path; both of each cache group. ``own``: units
    of each group of pages that nobody else has. ``waiters``: requests that are held until it is done."""

    tier: int
    places: list[list[int]]
    node: Node | None = None
    held: list[list[int]] = field(default_factory=list)
    own: list[list[int]] = field(default_factory=list)
    arrival: Arrival | None = None
    keys: list[list[bytes]] = field(default_factory=list)  # of what leaves, or is asked for
    waiters: list[str] = field(default_factory=list)
    asker: Request | None = None  # whose prompt the tier computes
    had: int = 0  # tokens of it that the tree had
    dropped: bool = False  # nobody wants it any more

    @property
    def asks(self) -> bool:
        """It is a question, and copies nothing."""
        return bool(self.keys) and self.node is None


class Pools:
    """Those of the device, by cache group: pages of whole histories, of windows, and states."""

    __slots__ = ("count", "pages", "states", "windows")

    def __init__(self, pages: PagePool, windows: Sequence[WindowPool], states: StatePool | None) -> None:
        self.pages, self.windows, self.states = pages, windows, states
        self.count = 1 + len(windows) + (states is not None)

    def hold(self, units: Sequence[Sequence[int]]) -> None:
        """Of each group but the first."""
        for pool, held in zip(self._loose, units[1:]):
            pool.hold(held)

    def unhold(self, units: Sequence[Sequence[int]]) -> None:
        for pool, held in zip(self._loose, units[1:]):
            pool.unhold(held)

    @property
    def paged(self) -> list[PagePool]:
        """But for states."""
        return [self.pages, *self.windows]

    @property
    def _loose(self) -> list[WindowPool | StatePool]:
        return [*self.windows, *([self.states] if self.states is not None else [])]


class Moving:
    """``under_way``: transfers that have begun or begin with the next plan, which takes ``copies``; the one
    behind it takes ``later``, what the next may still compute. ``told``, ``tiers`` and ``stats``: of each
    tier what workers say, the pools of its cache groups, and what to tell."""

    def __init__(
        self,
        cache: RadixCache,
        pools: Pools,
        tiers: Sequence[Tier],
        found: Sequence[Sequence[bytes]],
        page_size: int,
        numbers: Numbers,
    ) -> None:
        self.cache, self.pools, self.numbers = cache, pools, numbers
        self.told = list(tiers)
        self.tiers = [_pools(tier, there) for tier, there in zip(tiers, found or [[]] * len(tiers))]
        self.stats = [TierStats(name=tier.name, total=tier.units[0]) for tier in tiers]
        self.under_way: dict[int, Transfer] = {}
        self.copies: list[Copy] = []
        self.later: list[Copy] = []
        self.page_size, self.width = page_size, page_size * TOKEN_BYTES

    def begin(self, transfer: Transfer) -> int:
        number = self.numbers.take()
        self.under_way[number] = transfer
        return number

    def erase(self, tier: int, places: list[list[int]]) -> None:
        """Places hold nothing any more that may be found after a restart, or by others."""
        told = self.told[tier]
        if (told.lasting or told.early) and any(places):
            number = self.begin(Transfer(tier, []))
            self.later.append(Copy(number, "", told.name, [], columns(places)))

    def forget(self, tier: int, keys: Sequence[Sequence[bytes]]) -> None:
        self.erase(tier, [pool.forget_keys(named) for pool, named in zip(self.tiers[tier], keys)])


def _pools(tier: Tier, found: Sequence[bytes]) -> Sequence[TierPool | StorePool]:
    if tier.shared:
        return [StorePool() for _ in tier.units]
    named = found or [b""] * len(tier.units)
    return [TierPool(count, keys, ends=g > 0) for g, (count, keys) in enumerate(zip(tier.units, named))]


def columns(units: list[list[int]]) -> list[bytes]:
    return [int32(column) for column in units]


def joined(keys: list[list[bytes]]) -> list[bytes]:
    return [b"".join(column) for column in keys]

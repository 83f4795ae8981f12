"""Copies of what the prefix tree has in tiers beside the device:
saved when a request has computed it, loaded when another wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from msgspec.structs import replace

from sgla.cache.groups import Beside
from sgla.cache.pages import PagePool
from sgla.cache.radix import RadixCache
from sgla.cache.states import StatePool
from sgla.cache.tier import StorePool, TierPool
from sgla.cache.tree import TOKEN_BYTES, Marks, Node
from sgla.cache.window import WindowPool
from sgla.messages import Copy, Moved, Tier, int32
from sgla.sched.request import Request
from sgla.sched.stats import TierStats

# What is on its way out cannot be evicted meanwhile: a fourth of the device's pages at most, unless it is one
# text alone.
LEAVING = 4


class Numbers:
    """Of copies: 1, 2, 3 ..."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    @property
    def next(self) -> int:
        return self._last + 1

    def take(self) -> int:
        self._last += 1
        return self._last


@dataclass(slots=True)
class Arrival:
    """What a transfer to the device brings: units of the first ``count`` pages of a text, which belong to it
    until the tree takes them over. Of each group of pages ``pages`` has one a page, 0 where none comes;
    ``state`` stands behind the last; ``keys`` are of each group."""

    namespace: str
    tokens: bytes
    marks: Marks
    count: int
    pages: list[list[int]]
    state: int
    keys: list[list[bytes]]


@dataclass(slots=True)
class Transfer:
    """Units on their way between the device and the ``tier``, where it holds ``places``. It keeps ``node``
    locked, and holds ``held`` of what the tree has beside that path; both of each cache group. ``waiters``:
    requests that are held until it is done."""

    tier: int
    places: list[list[int]]
    node: Node | None = None
    held: list[list[int]] = field(default_factory=list)
    arrival: Arrival | None = None
    keys: list[list[bytes]] = field(default_factory=list)  # of what leaves, or is asked for
    waiters: list[str] = field(default_factory=list)
    asker: Request | None = None  # whose prompt the tier computes
    had: int = 0  # tokens of it that the tree had


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
    def _loose(self) -> list[WindowPool | StatePool]:
        return [*self.windows, *([self.states] if self.states is not None else [])]


class Transfers:
    """``under_way``: transfers that have begun or begin with the next plan, which takes ``copies``.
    Without tiers there are none, and it is not ``active``. ``numbers``: of all copies."""

    def __init__(
        self,
        cache: RadixCache,
        pools: Pools,
        tiers: Sequence[Tier],
        found: Sequence[Sequence[bytes]],
        page_size: int,
        numbers: Numbers,
        selective: bool = False,
    ) -> None:
        """``selective``: save what a request has found in the tree, which others will want again."""
        self.under_way: dict[int, Transfer] = {}
        self.copies: list[Copy] = []
        self.later: list[Copy] = []  # of what the plan being made may have computed
        self.active = bool(tiers)
        self.tiers = [_pools(tier, there) for tier, there in zip(tiers, found or [[]] * len(tiers))]
        self.stats = [TierStats(name=tier.name, total=tier.units[0]) for tier in tiers]
        self._told = list(tiers)
        self._selective = selective
        self._cache, self._pools, self._numbers = cache, pools, numbers
        self._page_size, self._width = page_size, page_size * TOKEN_BYTES
        self._coming: dict[bytes, int] = {}  # keys of pages, and the transfers that bring them
        self._leaving = [0] * len(tiers)  # pages on their way to each

    def load(self, request: Request) -> bool:
        """Have what follows behind the pages that the request found in the tree copied to the device, from
        the tier that has most of it, and hold the request until that is there. False: there is nothing, or no
        room for it."""
        if not self.active or not request.cacheable:
            return False
        first, last = request.shared, request.cacheable // self._page_size
        if last <= first:
            return False
        keys = request.chain(self._page_size, last)
        if number := self._coming.get(keys[first]):
            self.under_way[number].waiters.append(request.rid)
            return True
        marks, data = request.marks, request.data
        reach = self._cache.probe(request.namespace, data, last * self._page_size, marks)[1]
        node = self._cache.find(request.namespace, data, reach, marks)
        assert node is not None
        there = self._cache.units(node)
        ends = [self._end(pools, keys, first, there) for pools in self.tiers]
        end = max(ends, default=0)
        if self._look(request, keys, max(end, len(there.pages))):
            return True
        return end > first and self._bring(request, ends.index(end), keys[:end], there)

    def _look(self, request: Request, keys: list[bytes], end: int) -> bool:
        """Ask a shared tier what it has behind the first ``end`` pages, once a request, and hold it until
        that is known."""
        for tier, told in enumerate(self._told):
            if not told.shared or request.looked or len(keys) - end < told.least:
                continue
            if told.computes and (request.marks or request.outputs):
                continue
            request.looked = True
            asked = keys[request.shared :]
            named = [asked] * self._pools.count
            if told.computes:
                self._ask(tier, request, keys)
                return True
            number = self._begin(Transfer(tier, [], keys=named, waiters=[request.rid]))
            self.copies.append(Copy(number, told.name, "", [], [], _joined(named)))
            return True
        return False

    def _ask(self, tier: int, request: Request, keys: list[bytes]) -> None:
        """Have a tier compute what the tree lacks of a prompt, as far as steps will read it."""
        first, last, size = request.shared, len(keys), self._page_size
        named = [keys[first:]]
        named += [keys[max(first, pool.first(last * size)) :] for pool in self._pools.windows]
        if self._pools.states is not None:
            named.append(keys[-1:])
        asked = Transfer(tier, [], keys=named, waiters=[request.rid], asker=request, had=first * size)
        number = self._begin(asked)
        tokens, name = request.data[: last * self._width + TOKEN_BYTES], self._told[tier].name
        self.copies.append(Copy(number, name, "", [], [], _joined(named), tokens, request.namespace))

    def _end(self, tier: Sequence[TierPool | StorePool], keys: list[bytes], first: int, there: Beside) -> int:
        """How many pages are served by what the tree has and the tier beside it, or ``first``."""
        end, served = len(there.pages), -1
        while end < len(keys) and tier[0].has_key(keys[end]):
            end += 1
        while served != end and end > first:
            served = end
            for pool, copies, pages in zip(self._pools.windows, tier[1:], there.windows):
                at = end
                while at > pool.first(end * self._page_size):
                    at -= 1
                    if at not in pages and not copies.has_key(keys[at]):
                        end = at
            while self._pools.states is not None and end > first:
                if end in there.states or tier[-1].has_key(keys[end - 1]):
                    break
                end -= 1
        return max(end, first)

    def _bring(self, request: Request, tier: int, keys: list[bytes], there: Beside) -> bool:
        """Begin a transfer of what the tree lacks of ``keys``. False: there is no room for it, or it lacks
        nothing."""
        end, size = len(keys), self._page_size
        base = min(len(there.pages), end)
        node = self._cache.find(request.namespace, request.data, base * size, request.marks)
        assert node is not None
        firsts = [pool.first(end * size) for pool in self._pools.windows]
        held = [[], *([p for i, p in w.items() if f <= i < end] for f, w in zip(firsts, there.windows))]
        lacking = [list(range(base, end))]
        lacking += [[i for i in range(f, end) if i not in w] for f, w in zip(firsts, there.windows)]
        if self._pools.states is not None:
            held.append([there.states[end]] if end in there.states else [])
            lacking.append([] if end in there.states else [end - 1])
        self._cache.lock(node)
        self._pools.hold(held)
        if not any(lacking) or not self._has_room(lacking):
            self._pools.unhold(held)
            self._cache.unlock(node)
            return any(lacking) and self._await_room(request)
        units = self._take(lacking)
        pages = [[0] * end for _ in range(1 + len(firsts))]
        for column, indices, new in zip(pages, lacking, units):
            for i, unit in zip(indices, new):
                column[i] = unit
        state = units[-1][0] if self._pools.states is not None and units[-1] else 0
        named = [[keys[i] for i in indices] for indices in lacking]
        tokens = request.data[: end * self._width]
        arrival = Arrival(request.namespace, tokens, request.marks, end, pages, state, named)
        places = [[pool.place(key) for key in wanted] for pool, wanted in zip(self.tiers[tier], named)]
        for pool, held_places in zip(self.tiers[tier], places):
            pool.hold(held_places)
        number = self._begin(Transfer(tier, places, node, held, arrival))
        self.under_way[number].waiters.append(request.rid)
        self._coming |= dict.fromkeys(keys[request.shared :], number)
        name = self._told[tier].name
        request.brought = (name, end - request.shared)
        self.copies.append(Copy(number, name, "device", _columns(places), _columns(units), _joined(named)))
        return True

    def _await_room(self, request: Request) -> bool:
        """Hold the request until one of the transfers that may have the room is done."""
        for transfer in self.under_way.values():
            transfer.waiters.append(request.rid)
            return True
        return False

    def _has_room(self, lacking: list[list[int]]) -> bool:
        pools = self._pools
        there = [len(pools.pages) + self._cache.evictable]
        there += [len(pool) + pool.evictable for pool in pools.windows]
        if pools.states is not None:
            there.append(pools.states.available)
        return all(len(indices) <= room for indices, room in zip(lacking, there))

    def _take(self, lacking: list[list[int]]) -> list[list[int]]:
        """So many units of each group, which the caller owns; there is room."""
        pools, counts = self._pools, [len(indices) for indices in lacking]
        self._cache.evict(counts[0] - len(pools.pages))
        units = [pools.pages.alloc(counts[0]) if counts[0] else []]
        for pool, count in zip(pools.windows, counts[1:]):
            pool.evict(max(count - len(pool), 0))
            units.append(pool.alloc(count) if count else [])
        if pools.states is not None:
            units.append([pools.states.take()] if counts[-1] else [])
        return units

    def _arrive(self, arrival: Arrival, ok: bool) -> None:
        """The tree takes over what has come. What it has meanwhile, or all if ``not ok``, is free."""
        pools, left = self._pools, arrival.pages
        if ok:
            first, *windows = arrival.pages
            own, beside = self._cache.insert(
                self._cache.root, arrival.namespace, arrival.tokens, first, windows, arrival.marks
            )
            left = [list(own), *beside]
        for pool, units in zip((pools.pages, *pools.windows), left):
            pool.free(unit for unit in units if unit)
        if not arrival.state:
            return
        assert pools.states is not None
        length = arrival.count * self._page_size
        node = self._cache.find(arrival.namespace, arrival.tokens, length, arrival.marks) if ok else None
        if node is not None and not pools.states.has(node.state):
            [node.state] = pools.states.give((arrival.state,), held=False)
        else:
            pools.states.free((arrival.state,))

    def save(self, request: Request, count: int) -> None:
        """Have what the tree has of the request's first ``count`` pages copied to each tier that lacks it.
        Steps that have been planned compute it; the tree has all pages."""
        if not self.active or not count:
            return
        tokens = request.tokens[: count * self._page_size].tobytes()
        node = self._cache.find(request.namespace, tokens, count * self._page_size, request.marks)
        if node is None:
            return
        keys = request.chain(self._page_size, count)
        there = self._cache.units(node)
        units = [dict(enumerate(there.pages)), *there.windows]
        if self._pools.states is not None:
            units.append({end - 1: unit for end, unit in there.states.items()})
        for tier, told in enumerate(self._told):
            again = request.borrowed if self._selective and not told.early else count
            if again and not told.computes:
                self._save(tier, node, keys, [{i: u for i, u in g.items() if i < again} for g in units])

    def save_early(self, request: Request) -> None:
        """Have the pages of whole histories that the tree has of a prompt copied to tiers where others wait
        for them, beside the steps that read its rest."""
        early = [tier for tier, told in enumerate(self._told) if told.early]
        if not early or not request.shared or request.node is None:
            return
        keys = request.chain(self._page_size, request.shared)
        pages = dict(enumerate(self._cache.units(request.node).pages))
        for tier in early:
            self._save(tier, request.node, keys, [pages, *[{}] * (self._pools.count - 1)])

    def _save(self, tier: int, node: Node, keys: list[bytes], there: list[dict[int, int]]) -> None:
        named: list[list[bytes]] = []
        units, places = list[list[int]](), list[list[int]]()
        total = self._pools.pages.total
        leaving = self._leaving[tier]
        few = leaving and not self._told[tier].early
        room = max(total // LEAVING - leaving, 0) if few else total
        for pool, found in zip(self.tiers[tier], there):
            pool.use(keys)
            wanted = [i for i in sorted(found) if pool.lacks(keys[i])][:room]
            received = list[tuple[int, int]]()
            for i in wanted:
                if not (place := pool.receive(keys[i])):
                    break
                received.append((i, place))
            named.append([keys[i] for i, _ in received])
            units.append([found[i] for i, _ in received])
            places.append([place for _, place in received])
        if not any(units):
            return
        self._leaving[tier] += len(units[0])
        self._cache.lock(node)
        self._pools.hold(units)
        number = self._begin(Transfer(tier, places, node, [[], *units[1:]], keys=named))
        name = self._told[tier].name
        self.later.append(Copy(number, "device", name, _columns(units), _columns(places), _joined(named)))

    def forget(self, request: Request) -> None:
        """Nothing of the request's text is left in any tier."""
        if self.active:
            keys = request.chain(self._page_size, len(request.tokens) // self._page_size)
            for tier in range(len(self.tiers)):
                self._forget(tier, [keys] * self._pools.count)

    def _forget(self, tier: int, keys: Sequence[Sequence[bytes]]) -> None:
        self._erase(tier, [pool.forget_keys(named) for pool, named in zip(self.tiers[tier], keys)])

    def flush(self) -> None:
        """Forget what nobody holds."""
        for tier, pools in enumerate(self.tiers):
            self._erase(tier, [pool.flush() for pool in pools])

    def _erase(self, tier: int, places: list[list[int]]) -> None:
        """Places hold nothing any more that may be found after a restart, or by others."""
        told = self._told[tier]
        if (told.lasting or told.early) and any(places):
            number = self._begin(Transfer(tier, []))
            self.later.append(Copy(number, "", self._told[tier].name, [], _columns(places)))

    def _begin(self, transfer: Transfer) -> int:
        number = self._numbers.take()
        self.under_way[number] = transfer
        return number

    def begin(self) -> None:
        """A plan begins: all that the plans before have computed may leave with it."""
        self.copies += self.later
        self.later = []

    def moved(self, moved: Moved) -> list[str]:
        """A transfer has ended. Returns who waited for it. Of one that has failed nothing is left, so that
        nobody tries again."""
        transfer = self.under_way.pop(moved.transfer)
        stats, arrival = self.stats[transfer.tier], transfer.arrival
        if transfer.node is not None:
            if arrival is not None:
                self._arrive(arrival, moved.ok)
            self._pools.unhold(transfer.held)
            self._cache.unlock(transfer.node)
        stats.failed += not moved.ok
        columns = zip(self.tiers[transfer.tier], transfer.places)
        if arrival is not None:
            self._coming = {key: n for key, n in self._coming.items() if n != moved.transfer}
            self._erase(transfer.tier, [pool.leave(places) for pool, places in columns])
            stats.loaded += moved.ok * len(transfer.places[0])
            if not moved.ok or self._told[transfer.tier].computes:
                self._forget(transfer.tier, arrival.keys)
        elif transfer.node is not None:
            self._leaving[transfer.tier] -= len(transfer.places[0])
            self._erase(transfer.tier, [pool.received(places, moved.ok) for pool, places in columns])
            stats.saved += moved.ok * len(transfer.places[0])
        if transfer.keys and moved.ok:
            self._seen(transfer, moved.there)
        if (asker := transfer.asker) is not None:
            asker.most_cached = max(transfer.had, moved.cached)
            stats.asked += 1
            stats.unanswered += not (moved.ok and all(map(all, moved.there)))
        return transfer.waiters

    def _seen(self, transfer: Transfer, there: Sequence[bytes]) -> None:
        """A shared tier has what was written, or what was found ``there``."""
        for g, (pool, keys) in enumerate(zip(self.tiers[transfer.tier], transfer.keys)):
            if isinstance(pool, StorePool):
                pool.seen(keys if transfer.node is not None else compress(keys, there[g]))

    @property
    def units(self) -> int:
        """In all tiers."""
        return sum(pool.cached for pools in self.tiers for pool in pools)

    def told(self) -> list[TierStats]:
        """What to tell of each tier."""
        now = zip(self.stats, self.tiers)
        asking = [t.tier for t in self.under_way.values() if t.asker is not None]
        return [
            replace(stats, cached=pools[0].cached, asking=asking.count(tier))
            for tier, (stats, pools) in enumerate(now)
        ]

    def owned(self, group: int) -> list[int]:
        """Units of the device that belong to transfers."""
        arrivals = [t.arrival for t in self.under_way.values() if t.arrival is not None]
        if group == len(self._pools.windows) + 1:
            return [arrival.state for arrival in arrivals if arrival.state]
        return [unit for arrival in arrivals for unit in arrival.pages[group] if unit]

    def held(self, group: int) -> list[int]:
        """Units of the tree that transfers hold, of a group beside the first."""
        return [unit for t in self.under_way.values() if t.node for unit in t.held[group]]

    def check(self) -> None:
        """Raises AssertionError if a unit of a tier is lost or doubled."""
        for tier, pools in enumerate(self.tiers):
            of_tier = [t.places for t in self.under_way.values() if t.tier == tier and t.node is not None]
            for g, pool in enumerate(pools):
                pool.check_owners([], [place for places in of_tier for place in places[g]])


def _pools(tier: Tier, found: Sequence[bytes]) -> Sequence[TierPool | StorePool]:
    if tier.shared:
        return [StorePool() for _ in tier.units]
    return [TierPool(count, keys) for count, keys in zip(tier.units, found or [b""] * len(tier.units))]


def _columns(units: list[list[int]]) -> list[bytes]:
    return [int32(column) for column in units]


def _joined(keys: list[list[bytes]]) -> list[bytes]:
    return [b"".join(column) for column in keys]

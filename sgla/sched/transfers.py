"""Copies of what the prefix tree has in tiers beside the device: saved when a request has computed it,
brought when another wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from msgspec.structs import replace

from sgla.cache.groups import Beside
from sgla.cache.past import Past
from sgla.cache.radix import RadixCache
from sgla.cache.tier import StorePool, TierPool
from sgla.cache.tree import TOKEN_BYTES
from sgla.messages import Copy, Moved, Tier
from sgla.sched.moving import Arrival, Moving, Numbers, Pools, Transfer, columns, joined
from sgla.sched.request import Request
from sgla.sched.rests import Rests
from sgla.sched.saving import Saving
from sgla.sched.stats import TierStats

Slack = Callable[[int], float]


class Transfers:
    """Without tiers there are none, and it is not ``active``. ``saving``: what leaves the device.
    ``dropped``: transfers that nobody wants any more, for the next plan. ``past``: texts that came, too."""

    def __init__(
        self,
        cache: RadixCache,
        pools: Pools,
        tiers: Sequence[Tier],
        found: Sequence[Sequence[bytes]],
        page_size: int,
        numbers: Numbers,
        rests: Rests,
        policy: str = "write_through",
    ) -> None:
        """``numbers``: of all copies. ``rests``: who gets the ends of prompts. ``policy``: see ``Saving``."""
        self.active, self.past = bool(tiers), Past()
        self._moving = Moving(cache, pools, tiers, found, page_size, numbers)
        self.saving = Saving(self._moving, policy)
        self.dropped: list[int] = []
        self._cache, self._pools, self._rests, self._page_size = cache, pools, rests, page_size
        self._coming: dict[bytes, int] = {}  # keys of pages, and the transfers that bring them

    @property
    def keeps(self) -> bool:
        """Some tier has what the tree has lost. One that computes it is not asked before a request's turn."""
        return any(not told.computes for told in self._moving.told)

    def load(self, request: Request, first: int, most: int | None = None, slack: Slack | None = None) -> bool:
        """Have what follows behind the ``first`` pages, which the tree has, copied to the device, from the
        tier that has most of it, and hold the request until that is there. False: there is nothing, or no
        room for it. ``most``: the request's turn has not come, and so many pages may be brought. ``slack``:
        else, of ``Copy``, for the token that is read first behind what comes."""
        if not self.active or not request.cacheable:
            return False
        last = request.cacheable // self._page_size
        if last <= first:
            return False
        keys = request.chain(self._page_size, last)
        if number := self._coming.get(keys[first]):
            self._moving.under_way[number].waiters.append(request.rid)
            return True
        marks, data = request.marks, request.data
        reach = self._cache.probe(request.namespace, data, last * self._page_size, marks)[1]
        node = self._cache.find(request.namespace, data, reach, marks)
        assert node is not None
        there = self._cache.units(node)
        ends = [self._end(pools, keys, first, there) for pools in self._moving.tiers]
        end = max(ends, default=0)
        if self._look(request, keys, first, max(end, len(there.pages)), early=most is not None):
            return True
        if most is not None and end - len(there.pages) > most:
            return False
        if end <= first:
            return False
        seconds = 0.0 if slack is None else slack(end * self._page_size)
        tier = ends.index(end)
        rest = self._rest(request) if end == last and self._moving.told[tier].computes else b""
        if not all(pool.has_key(rest) for pool in self._moving.tiers[tier]):
            rest = b""
        return self._bring(request, tier, keys[:end], first, there, most is not None, seconds, rest)

    def _rest(self, request: Request) -> bytes:
        """``Request.rest``, unless there are states, which stand at the ends of pages alone."""
        return b"" if self._pools.states is not None else request.rest(self._page_size)

    def _look(self, request: Request, keys: list[bytes], first: int, end: int, early: bool) -> bool:
        """Ask a shared tier what it has behind the first ``end`` pages, once a request, and hold it until
        that is known. What a tier computes for it is not kept for long, so it is not asked ``early``."""
        for tier, told in enumerate(self._moving.told):
            if not told.shared or request.looked or len(keys) - end < told.least:
                continue
            if told.computes and (early or request.marks or request.outputs):
                continue
            request.looked = True
            asked = keys[first:]
            named = [asked] * self._pools.count
            if told.computes:
                self._ask(tier, request, keys, first)
                return True
            number = self._moving.begin(Transfer(tier, [], keys=named, waiters=[request.rid]))
            self._moving.copies.append(Copy(number, told.name, "", [], [], joined(named)))
            return True
        return False

    def _ask(self, tier: int, request: Request, keys: list[bytes], first: int) -> None:
        """Have a tier compute what the tree lacks of a prompt, as far as steps will read it."""
        last, size, rest = len(keys), self._page_size, self._rest(request)
        named = [keys[first:]]
        named += [keys[max(first, pool.first(last * size)) :] for pool in self._pools.windows]
        if self._pools.states is not None:
            named.append(keys[-1:])
        named = [wanted + [rest] * bool(rest) for wanted in named]
        asked = Transfer(tier, [], keys=named, waiters=[request.rid], asker=request, had=first * size)
        number = self._moving.begin(asked)
        tokens = request.data if rest else request.data[: last * self._moving.width + TOKEN_BYTES]
        name, named_keys = self._moving.told[tier].name, joined(named)
        self._moving.copies.append(Copy(number, name, "", [], [], named_keys, tokens, request.namespace))

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

    def _bring(
        self,
        request: Request,
        tier: int,
        keys: list[bytes],
        first: int,
        there: Beside,
        early: bool,
        slack: float,
        rest: bytes,
    ) -> bool:
        """Begin a transfer of what the tree lacks of ``keys``, and of the ``rest`` behind these. False: there
        is no room for it, or it lacks nothing."""
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
        if rest:
            keys, lacking = [*keys, rest], [[*indices, end] for indices in lacking]
        self._cache.lock(node)
        self._pools.hold(held)
        if not any(lacking) or not self._has_room(lacking):
            self._pools.unhold(held)
            self._cache.unlock(node)
            return any(lacking) and not early and self._await_room(request)
        units = self._take(lacking)
        pages = [[0] * len(keys) for _ in range(1 + len(firsts))]
        for column, indices, new in zip(pages, lacking, units):
            for i, unit in zip(indices, new):
                column[i] = unit
        state = units[-1][0] if self._pools.states is not None and units[-1] else 0
        named = [[keys[i] for i in indices] for indices in lacking]
        tokens = request.data[: end * self._moving.width]
        ends_in = [column.pop() for column in pages] if rest else []
        arrival = Arrival(
            request.namespace, tokens, request.marks, end, pages, state, named, ends_in, request.rid
        )
        places = [
            [pool.place(key) for key in wanted] for pool, wanted in zip(self._moving.tiers[tier], named)
        ]
        for pool, held_places in zip(self._moving.tiers[tier], places):
            pool.hold(held_places)
        number = self._moving.begin(Transfer(tier, places, node, held, arrival=arrival))
        self._moving.under_way[number].waiters.append(request.rid)
        self._coming |= dict.fromkeys(keys[first:end], number)
        name = self._moving.told[tier].name
        request.brought = (name, end - first)
        ends = columns(places), columns(units), joined(named)
        self._moving.copies.append(Copy(number, name, "device", *ends, slack=slack))
        return True

    def _await_room(self, request: Request) -> bool:
        """Hold the request until one of the transfers that may have the room is done."""
        for transfer in self._moving.under_way.values():
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

    def _arrive(self, arrival: Arrival, ok: bool, waiters: Sequence[str]) -> None:
        """The tree takes over what has come. What it has meanwhile, or all if ``not ok``, is free."""
        pools, left = self._pools, arrival.pages
        if arrival.rest and ok and arrival.rid in waiters:
            self._rests.keep(arrival.rid, arrival.rest)
        else:
            self._rests.free(arrival.rest)
        if ok:
            first, *windows = arrival.pages
            own, beside = self._cache.insert(
                self._cache.root, arrival.namespace, arrival.tokens, first, windows, arrival.marks
            )
            left = [list(own), *beside]
            self.past.add(arrival.namespace, arrival.tokens, 0)
        for pool, units in zip(pools.paged, left):
            pool.free(unit for unit in units if unit)
        if pools.states is None or not arrival.state:
            return
        length = arrival.count * self._page_size
        node = self._cache.find(arrival.namespace, arrival.tokens, length, arrival.marks) if ok else None
        if node is not None and not pools.states.has(node.state):
            [node.state] = pools.states.give((arrival.state,), held=False)
        else:
            pools.states.free((arrival.state,))

    def forget(self, request: Request) -> None:
        """Nothing of the request's text is left in any tier."""
        if self.active:
            keys = request.chain(self._page_size, len(request.tokens) // self._page_size)
            for tier in range(len(self._moving.tiers)):
                self._moving.forget(tier, [keys] * self._pools.count)

    def flush(self) -> None:
        """Forget what nobody holds."""
        for tier, pools in enumerate(self._moving.tiers):
            self._moving.erase(tier, [pool.flush() for pool in pools])

    def begin(self) -> None:
        """A plan begins: all that the plans before have computed may leave with it."""
        self.saving.go_on()
        self._moving.copies += self._moving.later
        self._moving.later = []

    @property
    def waits(self) -> bool:
        """Something is for the next plan, or for the one behind it."""
        return bool(self._moving.copies or self._moving.later or self.dropped)

    @property
    def under_way(self) -> bool:
        """Some transfer is, or begins with the next plan."""
        return bool(self._moving.under_way)

    def take(self) -> tuple[list[Copy], list[int]]:
        """What is for the plan that is made: copies, and transfers that nobody wants any more."""
        copies, self._moving.copies = self._moving.copies, []
        dropped, self.dropped = self.dropped, []
        return copies, dropped

    def leave(self, rid: str) -> None:
        """A request that is held has ended. What was to come for it alone is given up."""
        for number, transfer in self._moving.under_way.items():
            if rid not in transfer.waiters:
                continue
            transfer.waiters.remove(rid)
            if not transfer.waiters and (transfer.arrival is not None or transfer.asks):
                transfer.dropped = True
                self.dropped.append(number)
                self._coming = {key: n for key, n in self._coming.items() if n != number}
            return

    def moved(self, moved: Moved) -> list[str]:
        """A transfer has ended. Returns who waited for it. Of one that has failed nothing is left, so that
        nobody tries again."""
        transfer = self._moving.under_way.pop(moved.transfer)
        stats, arrival = self._moving.stats[transfer.tier], transfer.arrival
        if transfer.node is not None:
            if arrival is not None:
                self._arrive(arrival, moved.ok, transfer.waiters)
            self._pools.unhold(transfer.held)
            for own, units in zip(self._pools.paged, transfer.own):
                own.free(units)
            self._cache.unlock(transfer.node)
        stats.failed += not (moved.ok or transfer.dropped)
        columns = zip(self._moving.tiers[transfer.tier], transfer.places)
        if arrival is not None:
            self._coming = {key: n for key, n in self._coming.items() if n != moved.transfer}
            self._moving.erase(transfer.tier, [pool.leave(places) for pool, places in columns])
            stats.loaded += moved.ok * len(transfer.places[0])
            if not (moved.ok or transfer.dropped) or self._moving.told[transfer.tier].computes:
                self._moving.forget(transfer.tier, arrival.keys)
        elif transfer.node is not None:
            self.saving.leaving[transfer.tier] -= len(transfer.places[0])
            self._moving.erase(transfer.tier, [pool.received(places, moved.ok) for pool, places in columns])
            stats.saved += moved.ok * len(transfer.places[0])
            self.saving.lack(transfer.tier, moved.full)
        if transfer.keys and moved.ok:
            self._seen(transfer, moved.there)
        if (asker := transfer.asker) is not None:
            asker.most_cached = max(transfer.had, moved.cached)
            stats.asked += 1
            stats.unanswered += not (transfer.dropped or (moved.ok and all(map(all, moved.there))))
        return transfer.waiters

    def _seen(self, transfer: Transfer, there: Sequence[bytes]) -> None:
        """A shared tier has what was written, or what was found ``there``."""
        for g, (pool, keys) in enumerate(zip(self._moving.tiers[transfer.tier], transfer.keys)):
            if isinstance(pool, StorePool):
                pool.seen(keys if transfer.node is not None else compress(keys, there[g]))

    @property
    def units(self) -> int:
        """In all tiers."""
        return sum(pool.cached for pools in self._moving.tiers for pool in pools)

    def told(self) -> list[TierStats]:
        """What to tell of each tier."""
        now = zip(self._moving.stats, self._moving.tiers)
        asking = [t.tier for t in self._moving.under_way.values() if t.asker is not None]
        return [
            replace(stats, total=pools[0].room, cached=pools[0].cached, asking=asking.count(tier))
            for tier, (stats, pools) in enumerate(now)
        ]

    def owned(self, group: int) -> list[int]:
        """Units of the device that belong to transfers, and to requests that wait."""
        arrivals = [t.arrival for t in self._moving.under_way.values() if t.arrival is not None]
        if group == len(self._pools.windows) + 1:
            return [arrival.state for arrival in arrivals if arrival.state]
        coming = [unit for arrival in arrivals for unit in arrival.pages[group] if unit]
        coming += [arrival.rest[group] for arrival in arrivals if arrival.rest]
        leaving = [unit for t in self._moving.under_way.values() if t.own for unit in t.own[group]]
        return coming + leaving + self._rests.owned(group)

    def held(self, group: int) -> list[int]:
        """Units of the tree that transfers hold, of a group beside the first."""
        return [unit for t in self._moving.under_way.values() if t.node for unit in t.held[group]]

    def check(self) -> None:
        """Raises AssertionError if a unit of a tier is lost or doubled."""
        for tier, pools in enumerate(self._moving.tiers):
            of_tier = [
                t.places for t in self._moving.under_way.values() if t.tier == tier and t.node is not None
            ]
            for g, pool in enumerate(pools):
                pool.check_owners([], [place for places in of_tier for place in places[g]])

"""The pages of all cache groups: of pools of their own, or of one memory that they share.

Numbers of pages are lists with one for each cache group. What is ``available`` is compared with what pages
are ``worth``, lists with one for each memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgla.cache.pages import PagePool
from sgla.cache.radix import NullCache, RadixCache
from sgla.cache.slabs import Slabs
from sgla.cache.states import StatePool
from sgla.cache.window import WindowPool
from sgla.sched.limits import Limits


class Stock:
    """``pool`` and ``windows`` have free pages, and the tree, ``cache``, such as it can lose for others."""

    def __init__(self, limits: Limits, states: StatePool | None) -> None:
        first, *others = limits.paged
        slabs = self._slabs(limits)
        self.pool = PagePool(first.pages, slabs)
        self.windows = [
            WindowPool(group.pages, group.window, limits.page_size, slabs, g)
            for g, group in enumerate(others, 1)
        ]
        kind = RadixCache if limits.prefix_cache else NullCache
        self.cache = kind(limits.page_size, self.pool, limits.eviction, self.windows, states)

    def _slabs(self, limits: Limits) -> Slabs | None:
        return None

    @property
    def available(self) -> list[int]:
        """Free, or to be made so by eviction."""
        return [len(self.pool) + self.cache.evictable, *(len(pool) + pool.evictable for pool in self.windows)]

    def worth(self, pages: list[int]) -> list[int]:
        return pages

    def fits(self, n: int) -> bool:
        """Whether there are ``n`` pages of each group."""
        return n <= min(self.available)

    def short(self, n: int) -> list[int]:
        """What ``n`` pages of each group are worth, where they are not there."""
        return [n if n > there else 0 for there in self.available]

    @property
    def room(self) -> int:
        """How many pages of each group there are at most."""
        return min(self.available)

    @property
    def free(self) -> int:
        """Pages of the first group that can be had without a loss of tokens."""
        return len(self.pool)

    @property
    def private(self) -> int:
        """Pages of the first group that requests have."""
        return self.pool.total - 1 - len(self.pool) - self.cache.pages

    def take(self, n: int) -> list[list[int]]:
        """``n`` pages of each group, which the caller owns, evicting if need be; or nothing: there are not as
        many."""
        if not self.fits(n):
            return []
        self.cache.evict(n - len(self.pool))
        pages = [self.pool.alloc(n)]
        for pool in self.windows:
            pool.evict(max(n - len(pool), 0))
            pages.append(pool.alloc(n))
        return pages

    def check(self) -> None:
        """Raises AssertionError if pages do not add up."""
        self.pool.check()


class SharedStock(Stock):
    """Of one memory, which a group that is short gets from the others, slab by slab. The tree loses what
    nobody has used for longest, be it tokens or pages of a window; but those that requests have slid past
    before, as long as they are half of a window's or more."""

    def _slabs(self, limits: Limits) -> Slabs:
        first = limits.groups[0]
        self._memory = Slabs((first.pages - 1) // first.slab, [group.slab for group in limits.paged])
        # Who has fewest pages of a slab is served first: what is left beside its pages is of least use.
        self._order = sorted(range(len(limits.paged)), key=lambda g: limits.paged[g].slab)
        return self._memory

    @property
    def available(self) -> list[int]:
        return [self._memory.available]

    def worth(self, pages: list[int]) -> list[int]:
        return [self._memory.worth(pages)]

    def fits(self, n: int) -> bool:
        return self._memory.fits([n] * len(self._order))

    def short(self, n: int) -> list[int]:
        return [0] if self.fits(n) else self.worth([n] * len(self._order))

    @property
    def room(self) -> int:
        low, high = 0, self._memory.available // self._memory.worth([1] * len(self._order))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    @property
    def free(self) -> int:
        return self._memory.obtainable(0) - self.cache.evictable

    @property
    def private(self) -> int:
        return self._memory.out(0) - self.cache.pages

    def take(self, n: int) -> list[list[int]]:
        if not self.fits(n):
            return []
        pools = [self.pool, *self.windows]
        pages: list[list[int]] = [[] for _ in pools]
        lacking = [n] * len(pools)
        for g in self._order:
            lacking[g] = 0
            while not pages[g]:
                pages[g] = self._part(pools[g], n, lacking)
                lost = bool(pages[g]) or self._lose()
                assert lost, "pages that can be had are not there"
        return pages

    def _part(self, pool: PagePool, n: int, others: list[int]) -> list[int]:
        """``n`` pages of one group, if they are free and the others can have theirs beside them: not if they
        are of slabs of nobody's while the tree has pages beside the group's own fixed ones."""
        if len(pool) < n:
            return []
        pages = pool.alloc(n)
        if self._memory.fits(others):
            return pages
        pool.free(pages)
        return []

    def _lose(self) -> bool:
        """The tree loses some pages, if it can."""
        idle = [pool for pool in self.windows if pool.evictable]
        passed = next((pool for pool in idle if pool.half_passed), None)
        oldest = passed or min(idle, key=lambda pool: pool.oldest, default=None)
        if oldest is not None and (oldest is passed or oldest.oldest < self.cache.oldest):
            oldest.evict(1)
            return True
        return self.cache.evict(self._memory.pages[0]) > 0

    def check(self) -> None:
        super().check()
        fixed: list[Sequence[int]] = [self.cache.locked(self.pool.out())]
        fixed += [pool.fixed() for pool in self.windows]
        self._memory.check([pool.out() for pool in (self.pool, *self.windows)], fixed)

"""Units of the prefix tree that it may lose one by one, and go on with the tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sgla.cache.pages import PagePool
from sgla.cache.slabs import Slabs


class LoosePool(PagePool):
    """A unit is free, owned by one request, or in the prefix tree, held there by so many requests.

    The tree may lose any unit that nobody holds. It knows its units by tickets, numbers that are given out
    once: that of a unit it has lost is void, and the unit need not know where it stood. Unit 0 and ticket 0
    stand for none.
    """

    __slots__ = ("_given", "_holds", "_idle", "_page", "_passed", "_retired", "_ticket", "now")

    def __init__(self, total: int, slabs: Slabs | None = None, group: int = 0) -> None:
        super().__init__(total, slabs, group)
        self.now = 0  # on the tree's clock
        self._retired: list[int] = []  # units that nobody gets, since there is no room for them
        self._given = 0  # tickets
        self._ticket = [0] * total  # of each unit
        self._page: dict[int, int] = {}  # the unit of each valid ticket
        self._holds = [0] * total
        # In the tree and held by nobody, longest first; since when.
        self._idle: OrderedDict[int, int] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()  # those of them that were made and left behind

    @property
    def evictable(self) -> int:
        """Units in the tree that no request holds."""
        return len(self._idle)

    @property
    def cached(self) -> int:
        """Units in the tree."""
        return len(self._page)

    def has(self, ticket: int) -> bool:
        """Whether the tree still has that unit."""
        return ticket in self._page

    def page(self, ticket: int) -> int:
        """The unit of a valid ticket."""
        return self._page[ticket]

    def give(self, pages: Iterable[int], held: bool) -> list[int]:
        """The tree takes over ``pages``, units of a request, which goes on to hold them if they are ``held``.
        Returns their tickets."""
        tickets = []
        for page in pages:
            if page:
                self._given += 1
                self._ticket[page], self._page[self._given] = self._given, page
                self._holds[page] = int(held)
                if not held:
                    self._rest(page)
            tickets.append(self._given if page else 0)
        return tickets

    def hold(self, pages: Iterable[int]) -> None:
        """A request holds these units of the tree."""
        for page in pages:
            if not self._holds[page]:
                self._rouse(page)
            self._holds[page] += 1

    def unhold(self, pages: Iterable[int], passed: bool = False) -> None:
        """Undo one ``hold``. What the tree has lost meanwhile is free then. ``passed``: who held them made
        them, and goes on without them."""
        for page in pages:
            self._holds[page] -= 1
            if self._holds[page]:
                continue
            if self._ticket[page]:
                self._rest(page)
                if passed:
                    self._passed[page] = None
            else:
                self.free((page,))

    def void(self, ticket: int) -> None:
        """The tree forgets a unit, if it still has it. Who holds it keeps it until ``unhold``."""
        page = self._page.get(ticket, 0)
        if page and self._holds[page]:
            del self._page[ticket]
            self._ticket[page] = 0
        elif page:
            self.forget((ticket,))

    def forget(self, tickets: Iterable[int]) -> list[int]:
        """The tree forgets these units, which nobody holds.
        Returns those that it still had, which are free now."""
        pages = [self._page[ticket] for ticket in tickets if ticket in self._page]
        for page in pages:
            self._rouse(page)
        self._lose(pages)
        return pages

    def evict(self, n: int) -> None:
        """Free ``n`` units of the tree, those that nobody has held for longest: of those that were passed, as
        long as these are half or more, else of all."""
        lost = []
        for _ in range(n):
            lost.append(next(iter(self._passed if self.half_passed else self._idle)))
            self._rouse(lost[-1])
        self._lose(lost)

    @property
    def half_passed(self) -> bool:
        """Half or more of those that can be evicted were passed."""
        return 2 * len(self._passed) >= len(self._idle)

    @property
    def oldest(self) -> int:
        """Since when nobody has held the one longest unused; some are evictable."""
        return next(iter(self._idle.values()))

    def _rest(self, page: int) -> None:
        """It is idle from now on."""
        self._idle[page] = self.now
        self.loosen((page,))

    def _rouse(self, page: int) -> None:
        """It is idle no more."""
        del self._idle[page]
        self._passed.pop(page, None)
        self.fix((page,))

    def _lose(self, pages: list[int]) -> None:
        for page in pages:
            del self._page[self._ticket[page]]
            self._ticket[page] = 0
        self.free(pages)

    def fixed(self) -> list[int]:
        """Units that are not free and cannot be made so."""
        return [page for page in self.out() if page not in self._idle]

    def check_holds(self, held: Sequence[int]) -> None:
        """``held``: the tree's units that requests hold, once for each. Raises AssertionError."""
        self.check()
        counts = [0] * self.total
        for page in held:
            counts[page] += 1
        assert counts == self._holds, "holds are off"
        idle = {page for page in self._page.values() if not self._holds[page]}
        assert idle == set(self._idle), "an idle unit is not queued"
        assert idle.issuperset(self._passed), "a unit that was passed is not idle"
        assert all(self._out[page] for page in self._page.values()), "a unit of the tree is free"
        assert all(self._ticket[page] == ticket for ticket, page in self._page.items()), "tickets disagree"
        assert list(self._idle.values()) == sorted(self._idle.values()), "idle units are out of order"

    def check_owners(self, owned: Sequence[int], held: Sequence[int]) -> None:
        """``owned``: units of requests; ``held``: those of the tree that somebody holds, which it may have
        lost meanwhile. Raises AssertionError."""
        self.check_holds(held)
        assert len(set(owned)) == len(owned), "a unit has two owners"
        private = {*owned, *(unit for unit in held if not self._ticket[unit])}
        there = len(self) + self.cached + len(private) + len(self._retired)
        assert there == self.total - 1, "units lost or doubled"

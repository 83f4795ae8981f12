"""Pages of layers that look back a few tokens only (sliding windows)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sgla.cache.pages import PagePool


class WindowPool(PagePool):
    """Pages of ``page_size`` tokens for layers in which a token reads itself and the ``window - 1`` tokens before it.

    A page is free, owned by one request, or in the prefix tree, held there by so many requests. The tree may lose any page that
    nobody holds and keeps the tokens: a prefix is served where the pages of its last tokens are left. The tree knows its pages by tickets,
    numbers that are given out once: that of a page it has lost is void, and the page need not know where it stood. Page 0 and
    ticket 0 stand for none.
    """

    __slots__ = ("_given", "_holds", "_idle", "_page", "_ticket", "page_size", "window")

    def __init__(self, total: int, window: int, page_size: int) -> None:
        assert window > 0
        super().__init__(total)
        self.window = window
        self.page_size = page_size
        self._given = 0  # tickets
        self._ticket = [0] * total  # of each page
        self._page: dict[int, int] = {}  # of each valid ticket
        self._holds = [0] * total
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the tree and held by nobody, longest first

    @property
    def evictable(self) -> int:
        """Pages in the tree that no request holds."""
        return len(self._idle)

    @property
    def most(self) -> int:
        """Pages of a request that computes one token at a time, at most."""
        return (self.window + self.page_size - 2) // self.page_size + 1

    def first(self, length: int) -> int:
        """Index of the first page that the token at position ``length`` reads, and so does none behind it."""
        return max(0, length - self.window + 1) // self.page_size

    @property
    def cached(self) -> int:
        """Pages in the tree."""
        return len(self._page)

    def has(self, ticket: int) -> bool:
        """Whether the tree still has that page."""
        return ticket in self._page

    def page(self, ticket: int) -> int:
        """The page of a valid ticket."""
        return self._page[ticket]

    def give(self, pages: Iterable[int], held: bool) -> list[int]:
        """The tree takes over the ``pages`` of a request, which goes on to hold them if they are ``held``. Returns their tickets."""
        tickets = []
        for page in pages:
            if page:
                self._given += 1
                self._ticket[page], self._page[self._given] = self._given, page
                self._holds[page] = int(held)
                if not held:
                    self._idle[page] = None
            tickets.append(self._given if page else 0)
        return tickets

    def hold(self, pages: Iterable[int]) -> None:
        """A request holds these pages of the tree."""
        for page in pages:
            if not self._holds[page]:
                del self._idle[page]
            self._holds[page] += 1

    def unhold(self, pages: Iterable[int]) -> None:
        """Undo one ``hold``."""
        for page in pages:
            self._holds[page] -= 1
            if not self._holds[page]:
                self._idle[page] = None

    def forget(self, tickets: Iterable[int]) -> list[int]:
        """The tree forgets these pages, which nobody holds. Returns those that it still had, which are free now."""
        pages = [self._page[ticket] for ticket in tickets if ticket in self._page]
        for page in pages:
            del self._idle[page]
        self._lose(pages)
        return pages

    def evict(self, n: int) -> None:
        """Free ``n`` pages of the tree, those that nobody has held for longest."""
        self._lose([self._idle.popitem(last=False)[0] for _ in range(n)])

    def _lose(self, pages: list[int]) -> None:
        for page in pages:
            del self._page[self._ticket[page]]
            self._ticket[page] = 0
        self.free(pages)

    def check_holds(self, held: Sequence[int]) -> None:
        """``held``: the tree's pages that requests hold, once for each. Raises AssertionError."""
        self.check()
        counts = [0] * self.total
        for page in held:
            counts[page] += 1
        assert counts == self._holds, "holds are off"
        idle = {page for page in self._page.values() if not self._holds[page]}
        assert idle == set(self._idle), "an idle page is not queued"
        assert all(self._out[page] for page in self._page.values()), "a page of the tree is free"
        assert all(self._ticket[page] == ticket for ticket, page in self._page.items()), "tickets disagree"

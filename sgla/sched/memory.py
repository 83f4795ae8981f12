"""Slots and pages: every function here that moves ownership says so.

``tree + private`` are the pages of each cache group that are not free. A request owns ``pages[shared:]``;
``pages[:shared]`` belong to the tree and are kept by the request's lock on ``node``. The same holds for the
pages of windows, of which the tree's are held one by one. ``recurrent.py`` has the group of states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgla.cache.radix import NullCache
from sgla.cache.states import StatePool
from sgla.cache.tree import TOKEN_BYTES, Node, marks_from
from sgla.cache.window import WindowPool
from sgla.messages import Copy
from sgla.sched.adapters import Adapters
from sgla.sched.limits import Limits
from sgla.sched.moving import Numbers, Pools
from sgla.sched.recurrent import Recurrent
from sgla.sched.request import Request
from sgla.sched.rests import Rests
from sgla.sched.stock import SharedStock, Stock
from sgla.sched.transfers import Slack, Transfers

STEP = "step"  # see Memory.attach


class Memory:
    """The pools, the tree and the free slots.
    Numbers of pages and states come as lists, one for each cache group."""

    def __init__(self, limits: Limits, found: Sequence[Sequence[bytes]] = ()) -> None:
        """``found``: Facts.found."""
        self.page_size, last = limits.page_size, limits.groups[-1]
        states = StatePool(last.pages, last.every) if limits.recurrent else None
        self.stock = (SharedStock if limits.groups[0].slab else Stock)(limits, states)
        self.pool, self.windows, self.cache = self.stock.pool, self.stock.windows, self.stock.cache
        tiers = limits.tiers if limits.prefix_cache else []
        pools, numbers = Pools(self.pool, self.windows, states), Numbers()
        self.rests = Rests(pools)
        self.transfers = Transfers(
            self.cache, pools, tiers, found, limits.page_size, numbers, self.rests, limits.write_policy
        )
        self.adapters = Adapters(limits.adapters, numbers)
        self.slots = list(range(limits.rows - 1, -1, -1))
        self.recurrent = None
        if states is not None:
            self.recurrent = Recurrent(states, self.cache, self.slots, limits.page_size)
        # Free pages of each group with NaN, which the next plan zeroes before anybody uses them; or nothing.
        self.spoiled: list[list[int]] = []
        self._rows = limits.rows

    @property
    def available(self) -> list[int]:
        """What there is, or can be by eviction: see ``Stock``; at the end states."""
        available = [count + len(self.rests) for count in self.stock.available]
        if self.recurrent is not None:
            available.append(self.recurrent.pool.available)
        return available

    def short(self, request: Request, n: int) -> list[int]:
        """What ``grow`` takes for ``n`` more pages, where that is not there."""
        short = self.stock.short(n)
        if self.recurrent is not None:
            wanted = self.recurrent.wanted(request)
            short.append(wanted if wanted > self.recurrent.pool.available else 0)
        return short

    def room(self, request: Request) -> int:
        """By how many pages the request can grow."""
        if self.recurrent is not None and not self.recurrent.fits(request):
            return 0
        return self.stock.room + len(self.rests)

    def fits(self, request: Request, n: int) -> bool:
        """Whether it can grow by ``n`` pages."""
        if self.recurrent is not None and not self.recurrent.fits(request):
            return False
        return self.stock.fits(n - len(self.rests))

    def lacking(self, request: Request, tokens: int) -> list[int]:
        """What the request would need beside what it has to go on to ``tokens``, one at a time."""
        needed = tokens // self.page_size + 1
        lacking = [max(needed - len(request.pages), 0)]
        for pool, pages, behind in zip(self.windows, request.windows, request.behind):
            lacking.append(max(min(needed, pool.most) - (len(pages) - behind), 0))
        lacking = self.stock.worth(lacking)
        if self.recurrent is not None:
            lacking.append(self.recurrent.wanted(request))
        return lacking

    def own(self, request: Request) -> list[int]:
        """What the request holds and has not found in the tree."""
        own = [len(request.pages) - request.borrowed]
        for pages, behind in zip(request.windows, request.behind):
            own.append(len(pages) - max(behind, request.borrowed))
        own = self.stock.worth(own)
        if self.recurrent is not None:
            own.append(bool(request.unit) + (request.mark is not None) + len(request.tails + request.trial))
        return own

    def attach(self, request: Request) -> str:
        """Give the request a slot, and the cached prefix of what it knows, locked. The last token is never
        matched: it must be computed to have a successor. Or nothing, and what is worth waiting for: the next
        ``STEP``, which can begin with more of it. Its adapter is there."""
        assert request.node is None
        assert not request.pages
        match = self.cache.match(request.namespace, request.data, request.cacheable, request.marks)
        if match.soon:
            return STEP
        self.cache.lock(match.node)
        request.node, request.pages, request.windows = match.node, match.pages, match.windows
        request.shared = request.borrowed = len(match.pages)
        request.planned = request.allocated = match.length
        request.behind = [min(pool.first(match.length), len(match.pages)) for pool in self.windows]
        for pool, pages, behind in zip(self.windows, request.windows, request.behind):
            pool.hold(pages[behind:])
        request.branch = match.reach
        if self.recurrent is not None:
            self.recurrent.begin_with(request, match.state)
        request.slot = self.slots.pop()
        if request.adapter:
            self.adapters.take(request)
        return ""

    def flush(self) -> bool:
        """Forget what no request that runs holds on the device; true if nothing is left in the tree."""
        self.rests.clear()
        return self.cache.flush()

    def remember(self, request: Request) -> None:
        """What there was, and has ever been, of a request that begins."""
        if not request.cacheable or isinstance(self.cache, NullCache):
            request.reach = -1
        else:
            request.reach = max(request.branch, request.shared * self.page_size)
            known = self.transfers.past.known(request.namespace, request.data, request.reach)
            request.past, request.elsewhere, request.apart = known

    def begin_copies(self) -> tuple[list[Copy], list[int]]:
        """Those that are to begin with the plan that is made, and those that are to end without a result."""
        copies, dropped = self.transfers.take()
        copies += self.adapters.copies
        self.adapters.copies = []
        return copies, dropped

    @property
    def copies(self) -> bool:
        """Some copy is to begin, or to be given up."""
        return self.transfers.waits or bool(self.adapters.copies)

    @property
    def copying(self) -> bool:
        """Some copy is under way, or to begin."""
        return self.transfers.under_way or self.adapters.under_way

    def load(self, request: Request, slack: Slack | None = None) -> bool:
        """Have more of its prefix copied to the device, if a tier has some and there is room. Then the
        request gives all back until it has come. ``slack``: see ``Transfers.load``."""
        if not self.transfers.active:
            return False
        self.catch_up(request)  # who was retracted for it has left more in the tree
        if not self.transfers.load(request, request.shared, slack=slack):
            return False
        self.release(request)
        return True

    def prefetch(self, request: Request, most: int) -> bool | None:
        """``load`` for a request whose turn has not come, which has no slot: ``most`` pages. None: the next
        step can tell better."""
        match = self.cache.match(request.namespace, request.data, request.cacheable, request.marks)
        return None if match.soon else self.transfers.load(request, len(match.pages), most)

    def catch_up(self, request: Request) -> int | None:
        """Lock pages that others have computed below the request's own, and skip their tokens; returns how
        many pages. None: the next step can skip some."""
        at = request.planned
        if at != request.shared * self.page_size or at != request.allocated or not request.cacheable:
            return 0
        assert request.node is not None
        limit = min(len(request.data) // TOKEN_BYTES - 1, request.cacheable)
        match = self.cache.extend(request.node, request.namespace, request.data, at, limit, request.marks)
        if match.soon:
            return None
        if match.pages:
            if self.recurrent is not None:
                self.recurrent.begin_with(request, match.state)
            self.cache.lock(match.node, above=request.node)
            request.node = match.node
            request.pages += match.pages
            for pool, pages, more in zip(self.windows, request.windows, match.windows):
                pool.hold(page for page in more if page)
                pages += more
            request.shared += len(match.pages)
            request.borrowed += len(match.pages)
            request.planned = request.allocated = at + match.length
            self.slide(request)
        return len(match.pages)

    def grow(self, request: Request, n: int) -> bool:
        """Move ``n`` pages of every group from the pools to the request, and a state if it has none, evicting
        if need be; false if there are not as many. Pages behind its windows go back first."""
        if self.recurrent is not None and not self.recurrent.fits(request):
            return False
        if self.windows:
            self.slide(request)
        pages = self.stock.take(n)
        if not pages and self.rests:
            self.rests.clear()
            pages = self.stock.take(n)
        if not pages:
            return False
        for column, more in zip((request.pages, *request.windows), pages):
            column += more
        if self.recurrent is not None:
            self.recurrent.take(request)
        request.allocated += n * self.page_size
        return True

    def slide(self, request: Request) -> None:
        """Give back the pages that no token still to be computed reads. Steps are computed in order, so those
        in flight still find them as they are. Not while a step is made in which the request has its row
        already."""
        for g, (pool, pages) in enumerate(zip(self.windows, request.windows)):
            request.behind[g] = _slide(request, pool, pages, request.behind[g])

    def share(self, request: Request) -> None:
        """Give the request's planned pages of host-known tokens to the tree, which it then holds by lock.

        Pages the tree has already, computed twice by a race, stay private together with those after them:
        locking the tree's copies too would let one request pin more pages than it needs.
        """
        first = request.shared
        last = min(request.planned * TOKEN_BYTES, len(request.data)) // (self.page_size * TOKEN_BYTES)
        if last <= first:
            return
        assert request.node is not None
        tokens = request.data[first * self.page_size * TOKEN_BYTES : last * self.page_size * TOKEN_BYTES]
        windows = [pages[first:last] for pages in request.windows]
        node = self.cache.adopt(
            request.node,
            request.namespace,
            tokens,
            request.pages[first:last],
            windows,
            held=True,
            marks=marks_from(request.marks, first),
        )
        if node is not None:
            self.cache.lock(node, above=request.node)
            request.node = node
            request.shared = last

    def release(self, request: Request) -> None:
        """The only exit; idempotent. Pages of committed tokens go to the tree, other private pages to the
        pool, the lock and the slot are given back. No submitted step may contain the request. Of a
        ``spoiled`` one nothing is kept."""
        if request.node is None:
            return
        if request.spoiled:
            self._discard(request, request.node)
            return
        first = request.shared
        last = max(first, min(request.least, len(request.tokens)) // self.page_size)
        tokens = request.tokens[first * self.page_size : last * self.page_size].tobytes()
        windows = [pages[first:last] for pages in request.windows]
        self.transfers.saving.save_rest(request, last)
        for g in range(len(self.windows)):
            self._let_go(g, request, len(request.pages) - last)
        if last > first:
            left, beside = self.cache.insert(
                request.node,
                request.namespace,
                tokens,
                request.pages[first:last],
                windows,
                marks_from(request.marks, first),
            )
            self.pool.free(left)
            for pool, pages in zip(self.windows, beside):
                pool.free(pages)
        self.pool.free(request.pages[last:])
        if request.submit.cache_ttl:
            self._keep(request, last)
        self.cache.unlock(request.node)
        if self.recurrent is not None:
            self.recurrent.release(request, last * self.page_size)
        borrowed = request.borrowed * self.page_size
        if request.planned > borrowed:
            text = request.tokens[: last * self.page_size].tobytes()
            self.transfers.past.add(request.namespace, text, borrowed)
            self.transfers.saving.save(request, last)
        self._forget(request)

    def _discard(self, request: Request, node: Node) -> None:
        """``release`` of a request whose pages nobody may read."""
        private = request.pages[request.shared :]
        self.pool.free(private)
        beside = [self._let_go(g, request, len(private)) for g in range(len(self.windows))]
        self.cache.unlock(node)
        pages, windows = self.cache.discard(node)
        gone = [private + pages, *(own + shared for own, shared in zip(beside, windows))]
        self.spoiled = [a + b for a, b in zip(self.spoiled, gone)] if self.spoiled else gone
        if self.recurrent is not None:
            self.recurrent.release(request, 0)
        self.transfers.forget(request)
        self._forget(request)

    def _keep(self, request: Request, count: int) -> None:
        """What the request leaves goes after all that nobody wanted to be kept."""
        length = count * self.page_size
        tokens = request.tokens[:length].tobytes()
        node = self.cache.find(request.namespace, tokens, length, request.marks)
        if node is not None:
            self.cache.keep(node, request.submit.cache_ttl)

    def _let_go(self, g: int, request: Request, private: int) -> list[int]:
        """Hold no more pages of the tree in a window,
        and free those of the last ``private`` that are there. Returns these."""
        pool, pages, behind = self.windows[g], request.windows[g], request.behind[g]
        pool.unhold(pages[behind : request.shared])
        last = [page for page in pages[len(pages) - private :] if page]
        pool.free(last)
        return last

    def _forget(self, request: Request) -> None:
        self.slots.append(request.slot)
        self.adapters.give_back(request)
        request.node, request.pages, request.slot = None, [], -1
        request.windows, request.behind = [], []
        request.unit = request.read = request.branch = 0
        request.mark, request.tails, request.trial, request.given = None, [], [], []
        request.shared = request.borrowed = request.told = request.allocated = request.planned = (
            request.ahead
        ) = 0

    def check(self, holders: Iterable[Request]) -> None:
        """``holders``: the requests that have a slot.
        Raises AssertionError if anything is lost, doubled or unlocked."""
        self.stock.check()
        self.cache.check()
        holders = list(holders)
        private = [page for request in holders for page in request.pages[request.shared :]]
        private += self.transfers.owned(0)
        assert len(set(private)) == len(private), "a private page has two owners"
        assert self.stock.private == len(private), "pages lost or doubled"
        used = [request.slot for request in holders]
        assert sorted(used + self.slots) == list(range(self._rows)), "slots lost or doubled"
        for g, pool in enumerate(self.windows):
            moving = self.transfers.owned(1 + g), self.transfers.held(1 + g)
            _check_window(pool, g, holders, *moving)
        self.transfers.check()
        self.adapters.check(holders)
        if self.recurrent is not None:
            last = 1 + len(self.windows)
            self.recurrent.check(holders, self.transfers.owned(last), self.transfers.held(last))
        for request in holders:
            assert request.allocated == len(request.pages) * self.page_size, "allocated and pages disagree"
            assert request.planned <= request.allocated, "planned beyond the pages"
            _check_path(request)


def _slide(request: Request, pool: WindowPool, pages: list[int], behind: int) -> int:
    """Give back pages of a window from ``behind`` on; returns the first that the request still reads."""
    first = min(pool.first(request.least), len(pages))
    if first <= behind:
        return behind
    shared = min(max(request.shared, behind), first)
    found = min(max(request.borrowed, behind), shared)
    pool.unhold(page for page in pages[behind:found] if page)
    pool.unhold((page for page in pages[found:shared] if page), passed=True)
    pool.free(pages[shared:first])
    pages[behind:first] = [0] * (first - behind)
    return first


def _check_window(
    pool: WindowPool, g: int, holders: list[Request], private: list[int], held: list[int]
) -> None:
    """``private`` and ``held``: those of transfers, which those of ``holders`` join."""
    for request in holders:
        pages, behind = request.windows[g], request.behind[g]
        assert len(pages) == len(request.pages), "windows and pages disagree"
        assert not any(pages[:behind]), "a page behind the window is held"
        assert all(pages[behind:]), "a page of the window is missing"
        held += pages[behind : request.shared]
        private += pages[max(behind, request.shared) :]
    pool.check_holds(held)
    assert len(set(private)) == len(private), "a private page of a window has two owners"
    assert len(pool.out()) == pool.cached + len(private), "pages of a window lost or doubled"


def _check_path(request: Request) -> None:
    node, path = request.node, []
    while node is not None and node.parent is not None:
        assert node.locks > 0, "a page in use could be evicted"
        path.append(node.pages)
        node = node.parent
    shared = [page for run in reversed(path) for page in run]
    assert shared == request.pages[: request.shared], "the locked path is not the request's prefix"


class SlotsOnly(Memory):
    """For models that keep nothing of a prompt:
    a request gets a slot, and room for all its tokens without a page."""

    @property
    def available(self) -> list[int]:
        return [1 << 60]

    def attach(self, request: Request) -> str:
        request.node = self.cache.root
        request.allocated = request.known
        request.slot = self.slots.pop()
        return ""

    def catch_up(self, request: Request) -> int | None:
        return 0

    def share(self, request: Request) -> None:
        pass

    def release(self, request: Request) -> None:
        if request.node is None:
            return
        self.slots.append(request.slot)
        request.node, request.slot = None, -1
        request.allocated = request.planned = 0

    def check(self, holders: Iterable[Request]) -> None:
        used = [request.slot for request in holders]
        assert sorted(used + self.slots) == list(range(self._rows)), "slots lost or doubled"
        assert len(self.pool) == self.pool.total - 1, "a page is in use"

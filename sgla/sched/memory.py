"""Slots and pages: every function here that moves ownership says so.

``free + tree + private = total - 1``. A request owns ``pages[shared:]``; ``pages[:shared]`` belong to the tree and are
kept by the request's lock on ``node``.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgla.cache.pages import PagePool
from sgla.cache.radix import TOKEN_BYTES, NullCache, RadixCache
from sgla.sched.limits import Limits
from sgla.sched.request import Request


class Memory:
    """The pool, the tree and the free slots."""

    def __init__(self, limits: Limits) -> None:
        self.page_size = limits.page_size
        self.pool = PagePool(limits.pages)
        kind = RadixCache if limits.prefix_cache else NullCache
        self.cache = kind(limits.page_size, self.pool, limits.eviction)
        self.slots = list(range(limits.rows - 1, -1, -1))
        self.spoiled: list[
            int
        ] = []  # free pages with NaN, which the next plan has zeroed before anybody uses them
        self._rows = limits.rows

    @property
    def available(self) -> int:
        """Pages that are free or can be made so by eviction."""
        return len(self.pool) + self.cache.evictable

    def attach(self, request: Request) -> None:
        """Give the request a slot, and the cached prefix of what it knows, locked. The last token is never matched:
        it must be computed to have a successor."""
        assert request.node is None
        assert not request.pages
        limit = request.known - 1 if request.reads_cache else 0
        match = self.cache.match(request.namespace, request.data, limit)
        self.cache.lock(match.node)
        request.node, request.pages = match.node, match.pages
        request.shared = request.borrowed = len(match.pages)
        request.planned = request.allocated = match.length
        request.slot = self.slots.pop()

    def catch_up(self, request: Request) -> int:
        """Lock pages that others have computed below the request's own, and skip their tokens; returns how many pages."""
        at = request.planned
        if at != request.shared * self.page_size or at != request.allocated or not request.reads_cache:
            return 0
        assert request.node is not None
        limit = len(request.data) // TOKEN_BYTES - 1
        match = self.cache.extend(request.node, request.namespace, request.data, at, limit)
        if match.pages:
            self.cache.lock(match.node, above=request.node)
            request.node = match.node
            request.pages += match.pages
            request.shared += len(match.pages)
            request.borrowed += len(match.pages)
            request.planned = request.allocated = at + match.length
        return len(match.pages)

    def grow(self, request: Request, n: int) -> bool:
        """Move ``n`` pages from the pool to the request, evicting if need be; false if there are not as many."""
        short = n - len(self.pool)
        if short > 0 and (short > self.cache.evictable or self.cache.evict(short) < short):
            return False
        request.pages += self.pool.alloc(n)
        request.allocated += n * self.page_size
        return True

    def share(self, request: Request) -> None:
        """Give the request's planned pages of host-known tokens to the tree, which it then holds by lock.

        Pages the tree has already, computed twice by a race, stay private together with those after them: locking the
        tree's copies too would let one request pin more pages than it needs.
        """
        first = request.shared
        last = min(request.planned * TOKEN_BYTES, len(request.data)) // (self.page_size * TOKEN_BYTES)
        if last <= first:
            return
        assert request.node is not None
        tokens = request.data[first * self.page_size * TOKEN_BYTES : last * self.page_size * TOKEN_BYTES]
        node = self.cache.adopt(request.node, request.namespace, tokens, request.pages[first:last])
        if node is not None:
            self.cache.lock(node, above=request.node)
            request.node = node
            request.shared = last

    def release(self, request: Request) -> None:
        """The only exit; idempotent. Pages of committed tokens go to the tree, other private pages to the pool,
        the lock and the slot are given back. No submitted step may contain the request. Of a ``spoiled`` one nothing is kept."""
        if request.node is None:
            return
        if request.spoiled:
            private = request.pages[request.shared :]
            self.pool.free(private)
            self.cache.unlock(request.node)
            self.spoiled += private + self.cache.discard(request.node)
            self._forget(request)
            return
        first = request.shared
        last = max(first, min(request.planned, len(request.tokens)) // self.page_size)
        tokens = request.tokens[first * self.page_size : last * self.page_size].tobytes()
        if last > first:
            self.pool.free(
                self.cache.insert(request.node, request.namespace, tokens, request.pages[first:last])
            )
        self.pool.free(request.pages[last:])
        self.cache.unlock(request.node)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self.slots.append(request.slot)
        request.node, request.pages, request.slot = None, [], -1
        request.shared = request.borrowed = request.told = request.allocated = request.planned = 0

    def check(self, holders: Iterable[Request]) -> None:
        """``holders``: the requests that have a slot. Raises AssertionError if anything is lost, doubled or unlocked."""
        self.pool.check()
        self.cache.check()
        holders = list(holders)
        private = [page for request in holders for page in request.pages[request.shared :]]
        assert len(set(private)) == len(private), "a private page has two owners"
        total = len(self.pool) + self.cache.pages + len(private)
        assert total == self.pool.total - 1, f"free + tree + private = {total}, not {self.pool.total - 1}"
        used = [request.slot for request in holders]
        assert sorted(used + self.slots) == list(range(self._rows)), "slots lost or doubled"
        for request in holders:
            assert request.allocated == len(request.pages) * self.page_size, "allocated and pages disagree"
            assert request.planned <= request.allocated, "planned beyond the pages"
            self._check_path(request)

    def _check_path(self, request: Request) -> None:
        node, path = request.node, []
        while node is not None and node is not self.cache.root:
            assert node.locks > 0, "a page in use could be evicted"
            path.append(node.pages)
            node = node.parent
        shared = [page for run in reversed(path) for page in run]
        assert shared == request.pages[: request.shared], "the locked path is not the request's prefix"


class SlotsOnly(Memory):
    """For models that keep nothing of a prompt: a request gets a slot, and room for all its tokens without a page."""

    @property
    def available(self) -> int:
        return 1 << 60

    def attach(self, request: Request) -> None:
        request.node = self.cache.root
        request.allocated = request.known
        request.slot = self.slots.pop()

    def catch_up(self, request: Request) -> int:
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

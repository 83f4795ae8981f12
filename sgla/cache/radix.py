"""The prefix cache: which KV pages hold the prefix of a prompt.

The tree's own pages are those of the first cache group, which keeps whole histories; ``groups.py`` knows what
stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from sgla.cache.events import Events
from sgla.cache.eviction import Leaves
from sgla.cache.groups import Beside, OtherGroups
from sgla.cache.pages import PagePool
from sgla.cache.states import StatePool
from sgla.cache.tree import NO_MARKS, TOKEN_BYTES, Marks, Node, RadixTree, marks_from, path
from sgla.cache.window import WindowPool


class Match(NamedTuple):
    """``pages`` hold the ``length`` tokens matched (from where the search began); ``node`` is where they end.
    ``windows``: as many pages of each group with a window, 0 where none is read from there on. ``state``: the
    unit of its checkpoint; 0: none. ``reach``: so many tokens would match if only the first group counted.
    ``soon``: more would match with a checkpoint that the plan being made writes."""

    node: Node
    pages: list[int]
    length: int
    windows: list[list[int]]
    state: int = 0
    reach: int = 0
    soon: bool = False


class RadixCache(RadixTree):
    """The tree owns the pages in it; ``lock`` keeps a path from eviction.

    ``pages``: pages in the tree; ``evictable``: those no request holds; ``version`` changes with the content.
    ``events``: what happens to the pages, if somebody wants to know.
    """

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        eviction: str = "lru",
        windows: Sequence[WindowPool] = (),
        states: StatePool | None = None,
    ) -> None:
        super().__init__(page_size)
        self.pages = 0
        self.evictable = 0
        self.version = 0
        self._pool = pool
        self._windows = windows
        self._groups = OtherGroups(page_size, windows, states)
        self._beside = bool(self._groups)  # something stands beside the pages
        self._leaves = Leaves(eviction)
        self._clock = 0
        self._now = 0.0
        self.lost = 0  # pages, by eviction
        self._kept = 0  # pages
        self._ends: list[tuple[float, int, Node]] = []  # a heap: when nodes are not kept any more
        self.events: Events | None = None

    def match(self, namespace: str, tokens: bytes, limit: int, marks: Marks = NO_MARKS) -> Match:
        """The longest cached prefix of ``tokens[:limit]``.
        Splits a node where the match ends. Takes no lock."""
        return self.extend(self.root, namespace, tokens, 0, limit, marks)

    def extend(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks = NO_MARKS
    ) -> Match:
        """Like ``match``, but going on below ``node``, which ends at token ``start`` (whole pages)."""
        top, reach, soon = node, 0, False
        if self._beside:
            end, reach = self._locate(node, namespace, tokens, start, limit, marks)
            limit, soon = self._groups.served(end, reach, start)
        node, at, child, part = self._descend(node, namespace, tokens, start, limit, marks)
        if child is not None:
            node = self._split(child, part)
            at += part * self._width
        self._touch(node)
        below, length = path(node, top), at // TOKEN_BYTES
        pages: list[int] = []
        for run in below:
            pages += run.pages
        if not self._beside:
            return Match(node, pages, length - start, [])
        windows = self._groups.pages(below, length, len(pages))
        state = 0 if node is top else self._groups.state(node)
        return Match(node, pages, length - start, windows, state, reach - start, soon)

    def probe(self, namespace: str, tokens: bytes, limit: int, marks: Marks = NO_MARKS) -> tuple[Node, int]:
        """Deepest node that ``tokens[:limit]`` reaches, and the matched length. Changes nothing."""
        return self._locate(self.root, namespace, tokens, 0, limit, marks)

    def length(self, namespace: str, tokens: bytes, limit: int) -> int:
        """Of the prefix that ``match`` would find. Changes nothing."""
        node, length = self.probe(namespace, tokens, limit)
        return self._groups.served(node, length, 0)[0] if self._beside else length

    def _locate(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks
    ) -> tuple[Node, int]:
        node, at, child, part = self._descend(node, namespace, tokens, start, limit, marks)
        return child or node, (at + part * self._width) // TOKEN_BYTES

    def _tick(self) -> None:
        self._clock += 1
        for pool in self._windows:
            pool.now = self._clock

    def _touch(self, node: Node) -> None:
        self._tick()
        leaf = node
        while node is not self.root:
            node.touched = self._clock
            node.hits += 1
            node.level = self._leaves.level
            if node.kept:
                node.kept = self._now + node.ttl
            assert node.parent is not None
            node = node.parent
        self._offer(leaf)

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Keep ``node`` and its ancestors. ``above``: an ancestor this caller has locked already; only what
        is below it is locked now, and its one ``unlock`` moves to ``node``."""
        stop = above or self.root
        while node is not stop:
            if not node.locks:
                self.evictable -= len(node.pages)
                self._pool.fix(node.pages)
            node.locks += 1
            assert node.parent is not None
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""
        leaf = node
        while node is not self.root:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if not node.locks:
                self.evictable += len(node.pages)
                self._pool.loosen(node.pages)
            assert node.parent is not None
            node = node.parent
        self._offer(leaf)

    def adopt(
        self,
        node: Node,
        namespace: str,
        tokens: bytes,
        pages: Sequence[int],
        windows: Sequence[Sequence[int]] = (),
        held: bool = False,
        marks: Marks = NO_MARKS,
    ) -> Node | None:
        """The tree takes over ``pages``, which hold ``tokens`` right below ``node``, and those of
        ``windows``, 0 where there is none; the caller goes on to hold these if they are ``held``. ``marks``
        are counted from ``node`` on. Returns their last node.

        ``None``: the tree has the first page already; the caller keeps them all.
        """
        assert len(tokens) == len(pages) * self._width, "tokens and pages disagree"
        edge = self._edge(node, namespace, tokens[: self._width], marks and marks.get(0))
        if edge in node.children:
            return None
        if not marks:
            return self._adopt_run(node, edge, tokens, pages, windows, held)
        cuts = sorted(i for i in marks if 0 < i < len(pages))
        for first, last in pairwise((0, *cuts, len(pages))):
            run = tokens[first * self._width : last * self._width]
            edge = self._edge(node, namespace, run[: self._width], marks and marks.get(first))
            beside = [given[first:last] for given in windows]
            node = self._adopt_run(node, edge, run, pages[first:last], beside, held)
        return node

    def _adopt_run(
        self,
        node: Node,
        edge: object,
        tokens: bytes,
        pages: Sequence[int],
        windows: Sequence[Sequence[int]],
        held: bool,
    ) -> Node:
        self._tick()
        child = self._add(node, edge, tokens, pages, self._clock)
        child.level = self._leaves.level
        if self.events is not None:
            self.events.stored(node, edge, child)
        if windows:
            self._groups.put(child, windows, held)
        self.pages += len(pages)
        self.evictable += len(pages)
        self._pool.loosen(pages)
        self.version += 1
        self._offer(child)
        return child

    def insert(
        self,
        node: Node,
        namespace: str,
        tokens: bytes,
        pages: Sequence[int],
        windows: Sequence[Sequence[int]] = (),
        marks: Marks = NO_MARKS,
    ) -> tuple[Sequence[int], list[list[int]]]:
        """The tree takes over those of ``pages`` whose tokens it lacks below ``node``, and of ``windows``
        those that it lacks; returns the others. ``marks`` are counted from ``node`` on."""
        top = node
        node, at, child, part = self._descend(node, namespace, tokens, 0, len(tokens) // TOKEN_BYTES, marks)
        if child is not None:
            node = self._split(child, part)
            at += part * self._width
        self._touch(node)
        have = at // self._width
        if have < len(pages):
            rest = [given[have:] for given in windows]
            adopted = self.adopt(
                node, namespace, tokens[at:], pages[have:], rest, marks=marks_from(marks, have)
            )
            assert adopted is not None
        return pages[:have], self._groups.refill(path(node, top), windows) if windows else []

    def units(self, node: Node) -> Beside:
        """What stands in the tree down to ``node``."""
        return self._groups.units(path(node, self.root))

    def keep(self, node: Node, ttl: float) -> None:
        """What is down to ``node`` goes after all that is not kept, until nobody has used it for ``ttl``
        seconds; unless more than half of the pages would be kept. Time passes with ``expire``."""
        parts = path(node, self.root)
        new = sum(len(part.pages) for part in parts if not part.kept)
        if self._kept + new > (self._pool.total - 1) // 2:
            return
        self._kept += new
        for part in parts:
            part.ttl = max(part.ttl, ttl)
            part.kept = self._now + part.ttl
            self._offer(part)
        self._end(node)

    def expire(self, now: float) -> None:
        """What was kept until now is like all else. What was used meanwhile is kept for longer; it is above
        what was not."""
        self._now = now
        while self._ends and self._ends[0][0] <= now:
            node: Node | None = heappop(self._ends)[2]
            while node is not None and node is not self.root:
                if node.kept > now:
                    self._end(node)
                    break
                if node.kept:
                    self._kept -= len(node.pages)
                    node.kept = node.ttl = 0.0
                    self._offer(node)
                node = node.parent

    def _end(self, node: Node) -> None:
        self._clock += 1
        heappush(self._ends, (node.kept, self._clock, node))

    def evict(self, n: int) -> int:
        """Free ``n`` pages, or all that are evictable; returns how many.
        Pages leave from the end of a leaf's run."""
        freed = 0
        while freed < n and (node := self._leaves.pop()) is not None:
            take = min(n - freed, len(node.pages))
            self._free(node.pages[-take:])
            freed += take
            self._kept -= take if node.kept else 0
            self._groups.cut(node, take)
            if take < len(node.pages):
                del node.pages[-take:]
                node.key = node.key[: -take * self._width]
                self._offer(node)
            else:
                self._remove(node)
        if freed:
            self.pages -= freed
            self.evictable -= freed
            self.version += 1
            self.lost += freed
        return freed

    @property
    def oldest(self) -> int:
        """When the leaf that goes first was last used; behind all else if there is none, or it is kept."""
        for node, _ in self._leaves.first(1):
            if not node.kept:
                return node.touched
        return self._clock + 1

    def going(self, pages: int) -> list[tuple[Node, int]]:
        """What goes first where so many pages are evicted: leaves, and how many pages of their paths."""
        return self._leaves.first(pages)

    def discard(self, node: Node) -> tuple[list[int], list[list[int]]]:
        """Forget ``node`` and what is above it, up to where another request holds it or another run begins.
        Returns their pages, and those of windows; all are in the pools."""
        pages: list[int] = []
        windows = self._groups.none()
        while node.is_leaf:
            parent = node.parent
            assert parent is not None
            pages += node.pages
            self._kept -= len(node.pages) if node.kept else 0
            for gone, more in zip(windows, self._groups.cut(node, len(node.pages))):
                gone += more
            self._remove(node)
            node = parent
        if pages:
            self._free(pages)
            self.pages -= len(pages)
            self.evictable -= len(pages)
            self.version += 1
        return pages, windows

    def flush(self) -> bool:
        """Evict all that no request holds; true if nothing is left."""
        self.evict(self.evictable)
        return self.pages == 0

    def _free(self, pages: Sequence[int]) -> None:
        self._pool.fix(pages)
        self._pool.free(pages)
        if self.events is not None:
            self.events.removed(pages)

    def _remove(self, node: Node) -> None:
        parent = self._cut_off(node)
        if node.kept and parent.kept:  # which may have no end of its own
            self._end(parent)
        node.kept = 0.0
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Put ``node`` up for eviction if it is a leaf that nobody holds."""
        if not node.is_leaf:
            return
        self._leaves.push(node)
        if len(self._leaves) > 4 * self.nodes + 64:
            self._leaves.renew(leaf for leaf in self.walk() if leaf.is_leaf)

    def locked(self, pages: Sequence[int]) -> list[int]:
        """Those of ``pages`` that it cannot lose."""
        evictable = {page for node in self.walk() if not node.locks for page in node.pages}
        return [page for page in pages if page not in evictable]

    def check(self) -> None:
        """Counters, keys, locks and heap agree with the tree. O(nodes)."""
        pages: list[int] = []
        evictable = nodes = 0
        for node in self.walk():
            nodes += 1
            pages.extend(node.pages)
            assert len(node.key) == len(node.pages) * self._width > 0, "key and pages disagree"
            assert node.parent is not None
            assert node.parent.children[node.edge] is node, "a node is filed under another edge"
            assert sum(child.locks for child in node.children.values()) <= node.locks, (
                "locks do not cover a child"
            )
            if not node.locks:
                evictable += len(node.pages)
        assert len(set(pages)) == len(pages), "a page stands twice in the tree"
        self._leaves.check(node for node in self.walk() if node.is_leaf)
        self._groups.check(self.walk())
        assert self._kept == sum(len(node.pages) for node in self.walk() if node.kept), "kept pages are off"
        assert (self.pages, self.evictable, self.nodes) == (len(pages), evictable, nodes), "counters are off"


class NullCache(RadixCache):
    """No prefix cache: nothing is ever found or taken over."""

    def extend(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks = NO_MARKS
    ) -> Match:
        return Match(node, [], 0, self._groups.none())

    def find(self, namespace: str, tokens: bytes, length: int, marks: Marks = NO_MARKS) -> Node | None:
        return None

    def adopt(
        self,
        node: Node,
        namespace: str,
        tokens: bytes,
        pages: Sequence[int],
        windows: Sequence[Sequence[int]] = (),
        held: bool = False,
        marks: Marks = NO_MARKS,
    ) -> Node | None:
        return None

    def insert(
        self,
        node: Node,
        namespace: str,
        tokens: bytes,
        pages: Sequence[int],
        windows: Sequence[Sequence[int]] = (),
        marks: Marks = NO_MARKS,
    ) -> tuple[Sequence[int], list[list[int]]]:
        return pages, [[page for page in given if page] for given in windows]

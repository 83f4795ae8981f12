"""Radix tree over token ids: which KV pages hold the prefix of a prompt.

Page granular, as in SGLang's RadixAttention (Zheng et al. 2023): an edge is a run of whole pages. Token ids
come as ``int32`` byte strings, so the first page of a run is a dictionary key and the rest of it is one
``memcmp``. Where a page depends on more than the tokens up to its end, on an image for example, its *mark* is
part of that key, and no run goes on across it.

The tree's own pages are those of the first cache group, which keeps whole histories. Beside each stands one
of every group with a window, as long as it is there (``cache/window.py``), and behind the last one of a node
a state, if there is one (``cache/states.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from sgla.cache.pages import PagePool
from sgla.cache.states import StatePool
from sgla.cache.window import WindowPool

TOKEN_BYTES = 4
Marks = Mapping[int, bytes]  # of pages, by their index
NO_MARKS: Marks = MappingProxyType({})


class Node:
    """A run of pages below ``parent``.
    ``key``: token bytes of the run; ``edge``: its key in ``parent.children``.

    ``locks`` counts the requests that hold this node or one below it. A split keeps this object as the
    *lower* half, so a request's reference goes on meaning the same prefix, and its state the same tokens.
    ``windows``: tickets for as many pages of each group with a window. ``state``: ticket of the checkpoint
    behind it. ``pending``: the transfer that brings its pages, which keeps it locked; 0: they are there.
    """

    __slots__ = (
        "born",
        "children",
        "edge",
        "hits",
        "key",
        "locks",
        "pages",
        "parent",
        "pending",
        "state",
        "touched",
        "windows",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: object,
        key: bytes,
        pages: array[int],
        born: int,
        windows: list[array[int]] | None = None,
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.key = key
        self.pages = pages
        self.windows = windows or []
        self.children: dict[object, Node] = {}
        self.locks = 0
        self.hits = 0
        self.state = 0
        self.pending = 0
        self.born = self.touched = born


class Match(NamedTuple):
    """``pages`` hold the ``length`` tokens matched (from where the search began); ``node`` is where they end.
    ``windows``: as many pages of each group with a window, 0 where none is read from there on. ``state``: the
    unit of its checkpoint; 0: none. ``reach``: so many tokens would match if only the first group counted.
    ``soon``: more would match with a checkpoint that the plan being made writes. ``pending``: a transfer
    brings more; 0: none does."""

    node: Node
    pages: list[int]
    length: int
    windows: list[list[int]]
    state: int = 0
    reach: int = 0
    soon: bool = False
    pending: int = 0


# The leaf with the smallest key is evicted first.
EVICTION: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.touched,
    "lfu": lambda node: (node.hits, node.touched),
    "fifo": lambda node: node.born,
    "mru": lambda node: -node.touched,
}


class RadixCache:
    """The tree owns the pages in it; ``lock`` keeps a path from eviction.

    ``pages``: pages in the tree; ``evictable``: those no request holds; ``version`` changes with the content.
    Each evictable leaf has a heap entry with its current key; outdated entries are dropped when popped.
    """

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        eviction: str = "lru",
        windows: Sequence[WindowPool] = (),
        states: StatePool | None = None,
    ) -> None:
        self.page_size = page_size
        self._windows = windows
        self._states = states
        self.pages = 0
        self.evictable = 0
        self.version = 0
        self.root = Node(None, None, b"", array("i"), 0)
        self._pool = pool
        self._width = page_size * TOKEN_BYTES
        self._sort_key = EVICTION[eviction]
        self._heap: list[tuple[Any, int, Node]] = []
        self._clock = 0
        self._ties = 0
        self.nodes = 0

    # --- reading

    def match(self, namespace: str, tokens: bytes, limit: int, marks: Marks = NO_MARKS) -> Match:
        """The longest cached prefix of ``tokens[:limit]``.
        Splits a node where the match ends. Takes no lock."""
        return self.extend(self.root, namespace, tokens, 0, limit, marks)

    def extend(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks = NO_MARKS
    ) -> Match:
        """Like ``match``, but going on below ``node``, which ends at token ``start`` (whole pages)."""
        top, reach, soon = node, 0, False
        if self._windows or self._states is not None:
            end, reach = self._locate(node, namespace, tokens, start, limit, marks)
            limit, soon = self._served(end, reach, start)
        node, at, child, part = self._walk(node, namespace, tokens, start, limit, marks)
        pending = 0
        if child is not None and child.pending:
            pending = child.pending
        elif child is not None:
            node = self._split(child, part)
            at += part * self._width
        while node.pending and node.parent is not None:
            pending = node.pending
            at -= len(node.key)
            node = node.parent
        self._touch(node)
        path = self._path(node, top)
        pages = [page for part in path for page in part.pages]
        windows = [self._in_window(g, path, at // TOKEN_BYTES, len(pages)) for g in range(len(self._windows))]
        state = self._states.page(node.state) if self._states is not None and node is not top else 0
        return Match(node, pages, at // TOKEN_BYTES - start, windows, state, reach - start, soon, pending)

    def _path(self, node: Node, top: Node) -> list[Node]:
        """The nodes below ``top`` down to ``node``."""
        path = []
        while node is not top:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        return path[::-1]

    def _in_window(self, g: int, path: list[Node], length: int, count: int) -> list[int]:
        """The last ``count`` pages of ``length`` tokens, which ``path`` has;
        0 for those that no later token reads."""
        pool = self._windows[g]
        tickets = [ticket for part in path for ticket in part.windows[g]]
        unread = min(max(pool.first(length) - (length // self.page_size - count), 0), count)
        return [0] * unread + [pool.page(ticket) for ticket in tickets[unread:]]

    def _served(self, node: Node, length: int, start: int) -> tuple[int, bool]:
        """The longest prefix of ``length`` tokens, which ends in ``node``, of which every window has its
        pages and which has a state, or ``start`` tokens. And whether there will be a longer one when the plan
        being made is."""
        served, soon = -1, False
        while served != length:
            served = length
            for g, pool in enumerate(self._windows):
                length = self._windowed(g, pool, node, length)
            if self._states is not None:
                length, fresh = self._stated(self._states, node, length)
                soon |= fresh > start
        return max(start, length), soon

    def _stated(self, pool: StatePool, node: Node, length: int) -> tuple[int, int]:
        """The longest prefix of ``length`` tokens with a checkpoint, and a longer one for which it is written
        in the plan being made, or 0. ``node`` may end behind ``length``."""
        end = self._depth(node) + len(node.pages)
        fresh = 0
        while node.parent is not None:
            if end * self.page_size <= length and pool.has(node.state):
                if pool.readable(node.state):
                    break
                fresh = fresh or end * self.page_size
            end -= len(node.pages)
            node = node.parent
        return end * self.page_size, fresh

    def _windowed(self, g: int, pool: WindowPool, node: Node, length: int) -> int:
        """``_served`` for one group. ``node`` may end behind ``length``."""
        end = length // self.page_size
        needed = pool.first(length)
        start = self._depth(node)
        at = end
        while at > needed:
            while at <= start:
                assert node.parent is not None
                node = node.parent
                start -= len(node.pages)
            at -= 1
            if not pool.has(node.windows[g][at - start]):
                end = at
                needed = pool.first(end * self.page_size)
        return end * self.page_size

    def _depth(self, node: Node) -> int:
        """Pages above ``node``."""
        depth, parent = 0, node.parent
        while parent is not None:
            depth += len(parent.pages)
            parent = parent.parent
        return depth

    def probe(self, namespace: str, tokens: bytes, limit: int, marks: Marks = NO_MARKS) -> tuple[Node, int]:
        """Deepest node that ``tokens[:limit]`` reaches, and the matched length. Changes nothing."""
        return self._locate(self.root, namespace, tokens, 0, limit, marks)

    def _locate(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks
    ) -> tuple[Node, int]:
        node, at, child, part = self._walk(node, namespace, tokens, start, limit, marks)
        return child or node, (at + part * self._width) // TOKEN_BYTES

    def _walk(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks
    ) -> tuple[Node, int, Node | None, int]:
        """Last node matched whole, byte position after it,
        and the child matched in part with its matched pages."""
        width = self._width
        at = start * TOKEN_BYTES
        end = limit // self.page_size * width
        while at < end:
            edge = self._edge(node, namespace, tokens[at : at + width], marks and marks.get(at // width))
            child = node.children.get(edge)
            if child is None:
                break
            size = len(child.key)
            stop = min((i * width for i in marks if at < i * width < end), default=end) if marks else end
            if at + size > stop or not tokens.startswith(child.key, at):
                return node, at, child, self._common(child.key, tokens, at, min(size, stop - at) // width)
            node = child
            at += size
        return node, at, None, 0

    def _edge(self, node: Node, namespace: str, page: bytes, mark: object) -> object:
        """The key of a run below ``node`` that begins with ``page``."""
        edge = (namespace, page) if node is self.root else page
        return (edge, mark) if mark else edge

    def _common(self, key: bytes, tokens: bytes, at: int, most: int) -> int:
        """Pages that ``key`` and ``tokens[at:]`` share, by bisection; the first one is known to be equal."""
        width, low = self._width, 1
        while low < most:
            middle = (low + most + 1) // 2
            if key[low * width : middle * width] == tokens[at + low * width : at + middle * width]:
                low = middle
            else:
                most = middle - 1
        return low

    def _touch(self, node: Node) -> None:
        self._clock += 1
        leaf = node
        while node is not self.root:
            node.touched = self._clock
            node.hits += 1
            assert node.parent is not None
            node = node.parent
        self._offer(leaf)

    def find(self, namespace: str, tokens: bytes, length: int, marks: Marks = NO_MARKS) -> Node | None:
        """The node that ends with ``tokens[:length]``, which are whole pages, by a split if need be;
        None: the tree lacks some of them."""
        node, at, child, part = self._walk(self.root, namespace, tokens, 0, length, marks)
        if at + part * self._width < length * TOKEN_BYTES:
            return None
        return node if child is None else self._split(child, part)

    # --- holding

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Keep ``node`` and its ancestors. ``above``: an ancestor this caller has locked already; only what
        is below it is locked now, and its one ``unlock`` moves to ``node``."""
        stop = above or self.root
        while node is not stop:
            if not node.locks:
                self.evictable -= len(node.pages)
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
            assert node.parent is not None
            node = node.parent
        self._offer(leaf)

    # --- writing

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
        if self._edge(node, namespace, tokens[: self._width], marks and marks.get(0)) in node.children:
            return None
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
        self._clock += 1
        beside = [array("q", pool.give(given, held)) for pool, given in zip(self._windows, windows)]
        child = Node(node, edge, tokens, array("i", pages), self._clock, beside)
        node.children[edge] = child
        self.nodes += 1
        self.pages += len(pages)
        self.evictable += len(pages)
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
        node, at, child, part = self._walk(node, namespace, tokens, 0, len(tokens) // TOKEN_BYTES, marks)
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
        left = [self._refill(g, self._path(node, top), given) for g, given in enumerate(windows)]
        return pages[:have], left

    def _refill(self, g: int, path: list[Node], given: Sequence[int]) -> list[int]:
        """Put pages of one window where ``path`` has lost its own; returns those that it has not.
        0 stands for none."""
        pool, left, at = self._windows[g], [], 0
        for node in path:
            for i, ticket in enumerate(node.windows[g]):
                new = given[at + i]
                if new and pool.has(ticket):
                    left.append(new)
                elif new:
                    [node.windows[g][i]] = pool.give((new,), held=False)
            at += len(node.pages)
        return left

    def _split(self, node: Node, keep: int) -> Node:
        """Cut ``node`` after ``keep`` pages; returns the new upper half."""
        cut = keep * self._width
        parent = node.parent
        assert parent is not None
        beside = [tickets[:keep] for tickets in node.windows]
        upper = Node(parent, node.edge, node.key[:cut], node.pages[:keep], node.born, beside)
        upper.locks, upper.hits, upper.touched = node.locks, node.hits, node.touched
        upper.pending = node.pending
        parent.children[node.edge] = upper
        node.key, node.pages = node.key[cut:], node.pages[keep:]
        node.windows = [tickets[keep:] for tickets in node.windows]
        node.parent, node.edge = upper, node.key[: self._width]
        upper.children[node.edge] = node
        self.nodes += 1
        return upper

    # --- transfers

    def expect(self, node: Node, above: Node, transfer: int) -> None:
        """A transfer brings the pages below ``above`` down to ``node``."""
        for part in self._path(node, above):
            part.pending = transfer

    def arrive(self, node: Node, ok: bool) -> None:
        """The transfer that ``node`` and some above it wait for is done, and unlocks them. Or it has failed:
        then they are removed with all below, which nobody can have reached."""
        self.unlock(node)
        top, pending = node, node.pending
        while node.pending == pending:
            node.pending, top = 0, node
            assert node.parent is not None
            node = node.parent
        if not ok:
            self._remove_all(top)

    def _remove_all(self, top: Node) -> None:
        stack, gone = [top], list[Node]()
        while stack:
            gone.append(stack.pop())
            stack += gone[-1].children.values()
        for node in gone[::-1]:
            assert not node.locks, "a page in use would be removed"
            self._pool.free(node.pages)
            self.pages -= len(node.pages)
            self.evictable -= len(node.pages)
            self._remove(node)
        self.version += 1

    def ready(self, node: Node) -> bool:
        """Whether all pages down to ``node`` are there."""
        while node.parent is not None:
            if node.pending:
                return False
            node = node.parent
        return True

    def pages_to(self, node: Node) -> list[int]:
        """All pages down to ``node``."""
        return [page for part in self._path(node, self.root) for page in part.pages]

    # --- eviction

    def evict(self, n: int) -> int:
        """Free ``n`` pages, or all that are evictable; returns how many.
        Pages leave from the end of a leaf's run."""
        freed = 0
        while freed < n and self._heap:
            key, _, node = heappop(self._heap)
            if not self._is_leaf(node) or key != self._sort_key(node):
                continue
            take = min(n - freed, len(node.pages))
            self._pool.free(node.pages[-take:])
            freed += take
            for pool, tickets in zip(self._windows, node.windows):
                pool.forget(tickets[-take:])
                del tickets[-take:]
            self._lose_state(node)
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
        return freed

    def discard(self, node: Node) -> tuple[list[int], list[list[int]]]:
        """Forget ``node`` and what is above it, up to where another request holds it or another run begins.
        Returns their pages, and those of windows; all are in the pools."""
        pages: list[int] = []
        windows: list[list[int]] = [[] for _ in self._windows]
        while self._is_leaf(node):
            parent = node.parent
            assert parent is not None
            pages += node.pages
            for pool, beside, gone in zip(self._windows, node.windows, windows):
                gone += pool.forget(beside)
            self._lose_state(node)
            self._remove(node)
            node = parent
        if pages:
            self._pool.free(pages)
            self.pages -= len(pages)
            self.evictable -= len(pages)
            self.version += 1
        return pages, windows

    def flush(self) -> bool:
        """Evict all that no request holds; true if nothing is left."""
        self.evict(self.evictable)
        return self.pages == 0

    def _lose_state(self, node: Node) -> None:
        if self._states is not None:
            self._states.void(node.state)
            node.state = 0

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        node.parent = None
        self.nodes -= 1
        self._offer(parent)

    def _is_leaf(self, node: Node) -> bool:
        return not node.locks and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Put ``node`` up for eviction if it is a leaf that nobody holds."""
        if not self._is_leaf(node):
            return
        self._push(node)
        if len(self._heap) > 4 * self.nodes + 64:
            self._heap.clear()
            for leaf in filter(self._is_leaf, self.walk()):
                self._push(leaf)

    def _push(self, node: Node) -> None:
        self._ties += 1
        heappush(self._heap, (self._sort_key(node), self._ties, node))

    # --- checking

    def walk(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Counters, keys, locks and heap agree with the tree. O(nodes)."""
        queued = {(id(node), key) for key, _, node in self._heap}
        pages: list[int] = []
        evictable = nodes = 0
        for node in self.walk():
            nodes += 1
            pages.extend(node.pages)
            assert len(node.key) == len(node.pages) * self._width > 0, "key and pages disagree"
            assert [len(beside) for beside in node.windows] == [len(node.pages)] * len(self._windows)
            assert node.parent is not None
            assert node.parent.children[node.edge] is node, "a node is filed under another edge"
            assert sum(child.locks for child in node.children.values()) <= node.locks, (
                "locks do not cover a child"
            )
            if not node.locks:
                evictable += len(node.pages)
            if self._is_leaf(node):
                assert (id(node), self._sort_key(node)) in queued, "an evictable leaf is not queued"
        assert len(set(pages)) == len(pages), "a page stands twice in the tree"
        if self._states is not None:
            valid = [node.state for node in self.walk() if self._states.has(node.state)]
            assert len(set(valid)) == len(valid) == self._states.cached, "a checkpoint has no node"
        assert (self.pages, self.evictable, self.nodes) == (len(pages), evictable, nodes), "counters are off"


def marks_from(marks: Marks, first: int) -> Marks:
    """The marks counted from page ``first`` on."""
    return {i - first: mark for i, mark in marks.items() if i >= first} if marks and first else marks


class NullCache(RadixCache):
    """No prefix cache: nothing is ever found or taken over."""

    def extend(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks = NO_MARKS
    ) -> Match:
        return Match(node, [], 0, [[] for _ in self._windows])

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

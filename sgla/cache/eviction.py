"""Which leaf of the prefix tree goes first where pages are short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from sgla.cache.tree import Node, depth

DEPTH = 512  # pages above one with which it takes about twice as long to compute, since it attends to them
# The leaf with the smallest key is evicted first, of those that are not kept.
EVICTION: dict[str, Callable[[Node], Any]] = {
    "lru": lambda node: node.touched,
    "lfu": lambda node: (node.hits, node.touched),
    "fifo": lambda node: node.born,
    "mru": lambda node: -node.touched,
    "cost": lambda node: (node.level + 1 + (depth(node) + len(node.pages)) / DEPTH, node.touched),
}


class Leaves:
    """A queue of leaves by their key. Each has an entry with its current key;
    outdated entries are dropped when they come first. ``level``: for ``cost`` the key of what went last,
    which nodes take when they are used (GreedyDual, Young 1994): what costs twice as much to compute stays
    for twice as long."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._heap: list[tuple[Any, int, Node]] = []
        self._ties = 0
        self.level = 0.0

    def __len__(self) -> int:
        """Of the entries."""
        return len(self._heap)

    def push(self, node: Node) -> None:
        self._ties += 1
        heappush(self._heap, (self._key(node), self._ties, node))

    def _key(self, node: Node) -> tuple[bool, Any]:
        return node.kept > 0, EVICTION[self._policy](node)

    def pop(self) -> Node | None:
        """The first leaf, which has an entry no more."""
        if (entry := self._pop()) is None:
            return None
        if self._policy == "cost":
            self.level = entry[0][1][0]
        return entry[2]

    def first(self, pages: int) -> list[tuple[Node, int]]:
        """The leaves that go first until so many pages are free, or all; of each how many of its path."""
        found: list[tuple[Any, int, Node]] = []
        gone: dict[Node, int] = {}
        while pages > 0 and (entry := self._pop()) is not None:
            found.append(entry)
            if entry[2] not in gone:
                gone[entry[2]] = min(pages, alone(entry[2]))
                pages -= gone[entry[2]]
        for entry in found:
            heappush(self._heap, entry)
        return list(gone.items())

    def _pop(self) -> tuple[Any, int, Node] | None:
        while self._heap:
            entry = heappop(self._heap)
            if entry[2].is_leaf and entry[0] == self._key(entry[2]):
                return entry
        return None

    def renew(self, leaves: Iterable[Node]) -> None:
        """These are all that there are."""
        self._heap.clear()
        for leaf in leaves:
            self.push(leaf)

    def check(self, leaves: Iterable[Node]) -> None:
        """Raises AssertionError if one of them has no entry."""
        queued = {(id(node), key) for key, _, node in self._heap}
        for leaf in leaves:
            assert (id(leaf), self._key(leaf)) in queued, "an evictable leaf is not queued"


def alone(leaf: Node) -> int:
    """Pages of a leaf, and of those above it that are leaves when it is gone."""
    pages, node = len(leaf.pages), leaf.parent
    while node is not None and node.parent is not None and not node.locks and len(node.children) == 1:
        pages += len(node.pages)
        node = node.parent
    return pages

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
        while self._heap:
            key, _, node = heappop(self._heap)
            if node.is_leaf and key == self._key(node):
                if self._policy == "cost":
                    self.level = key[1][0]
                return node
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

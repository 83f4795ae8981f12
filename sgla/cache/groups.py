"""What stands in the prefix tree beside the pages of the first cache group.

That group keeps whole histories. Beside each of its pages stands one of every group with a window, as long as
it is there (``cache/window.py``), and behind the last one of a node a state, if there is one
(``cache/states.py``). Nodes have tickets of these units.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgla.cache.states import StatePool
from sgla.cache.tree import Node, depth
from sgla.cache.window import WindowPool


class Beside(NamedTuple):
    """What the tree has of a text: all ``pages`` of the first cache group; of each window the pages that are
    left, by their index; the units of checkpoints by the number of pages that they stand behind."""

    pages: list[int]
    windows: list[dict[int, int]]
    states: dict[int, int]


class OtherGroups:
    """Those with a window, and one of states or ``None``."""

    def __init__(self, page_size: int, windows: Sequence[WindowPool], states: StatePool | None) -> None:
        self._page_size, self._windows, self._states = page_size, windows, states

    def __bool__(self) -> bool:
        return bool(self._windows) or self._states is not None

    def none(self) -> list[list[int]]:
        """No pages of each window."""
        return [[] for _ in self._windows]

    def served(self, node: Node, length: int, start: int) -> tuple[int, bool]:
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
        end = depth(node) + len(node.pages)
        fresh = 0
        while node.parent is not None:
            if end * self._page_size <= length and pool.has(node.state):
                if pool.readable(node.state):
                    break
                fresh = fresh or end * self._page_size
            end -= len(node.pages)
            node = node.parent
        return end * self._page_size, fresh

    def _windowed(self, g: int, pool: WindowPool, node: Node, length: int) -> int:
        """``served`` for one group. ``node`` may end behind ``length``."""
        end = length // self._page_size
        needed = pool.first(length)
        start = depth(node)
        at = end
        while at > needed:
            while at <= start:
                assert node.parent is not None
                node = node.parent
                start -= len(node.pages)
            at -= 1
            if not pool.has(node.windows[g][at - start]):
                end = at
                needed = pool.first(end * self._page_size)
        return end * self._page_size

    def pages(self, path: list[Node], length: int, count: int) -> list[list[int]]:
        """Of each window, the last ``count`` pages of ``length`` tokens, which ``path`` has;
        0 for those that no later token reads."""
        found = []
        for g, pool in enumerate(self._windows):
            tickets = [ticket for part in path for ticket in part.windows[g]]
            unread = min(max(pool.first(length) - (length // self._page_size - count), 0), count)
            found.append([0] * unread + [pool.page(ticket) for ticket in tickets[unread:]])
        return found

    def state(self, node: Node) -> int:
        """The unit of the checkpoint behind ``node``; 0: none."""
        return 0 if self._states is None else self._states.page(node.state)

    def units(self, path: list[Node]) -> Beside:
        """What the nodes from the root on have."""
        found = Beside([], [{} for _ in self._windows], {})
        for node in path:
            first = len(found.pages)
            found.pages.extend(node.pages)
            for pool, pages, tickets in zip(self._windows, found.windows, node.windows):
                pages.update((first + i, pool.page(t)) for i, t in enumerate(tickets) if pool.has(t))
            if self._states is not None and self._states.readable(node.state):
                found.states[len(found.pages)] = self._states.page(node.state)
        return found

    def put(self, node: Node, windows: Sequence[Sequence[int]], held: bool) -> None:
        """The tree takes over units of a new node; the caller goes on to hold them if they are ``held``."""
        node.windows = [array("q", pool.give(given, held)) for pool, given in zip(self._windows, windows)]

    def refill(self, path: list[Node], windows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Put pages of the windows where ``path`` has lost its own; returns those that it has not.
        0 stands for none."""
        return [self._refill(g, path, given) for g, given in enumerate(windows)]

    def _refill(self, g: int, path: list[Node], given: Sequence[int]) -> list[int]:
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

    def cut(self, node: Node, count: int) -> list[list[int]]:
        """Forget what stands beside the last ``count`` pages of ``node``, which nobody holds. Returns the
        pages of windows, which are free now."""
        gone = []
        for pool, tickets in zip(self._windows, node.windows):
            gone.append(pool.forget(tickets[-count:]))
            del tickets[-count:]
        if self._states is not None:
            self._states.void(node.state)
            node.state = 0
        return gone

    def check(self, nodes: Iterable[Node]) -> None:
        """Raises AssertionError if nodes and units do not fit together."""
        states = []
        for node in nodes:
            assert [len(beside) for beside in node.windows] == [len(node.pages)] * len(self._windows)
            states.append(node.state)
        if self._states is not None:
            valid = [state for state in states if self._states.has(state)]
            assert len(set(valid)) == len(valid) == self._states.cached, "a checkpoint has no node"

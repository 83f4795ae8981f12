"""The order of the waiting list.

``fcfs``: clients take turns (sched/turns.py), and the requests of one come in the order of arrival. ``lpm``:
longest cached prefix first. ``dfs-weight``: along the tree, heaviest branch first, so that requests of one
prefix run together. ``lof``: the longest possible output first, so that at the end none goes on alone.
``random``: by a digest of the request's id (all four from SGLang). ``priority``: larger ``priority`` first.
Where they find no difference, turns decide. ``auto``: ``lpm`` while much of the prompts is found in the
cache, else ``fcfs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import chain
from typing import Any
from zlib import crc32

from sgla.cache.radix import RadixCache
from sgla.cache.tree import Node
from sgla.sched.request import Request

WINDOW = 128  # matching every waiting request against the tree each step must stay cheap: only the first are

HALF_LIFE = 32_768  # tokens of prompts after which a hit rate counts half
HIGH, LOW = 0.3, 0.1  # hit rates above and below which ``auto`` changes

Order = Callable[[list[Request], RadixCache], Iterable[Request]]


class Auto:
    """What ``auto`` means now. ``rate``: of the last prompts the share that was in the cache."""

    def __init__(self) -> None:
        self.policy, self.rate = "fcfs", 0.0
        self._asked = self._found = 0

    def look(self, asked: int, found: int) -> str:
        """``asked``: tokens looked up in the cache so far; ``found``: those that were there."""
        if new := asked - self._asked:
            left = 0.5 ** (new / HALF_LIFE)
            self.rate = left * self.rate + (1 - left) * min(1.0, (found - self._found) / new)
            self._asked, self._found = asked, found
        if self.rate > HIGH:
            self.policy = "lpm"
        elif self.rate < LOW:
            self.policy = "fcfs"
        return self.policy


def order(
    policy: str, waiting: list[Request], cache: RadixCache, now: float, patience: float
) -> Iterable[Request]:
    """``waiting`` (sorted by turn, then by arrival; all yield, or none) as it should be served, sorted as far
    as it is read. A request that has waited longer than ``patience`` goes before all that have not, in the
    order of the list, so nobody starves."""
    if policy == "fcfs" or len(waiting) < 2:
        return list(waiting)
    since = now - patience
    aged = [request for request in waiting if request.arrival < since]  # there may be ten thousand
    others = [request for request in waiting if request.arrival >= since] if aged else list(waiting)
    if policy == "priority":
        for request in aged:
            if not request.yields:
                request.boost()
    return chain(aged, _ORDERS[policy](others, cache))


def _by_rank(waiting: list[Request], cache: RadixCache) -> Iterator[Request]:
    return _smallest_first(waiting, lambda request: request.rank)


def _by_chance(waiting: list[Request], cache: RadixCache) -> list[Request]:
    window = sorted(waiting[:WINDOW], key=lambda request: crc32(request.rid.encode()))
    return window + waiting[WINDOW:]


def _by_prefix(waiting: list[Request], cache: RadixCache) -> list[Request]:
    window = sorted(waiting[:WINDOW], key=lambda request: -_probe(request, cache)[1])
    return window + waiting[WINDOW:]


def _by_branch(waiting: list[Request], cache: RadixCache) -> list[Request]:
    weights: dict[Node, int] = {}
    ending: dict[Node, list[Request]] = {}
    below: dict[Node, list[Node]] = {}
    for request in waiting[:WINDOW]:
        node, _ = _probe(request, cache)
        ending.setdefault(node, []).append(request)
        while True:
            parent = node.parent
            if node not in weights and parent is not None:
                below.setdefault(parent, []).append(node)
            weights[node] = weights.get(node, 0) + 1
            if parent is None:
                break
            node = parent
    backwards: list[Request] = []  # lightest branch first, and a node before what is below it
    stack = [cache.root]
    while stack:
        node = stack.pop()
        backwards += reversed(ending.get(node, []))
        stack += sorted(below.get(node, []), key=lambda child: -weights[child])
    return backwards[::-1] + waiting[WINDOW:]


def _by_outputs(waiting: list[Request], cache: RadixCache) -> Iterator[Request]:
    return _smallest_first(waiting, lambda request: request.known - request.limit)


def _smallest_first(waiting: list[Request], key: Callable[[Request], Any]) -> Iterator[Request]:
    """As ``sorted``; but few steps take more than the first of many,
    so the others are sorted only when their turn comes."""
    first = nsmallest(WINDOW, waiting, key)
    yield from first
    taken = set(first)
    yield from sorted((request for request in waiting if request not in taken), key=key)


def _probe(request: Request, cache: RadixCache) -> tuple[Node, int]:
    """Where the request's prefix ends in the tree; remembered while the tree stays the same."""
    version, node, length = request.probed
    if version != cache.version or node is None:
        node, length = cache.probe(request.namespace, request.data, request.cacheable, request.marks)
        request.probed = (cache.version, node, length)
    return node, length


_ORDERS: dict[str, Order] = {
    "lpm": _by_prefix,
    "dfs-weight": _by_branch,
    "lof": _by_outputs,
    "random": _by_chance,
    "priority": _by_rank,
}

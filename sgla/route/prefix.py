"""What a worker's prefix cache is taken to hold: an approximate radix tree of the prompts it was sent.

Prompts are bytes of JSON, as clients send them: tokens are not needed to see that two begin alike. A prompt
is cut at fixed places, and a node stands for all of it up to such a place, by a digest. So the edges need not
be kept: a node is there only if all above it are, and a prompt's depth is found by bisection.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64  # bytes of the first edges: about a page of 16 tokens
SHARE = 16  # later edges are a sixteenth of what is above them
DIGEST = 8  # bytes


def _edges(most: int) -> list[int]:
    places = [BLOCK]
    while places[-1] < most:
        places.append(places[-1] + max(BLOCK, places[-1] // SHARE // BLOCK * BLOCK))
    return places


EDGES = _edges(4 << 20)  # places at which prompts are cut, bytes; what is behind the last is not looked at
SIZES = [place - before for before, place in zip([0, *EDGES], EDGES)]


def path(prompt: bytes | memoryview, space: bytes = b"") -> list[bytes]:
    """The digests of the prompt's prefixes, the shortest first. Equal prompts of two ``space`` are apart."""
    state = hashlib.blake2b(digest_size=DIGEST, key=hashlib.blake2b(space, digest_size=16).digest())
    found, at, view = [], 0, memoryview(prompt)
    for edge in EDGES:
        if edge > len(view):
            break
        state.update(view[at:edge])
        found.append(state.copy().digest())
        at = edge
    return found


class PrefixTree:
    """The prefixes sent last, ``capacity`` bytes of them: the worker loses them about when this does."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        # Digests and their edges' bytes, the longest unused first; a node is always newer than those below.
        self._nodes: OrderedDict[bytes, int] = OrderedDict()

    def match(self, path: Sequence[bytes]) -> int:
        """Bytes of the prompt that are there."""
        depth = bisect_left(range(len(path)), True, key=lambda place: path[place] not in self._nodes)
        return EDGES[depth - 1] if depth else 0

    def insert(self, path: Sequence[bytes]) -> None:
        for depth in range(len(path) - 1, -1, -1):
            if path[depth] not in self._nodes:
                self._nodes[path[depth]] = SIZES[depth]
                self.size += SIZES[depth]
            else:
                self._nodes.move_to_end(path[depth])
        while self.size > self.capacity:
            self.size -= self._nodes.popitem(last=False)[1]

    def clear(self) -> None:
        self._nodes.clear()
        self.size = 0

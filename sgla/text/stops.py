"""Stop strings in a stream: cut at the first match, hold back only what may still become one.

Source of the automaton: A. Aho and M. Corasick, "Efficient string matching", 1975. The match is the one that ends first,
and among those the longest, so it does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class _Node:
    """A prefix of a stop string. ``match``: length of the longest stop that ends here, 0 if none."""

    __slots__ = ("depth", "fail", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fail: _Node = self
        self.match = 0


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Node:
    """The root of the trie of ``stops`` with failure links; read-only, shared by the requests that use them."""
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.match = len(stop)
    waiting = deque(root.next.values())
    for node in waiting:
        node.fail = root
    while waiting:
        node = waiting.popleft()
        for char, child in node.next.items():
            child.fail = _step(node.fail, char)
            child.match = child.match or child.fail.match
            waiting.append(child)
    return root


def _step(node: _Node, char: str) -> _Node:
    while char not in node.next:
        if node.depth == 0:
            return node
        node = node.fail
    return node.next[char]


class StopMatcher:
    """The state of one output. ``include``: the matched stop stays in the text. Empty stops are ignored."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._node = self._root = _automaton(tuple(filter(None, stops)))
        self._include = include
        self._held = ""

    @property
    def held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop that matched; after a match nothing more may be fed."""
        node, root = self._node, self._root
        if node is root and root.next.keys().isdisjoint(text):
            return text, None
        for position, char in enumerate(text, 1):
            node = _step(node, char)
            if node.match:
                return self._cut(self._held + text[:position], node.match)
        self._node = node
        text = self._held + text
        safe = len(text) - node.depth
        self._held = text[safe:]
        return text[:safe], None

    def _cut(self, text: str, length: int) -> tuple[str, str]:
        self._held = ""
        self._node = self._root
        start = len(text) - length
        return (text if self._include else text[:start]), text[start:]

    def flush(self) -> str:
        """The text that was held back; no stop can match it any more."""
        held, self._held, self._node = self._held, "", self._root
        return held

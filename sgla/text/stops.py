"""Stop strings and expressions in a stream: cut at the first match, hold back only what may still become one.

The match is the one that ends first, and among those the longest, so it does not depend on how the text was
cut into pieces. Where an expression ends with an assertion about the character behind it, that character must
have come. Source of the automaton for strings: A. Aho and M. Corasick, "Efficient string matching", 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from sgla.messages import SamplingParams
from sgla.text.regex import Automaton, automaton

KEPT = 4  # automata of strings, of up to 2 MiB each; ordinary ones are made in microseconds


class Stops(Protocol):
    """The state of one output."""

    @property
    def held(self) -> int:
        """Characters held back."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop that matched; after a match nothing more may be fed."""

    def flush(self) -> tuple[str, str | None]:
        """The same at the end of the text."""


def make_stops(sampling: SamplingParams) -> Stops | None:
    """None if there is nothing to look for. Raises RegexError."""
    literals = tuple(filter(None, sampling.stop))
    if sampling.stop_regex:
        known = automaton(tuple(sampling.stop_regex))
        return RegexMatcher(known, literals, sampling.include_stop_str_in_output)
    return StopMatcher(literals, sampling.include_stop_str_in_output) if literals else None


class _Node:
    """A prefix of a stop string. ``match``: the longest stop that ends here, "" if none."""

    __slots__ = ("depth", "fail", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fail: _Node = self
        self.match = ""


@lru_cache(maxsize=KEPT)
def _automaton(stops: tuple[str, ...]) -> _Node:
    """The root of the trie of ``stops`` with failure links;
    read-only, shared by the requests that use them."""
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.match = stop
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
    """``Stops`` of strings. ``include``: the matched stop stays in the text. Empty stops are ignored."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._node = self._root = _automaton(tuple(filter(None, stops)))
        self._include = include
        self._held = ""

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
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

    def _cut(self, text: str, stop: str) -> tuple[str, str]:
        self._held = ""
        self._node = self._root
        return (text if self._include else text.removesuffix(stop)), stop

    def flush(self) -> tuple[str, str | None]:
        held, self._held, self._node = self._held, "", self._root
        return held, None


class RegexMatcher:
    """``Stops`` of expressions and strings; of two equal matches the expression's counts. The stop that
    matched is told as it was given. With ``include`` nothing is held back."""

    def __init__(self, known: Automaton, strings: Sequence[str] = (), include: bool = False) -> None:
        self._automaton = known
        self._include = include
        self._state = known.start
        self._node = _automaton(tuple(strings))
        self._held = ""
        self._end = 0  # characters fed
        self._starts: list[int] = []  # where the match of each group of the state begins

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        state, starts, step, node = self._state, self._starts, self._automaton.step, self._node
        whole = self._held + text
        offset = self._end - len(self._held)
        for at, char in enumerate(text, self._end):
            state, sources, match = step(state, char)
            node = _step(node, char)
            string = at + 1 - len(node.match)  # where it begins
            if match is not None:
                start = [*starts, at][match.group]
                if match.early or start <= string:
                    return self._cut(whole, offset, start, at if match.early else at + 1, match.name)
            if node.match:
                return self._cut(whole, offset, string, at + 1, node.match)
            if sources or starts:
                starts = [starts[source] if source < len(starts) else at for source in sources]
        self._state, self._starts, self._node = state, starts, node
        self._end += len(text)
        safe = len(whole)
        if not self._include:
            safe = min([self._end - node.depth, *starts[:1]]) - offset
        self._held = whole[safe:]
        return whole[:safe], None

    def flush(self) -> tuple[str, str | None]:
        match = self._automaton.end(self._state)
        if match is not None:
            offset = self._end - len(self._held)
            return self._cut(self._held, offset, self._starts[match.group], self._end, match.name)
        held, self._held = self._held, ""
        return held, None

    def _cut(self, whole: str, offset: int, start: int, end: int, stop: str) -> tuple[str, str]:
        """The text before the match, or up to its ``end``."""
        self._held = ""
        return whole[: (end if self._include else start) - offset], stop

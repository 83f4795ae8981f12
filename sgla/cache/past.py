"""Texts that the prefix tree has had, to tell what it has lost from what it has never seen."""

from __future__ import annotations

from typing import NamedTuple

from sgla.cache.spaces import difference
from sgla.cache.tier import chain
from sgla.cache.tree import TOKEN_BYTES

SPAN = 256  # tokens
MOST = 8192  # spans that are remembered
SPACES = 4  # namespaces of a span that are remembered


class Known(NamedTuple):
    """With how many tokens of a text, whole spans, another one began that the tree has had. ``elsewhere``: in
    another namespace, if that is more; ``why``: see ``spaces.difference``."""

    own: int = 0
    elsewhere: int = 0
    why: str = ""


class Past:
    """Hashes of beginnings of texts, every ``SPAN`` tokens, the latest ``MOST``; of each its latest
    namespaces, the last one first."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: dict[bytes, tuple[str, ...]] = {}

    def add(self, namespace: str, tokens: bytes, begin: int) -> None:
        """The tree has had all of ``tokens``. It had the first ``begin`` of them before, so that their whole
        spans are known already, as far as they are remembered: without one more nothing is hashed."""
        if len(tokens) // TOKEN_BYTES // SPAN * SPAN <= begin:
            return
        for key in reversed(_spans(tokens)):
            others = [space for space in self._spans.pop(key, ()) if space != namespace]
            self._spans[key] = (namespace, *others[: SPACES - 1])
        while len(self._spans) > MOST:
            del self._spans[next(iter(self._spans))]

    def known(self, namespace: str, tokens: bytes, begin: int) -> Known:
        """Nothing, without hashing, where this can be no more than the first ``begin``, which the tree has
        now."""
        if len(tokens) // TOKEN_BYTES // SPAN * SPAN <= begin:
            return Known()
        own, known, why = 0, 0, ""
        for count, key in enumerate(_spans(tokens), 1):
            spaces = self._spans.get(key, ())
            if not spaces:
                break
            if namespace in spaces:
                own = count
            else:
                why = difference(namespace, spaces[0])
            known = count
        return Known(own * SPAN, known * SPAN, why) if known > own else Known(own * SPAN)


def _spans(tokens: bytes) -> list[bytes]:
    width = SPAN * TOKEN_BYTES
    return chain([], "", tokens, width, len(tokens) // width)

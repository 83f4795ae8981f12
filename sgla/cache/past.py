"""Texts that the prefix tree has had, to tell what it has lost from what it has never seen."""

from __future__ import annotations

from sgla.cache.tier import chain
from sgla.cache.tree import TOKEN_BYTES

SPAN = 256  # tokens
MOST = 8192  # spans that are remembered


class Past:
    """Hashes of beginnings of texts, every ``SPAN`` tokens, the latest ``MOST``."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: dict[bytes, None] = {}

    def add(self, namespace: str, tokens: bytes) -> None:
        """The tree has had all of ``tokens`` but the last span."""
        for key in reversed(_spans(namespace, tokens)):
            self._spans.pop(key, None)
            self._spans[key] = None
        while len(self._spans) > MOST:
            del self._spans[next(iter(self._spans))]

    def known(self, namespace: str, tokens: bytes) -> int:
        """With how many tokens of these, whole spans, a text began that it has had."""
        count = 0
        for key in _spans(namespace, tokens):
            if key not in self._spans:
                break
            count += SPAN
        return count


def _spans(namespace: str, tokens: bytes) -> list[bytes]:
    width = SPAN * TOKEN_BYTES
    return chain([], namespace, tokens, width, len(tokens) // width)

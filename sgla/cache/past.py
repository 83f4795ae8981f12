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

    def add(self, namespace: str, tokens: bytes, begin: int) -> None:
        """The tree has had all of ``tokens``. It had the first ``begin`` of them before, so that their whole
        spans are known already, as far as they are remembered: without one more nothing is hashed."""
        if len(tokens) // TOKEN_BYTES // SPAN * SPAN <= begin:
            return
        for key in reversed(_spans(namespace, tokens)):
            self._spans.pop(key, None)
            self._spans[key] = None
        while len(self._spans) > MOST:
            del self._spans[next(iter(self._spans))]

    def known(self, namespace: str, tokens: bytes, begin: int) -> int:
        """With how many tokens of these, whole spans, a text began that it has had. 0 without hashing where
        this can be no more than the first ``begin``, which the tree has now."""
        if len(tokens) // TOKEN_BYTES // SPAN * SPAN <= begin:
            return 0
        count = 0
        for key in _spans(namespace, tokens):
            if key not in self._spans:
                break
            count += SPAN
        return count


def _spans(namespace: str, tokens: bytes) -> list[bytes]:
    width = SPAN * TOKEN_BYTES
    return chain([], namespace, tokens, width, len(tokens) // width)

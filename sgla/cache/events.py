"""What the prefix tree gets and loses, for routers that keep a picture of it: the events of vLLM
(``vllm/distributed/kv_events.py``), a page being a block.

A block's hash says all tokens up to its end and the namespace they are in: two servers have the same hash for
the same text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from sgla.cache.tree import Node

SUM = 8  # bytes of a hash


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that follow each other, and the one before them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    block_hashes: list[int]
    medium: str | None


KvEvent = BlockStored | BlockRemoved


class Events:
    """Those since the last ``drain``. ``medium``: where the tree's pages are, in vLLM's word."""

    def __init__(self, page_size: int, medium: str) -> None:
        self._page_size, self._medium = page_size, medium
        self._hashes: dict[int, int] = {}  # of each page in the tree
        self._events: list[KvEvent] = []

    def stored(self, parent: Node, edge: object, child: Node) -> None:
        """``child`` has come to stand below ``parent``; ``edge``: its key there."""
        above = self._hashes[parent.pages[-1]] if parent.pages else None
        before, hashes, width = above, list[int](), len(child.key) // len(child.pages)
        for i, page in enumerate(child.pages):
            key = edge if i == 0 else child.key[i * width : (i + 1) * width]
            made = blake2b(b"" if before is None else before.to_bytes(SUM, "little"), digest_size=SUM)
            made.update(key if isinstance(key, bytes) else repr(key).encode())
            before = self._hashes[page] = int.from_bytes(made.digest(), "little")
            hashes.append(before)
        tokens = array("i", child.key).tolist()
        self._events.append(BlockStored(hashes, above, tokens, self._page_size, None, self._medium, None))

    def removed(self, pages: Sequence[int]) -> None:
        gone = [self._hashes.pop(page) for page in reversed(pages)]
        self._events.append(BlockRemoved(gone, self._medium))

    def drain(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a scheduler tells nobody."""
        return _nobody, ()


def _nobody() -> None:
    return None

"""The responses that ``previous_response_id`` and ``GET /v1/responses/{id}`` can find: bounded in number, size and age."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from sgla import clock

if TYPE_CHECKING:
    from sgla.http.responses.background import Recorder

Item = dict[str, Any]

MAX_BYTES = 128 << 20


class Stored(msgspec.Struct, kw_only=True):
    """``response`` is the object as clients see it now; ``uid`` names the running request until it has ended.

    ``input``: what it was asked, ``items``: the whole conversation up to its output, once it has ended. ``recorder``: the
    events of one that streams in the background.
    """

    response: dict[str, Any]
    input: list[Item]
    items: list[Item] = []
    uid: str | None
    size: int  # bytes, about
    expires: float = 0.0
    recorder: Recorder | None = None


class ResponseStore:
    """Drops what is older than ``ttl`` seconds, then the oldest beyond ``limit`` entries or ``MAX_BYTES``."""

    def __init__(self, limit: int, ttl: float) -> None:
        self.limit = limit
        self._ttl = ttl
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Stored) -> None:
        entry.expires = clock.now() + self._ttl
        self._entries[entry.response["id"]] = entry
        self._bytes += entry.size
        self._trim()

    def grow(self, entry: Stored, size: int) -> None:
        """An entry has got larger by ``size`` bytes."""
        if self._entries.get(entry.response["id"]) is entry:
            entry.size += size
            self._bytes += size
            self._trim()

    def get(self, uid: str) -> Stored | None:
        self._trim()
        return self._entries.get(uid)

    def delete(self, uid: str) -> Stored | None:
        entry = self._entries.pop(uid, None)
        if entry is not None:
            self._bytes -= entry.size
        return entry

    def item(self, uid: str) -> Item | None:
        """The input or output item with this id."""
        self._trim()
        for entry in reversed(self._entries.values()):
            for item in (*entry.input, *entry.response["output"]):
                if item.get("id") == uid:
                    return item
        return None

    def _trim(self) -> None:
        now = clock.now()
        while self._entries:
            uid, oldest = next(iter(self._entries.items()))
            if oldest.expires > now and len(self._entries) <= self.limit and self._bytes <= MAX_BYTES:
                return
            self.delete(uid)

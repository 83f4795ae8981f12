"""The responses that ``previous_response_id``, ``item_reference`` and ``GET /v1/responses/{id}`` can find: bounded in number, size and
age, and shared among clients (``clients.Client.name``). An owner (``Client.owner``) finds its own responses, a client items by their ids, which
others may have chosen too. Items are kept as JSON: their size is known, and no garbage collection walks through them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sgla import clock
from sgla.http.wire import encode

if TYPE_CHECKING:
    from sgla.http.responses.background import Recorder

Item = dict[str, Any]

MAX_BYTES = 128 << 20
ITEM = 512  # bytes that an item takes beside its JSON
ENTRY = 4096  # bytes that a response takes beside its JSON


class Kept(NamedTuple):
    """An item. ``id`` is "" for one that nobody can refer to."""

    id: str
    json: bytes


def kept(item: Item) -> Kept:
    uid = item.get("id")
    return Kept(uid if isinstance(uid, str) else "", encode(item))


class Part:
    """The items of one response, its input and then its output, behind the conversation ``before``, which is all of the ``client``'s
    that began it.

    ``holders``: its response, if that is stored, and the stored parts behind it, which may outlive the response. ``total`` and
    ``count``: bytes of JSON and items of the whole conversation.
    """

    __slots__ = ("before", "client", "count", "holders", "items", "size", "total")

    def __init__(self, before: Part | None, items: Iterable[Kept], client: str) -> None:
        self.before = before
        self.client: str = client if before is None else before.client
        self.holders = 0
        self.items: list[Kept] = []
        self.size = 0
        self.total: int = 0 if before is None else before.total
        self.count: int = 0 if before is None else before.count
        self.add(items)

    def add(self, items: Iterable[Kept]) -> int:
        """Returns the bytes that they take."""
        new = list(items)
        self.items += new
        self.count += len(new)
        self.total += (size := sum(len(item.json) for item in new))
        taken = size + sum(ITEM + len(item.id) for item in new)
        self.size += taken
        return taken

    def conversation(self) -> list[bytes]:
        """All items up to here."""
        parts: list[list[Kept]] = []
        part: Part | None = self
        while part is not None:
            parts.append(part.items)
            part = part.before
        return [item.json for items in reversed(parts) for item in items]


class Stored(msgspec.Struct, kw_only=True, eq=False):
    """A response. ``live`` is the object as clients see it now, and ``uid`` names the running request, until it has ended; ``json`` is
    what clients see then.

    The first ``asked`` items of ``part`` are its input. ``stop`` ends a request that nobody waits for: without its place here its
    answer could not be found. ``recorder``: the events of one that streams in the background.
    """

    id: str
    owner: str
    part: Part
    asked: int
    uid: str | None
    live: dict[str, Any] | None = None
    live_size: int = 0  # bytes of its JSON at first; they are part of ``size`` until ``json`` takes its place
    json: bytes = b""
    stop: Callable[[], None] | None = None
    recorder: Recorder | None = None
    size: int = ENTRY  # bytes, those of ``part`` left out
    expires: float = 0.0

    def shown(self) -> bytes:
        return self.json if self.live is None else encode(self.live)


class Share:
    """What one client has stored: the responses, oldest first; their bytes; its items by id, each in the parts that have it, newest last."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, Stored] = OrderedDict()
        self.bytes = 0
        self.items: dict[str, dict[Part, int]] = {}

    def index(self, part: Part, start: int) -> None:
        """Have the items of ``part`` from number ``start`` on found."""
        for i, item in enumerate(part.items[start:], start):
            if item.id:
                self.items.setdefault(item.id, {}).setdefault(part, i)

    def forget(self, part: Part) -> None:
        for item in part.items:
            places = self.items.get(item.id, {})
            if places.pop(part, None) is not None and not places:
                del self.items[item.id]


class ResponseStore:
    """Drops what is older than ``ttl`` seconds, then, beyond ``limit`` entries or ``MAX_BYTES``, the oldest of the client that has most.

    The time of a call does not grow with what is stored.
    """

    def __init__(self, limit: int, ttl: float) -> None:
        self.limit = limit
        self._ttl = ttl
        self._entries: OrderedDict[str, Stored] = OrderedDict()  # oldest first
        self._shares: dict[str, Share] = {}  # by client
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Stored) -> None:
        share = self._shares.setdefault(entry.part.client, Share())
        entry.expires = clock.now() + self._ttl
        self._entries[entry.id] = share.entries[entry.id] = entry
        share.index(entry.part, 0)
        self._take(share, entry.size + _hold(entry.part))
        self._trim()

    def grow(self, entry: Stored, size: int) -> None:
        """An entry has got larger by ``size`` bytes."""
        if self._entries.get(entry.id) is entry:
            entry.size += size
            self._take(self._shares[entry.part.client], size)
            self._trim()

    def end(self, entry: Stored, output: Iterable[Item]) -> None:
        """An entry's request is over, with these items."""
        entry.uid = entry.stop = None
        if self._entries.get(entry.id) is not entry:
            return
        share, start = self._shares[entry.part.client], len(entry.part.items)
        entry.json, entry.live = encode(entry.live), None
        self._take(share, entry.part.add(map(kept, output)))
        share.index(entry.part, start)
        self.grow(entry, len(entry.json) - entry.live_size)

    def get(self, uid: str, owner: str) -> Stored | None:
        self._trim()
        entry = self._entries.get(uid)
        return entry if entry is not None and entry.owner == owner else None

    def delete(self, uid: str) -> None:
        entry = self._entries.pop(uid, None)
        if entry is None:
            return
        share = self._shares[entry.part.client]
        del share.entries[uid]
        share.forget(entry.part)
        self._take(share, -entry.size - _release(entry.part))
        if not share.entries:
            del self._shares[entry.part.client]
        if entry.stop is not None:
            entry.stop()

    def item(self, uid: str, client: str) -> bytes | None:
        """The JSON of the client's newest input or output item with this id."""
        self._trim()
        share = self._shares.get(client)
        places = share.items.get(uid) if share is not None else None
        if not places:
            return None
        part = next(reversed(places))
        return part.items[places[part]].json

    def place(self, uid: str, entry: Stored) -> int | None:
        """The number of the item with this id among those of ``entry``."""
        share = self._shares.get(entry.part.client)
        return share.items.get(uid, {}).get(entry.part) if share is not None else None

    def _take(self, share: Share, size: int) -> None:
        share.bytes += size
        self._bytes += size

    def _trim(self) -> None:
        now = clock.now()
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest].expires > now:
                if len(self._entries) > self.limit:
                    oldest = self._oldest(lambda share: len(share.entries))
                elif self._bytes > MAX_BYTES:
                    oldest = self._oldest(lambda share: share.bytes)
                else:
                    return
            self.delete(oldest)

    def _oldest(self, most: Callable[[Share], int]) -> str:
        return next(iter(max(self._shares.values(), key=most).entries))


def _hold(part: Part | None) -> int:
    """Returns the bytes that are held now and were not."""
    size = 0
    while part is not None:
        part.holders += 1
        if part.holders > 1:
            break
        size += part.size
        part = part.before
    return size


def _release(part: Part | None) -> int:
    """Returns the bytes that are held no longer."""
    size = 0
    while part is not None:
        part.holders -= 1
        if part.holders:
            break
        size += part.size
        part = part.before
    return size

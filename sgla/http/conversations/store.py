"""Conversations: lists of items that clients and responses add to. See ``state.shelf`` for how they are
bounded; the age of one is the time since its last change."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

from sgla.errors import BadRequest, InvalidField, NotFound, StorageFailed
from sgla.http.clients import Client
from sgla.http.errors import Busy
from sgla.http.responses import items as rows
from sgla.http.responses.items import ITEM, Kept
from sgla.http.state.database import Database
from sgla.http.state.shelf import ENTRY, Bounds, Shelf, one

T = TypeVar("T")

KIND = "conversation"
MAX_ITEMS = 8192  # of a conversation

SCHEMA = """
CREATE TABLE conversations (
    object INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE,
    part INTEGER NOT NULL
);
"""


class ConversationNotFound(NotFound):
    code = "conversation_not_found"


class ConversationLocked(Busy):
    code = "conversation_locked"


class ItemNotFound(NotFound):
    code = "item_not_found"


class Found(NamedTuple):
    number: int
    json: bytes
    part: rows.Part


class Turn:
    """A response's turn in a conversation: no other response, and no change of its items, comes in between.
    ``asked``: the response's input."""

    def __init__(self, store: ConversationStore, uid: str, client: Client) -> None:
        self.uid = uid
        self.asked: Sequence[Kept] = ()
        self._client = client
        self._store: ConversationStore | None = store

    def end(self, said: Sequence[Kept] | None) -> None:
        """The response has ended with this output; None:
        with an error, which leaves the conversation as it was."""
        if self._store is not None and said is not None:
            self._store.append(self.uid, self._client, [*self.asked, *said])
        self.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.busy.discard((self._client.owner, self.uid))
            self._store = None


class ConversationStore:
    """Raises ConversationNotFound for what an owner has not, ConversationLocked for changes in the middle of
    a response, and StorageFailed."""

    def __init__(self, database: Database, bounds: Bounds) -> None:
        self.shelf = Shelf(database, KIND, bounds, forget=self._forget)
        self.busy: set[tuple[str, str]] = set()  # owners and ids, where a response is in the making

    def turn(self, uid: str, client: Client) -> Turn:
        """Raises ConversationLocked; whether there is such a conversation is not looked at."""
        self._check_free(uid, client.owner)
        self.busy.add((client.owner, uid))
        return Turn(self, uid, client)

    async def create(self, client: Client, uid: str, json: bytes, items: Sequence[Kept]) -> None:
        if not self.shelf.bounds.limit:
            raise BadRequest(
                "this server stores nothing; start it with --response-store to have conversations"
            )

        def work(tx: sqlite3.Connection) -> Iterator[None]:
            number = self.shelf.add(tx, uid, client, json, ENTRY + len(json))
            part = rows.begin(tx, KIND, client.name)
            tx.execute("INSERT INTO conversations VALUES (?, ?)", (number, part.number))
            yield from rows.append(tx, part.number, items)

        await self.shelf.write(client, uid, work, len(json) + rows.taken(items))

    async def find(self, uid: str, client: Client) -> Found:
        return await self._with(uid, client, lambda tx, found: found)

    async def update(self, uid: str, client: Client, json: bytes) -> None:
        await self._with(
            *(uid, client),
            lambda tx, found: self.shelf.change(tx, found.number, json, ENTRY + len(json)),
            len(json),
        )

    async def delete(self, uid: str, client: Client) -> None:
        await self._with(uid, client, lambda tx, found: self.shelf.remove(tx, found.number))
        self.shelf.database.tidy()

    async def add(self, uid: str, client: Client, items: Sequence[Kept]) -> None:
        """Raises InvalidField for more items than there may be, and for ids that are there already."""

        def work(tx: sqlite3.Connection, found: Found) -> Iterator[None]:
            self._check_free(uid, client.owner)
            if found.part.items + len(items) > MAX_ITEMS:
                raise InvalidField(
                    "items: the conversation would have "
                    f"{found.part.items + len(items)} items, the limit is {MAX_ITEMS}",
                    param="items",
                )
            for item in items:
                if rows.place(tx, found.part.number, item.id) is not None:
                    raise InvalidField(
                        f"items: the conversation has an item {item.id[:200]!r} already", param="items"
                    )
            yield from self._append(tx, found.number, found.part.number, items)

        await self._with(uid, client, work, rows.taken(items))

    def append(self, uid: str, client: Client, items: Sequence[Kept]) -> None:
        """What a response has added. A conversation that has gone meanwhile stays so."""

        def work(tx: sqlite3.Connection) -> Iterator[None]:
            if (number := self.shelf.number(tx, uid)) is not None:
                (part,) = one(tx, "SELECT part FROM conversations WHERE object = ?", number)
                yield from self._append(tx, number, part, items)

        try:
            self.shelf.queue(client, uid, work, rows.taken(items))
        except StorageFailed:  # which is logged and counted; the client has its answer
            pass

    async def page(
        self, uid: str, client: Client, limit: int, after: str | None, ascending: bool
    ) -> tuple[list[Kept], bool]:
        """Items, and whether there are more. Raises InvalidField if there is no item ``after``."""

        def work(tx: sqlite3.Connection, found: Found) -> tuple[list[Kept], bool]:
            at = None if after is None else rows.place(tx, found.part.number, after)
            if after is not None and at is None:
                raise InvalidField("after must be the id of an item of this conversation", param="after")
            return rows.page(tx, found.part.number, limit, at, ascending)

        return await self._with(uid, client, work)

    async def item(self, uid: str, client: Client, item: str) -> bytes:
        """Raises ItemNotFound."""
        return await self._with(uid, client, lambda tx, found: self._item(tx, found, item)[1])

    async def delete_item(self, uid: str, client: Client, item: str) -> bytes:
        """Returns the conversation's JSON. Raises ItemNotFound."""

        def work(tx: sqlite3.Connection, found: Found) -> bytes:
            self._check_free(uid, client.owner)
            place, json = self._item(tx, found, item)
            tx.execute("DELETE FROM items WHERE part = ? AND place = ?", (found.part.number, place))
            rows.grow(tx, found.part.number, -len(json), -1, -len(json) - ITEM - len(item))
            self.shelf.change(tx, found.number)
            return found.json

        return await self._with(uid, client, work)

    # for work

    async def _with(
        self,
        uid: str,
        client: Client,
        work: Callable[[sqlite3.Connection, Found], T | Generator[None, None, T]],
        size: int = 0,
    ) -> T:
        def found(tx: sqlite3.Connection) -> T | Generator[None, None, T]:
            row = self.shelf.find(tx, uid, client.owner)
            if row is None:
                raise ConversationNotFound(f"there is no conversation {uid[:200]!r}")
            part = rows.part(tx, one(tx, "SELECT part FROM conversations WHERE object = ?", row.number)[0])
            assert part is not None
            return work(tx, Found(row.number, row.json, part))

        return await self.shelf.write(client, uid, found, size)

    def _append(
        self, tx: sqlite3.Connection, number: int, part: int, items: Sequence[Kept]
    ) -> Iterator[None]:
        yield from rows.append(tx, part, items)
        self.shelf.change(tx, number)

    def _item(self, tx: sqlite3.Connection, found: Found, item: str) -> tuple[int, bytes]:
        """Its place and JSON."""
        place = rows.place(tx, found.part.number, item)
        if place is None:
            raise ItemNotFound(f"the conversation has no item {item[:200]!r}")
        query = "SELECT json FROM items WHERE part = ? AND place = ?"
        return place, one(tx, query, found.part.number, place)[0]

    def _forget(self, tx: sqlite3.Connection, number: int) -> None:
        (part,) = one(tx, "SELECT part FROM conversations WHERE object = ?", number)
        tx.execute("DELETE FROM parts WHERE number = ?", (part,))

    def _check_free(self, uid: str, owner: str) -> None:
        if (owner, uid) in self.busy:
            raise ConversationLocked(
                f"a response is in the making in conversation {uid[:200]!r}; retry when it has ended",
                param="conversation",
            )

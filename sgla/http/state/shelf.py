"""Objects of one kind that clients store:
bounded in number, bytes and age, shared among clients, each found by its owner alone.

``owner`` and ``client`` are those of ``clients.Client`` (``owner`` and ``name``). Methods that take a
connection are for the work of ``Database.run``, where one transaction can do several things.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from sgla import clock
from sgla.config import Config
from sgla.http.clients import Client
from sgla.http.state.database import Database, Work
from sgla.http.state.leftovers import off

T = TypeVar("T")

BATCH = 16  # objects that make room in one transaction; more go in the next ones
LARGE = 4 << 20  # bytes of JSON of which the same is true
ENTRY = 4096  # bytes that an object counts for beside its JSON
PART = 64 << 10  # bytes that are read at once
# Bytes that a client that does not read can have held for it: a part, and what its connection takes before it
# waits.
UNREAD = 3 * PART
PART_PIECES = 256  # and pieces

# ``stamp``: seconds since 1970 when the object was put or last changed.
# ``totals`` and ``shares`` are sums that triggers keep.
SCHEMA = """
CREATE TABLE objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    client TEXT NOT NULL,
    stamp REAL NOT NULL,
    size INTEGER NOT NULL,
    json BLOB NOT NULL,
    UNIQUE (kind, id)
);
CREATE INDEX objects_by_age ON objects (kind, stamp, number);
CREATE INDEX objects_by_share ON objects (kind, client, stamp, number);
CREATE INDEX objects_by_owner ON objects (kind, owner, number);

CREATE TABLE shares (
    kind TEXT NOT NULL,
    client TEXT NOT NULL,
    count INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (kind, client)
) WITHOUT ROWID;
CREATE INDEX shares_by_count ON shares (kind, count);
CREATE INDEX shares_by_bytes ON shares (kind, bytes);
CREATE TABLE totals (kind TEXT PRIMARY KEY, count INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;

CREATE VIEW taken AS SELECT kind, client, count, bytes FROM shares;
CREATE TRIGGER take INSTEAD OF INSERT ON taken BEGIN
    INSERT INTO totals VALUES (new.kind, new.count, new.bytes)
        ON CONFLICT DO UPDATE SET count = count + new.count, bytes = bytes + new.bytes;
    INSERT INTO shares VALUES (new.kind, new.client, new.count, new.bytes)
        ON CONFLICT DO UPDATE SET count = count + new.count, bytes = bytes + new.bytes;
    DELETE FROM shares WHERE kind = new.kind AND client = new.client AND count = 0 AND bytes = 0;
END;
CREATE TRIGGER object_put AFTER INSERT ON objects BEGIN
    INSERT INTO taken VALUES (new.kind, new.client, 1, new.size);
END;
CREATE TRIGGER object_resized AFTER UPDATE OF size ON objects WHEN new.size <> old.size BEGIN
    INSERT INTO taken VALUES (new.kind, new.client, 0, new.size - old.size);
END;
CREATE TRIGGER object_removed AFTER DELETE ON objects BEGIN
    INSERT INTO taken VALUES (old.kind, old.client, -1, -old.size);
END;
"""


class Bounds(NamedTuple):
    """``limit``: objects of one kind; ``bytes``: what they count for;
    ``ttl``: seconds that one is kept after its last change."""

    limit: int
    bytes: int
    ttl: float


def bounds(config: Config, on_disk: bool) -> Bounds:
    """Those of responses, and as many conversations:
    what the flags say, else more on a disk than in memory."""
    limit, size, ttl = (65536, 1 << 30, 30 * 86400.0) if on_disk else (1024, 128 << 20, 3600.0)
    return Bounds(
        limit if config.response_store is None else config.response_store,
        size if config.state_bytes is None else config.state_bytes,
        ttl if config.response_ttl is None else config.response_ttl,
    )


class Trimmed(NamedTuple):
    """The ids of objects that made room, and whether there are more."""

    ids: list[str]
    more: bool


class Row(NamedTuple):
    """An object. ``number``: its key, by which other tables refer to it (``REFERENCES objects ON DELETE
    CASCADE``); larger for newer ones."""

    number: int
    id: str
    client: str
    size: int
    json: bytes


ROW = "number, id, client, size, json"


class Shelf:
    """Drops what is older than ``bounds.ttl``, then, beyond ``bounds.limit`` objects or ``bounds.bytes``, the
    oldest of the client that has most.

    ``forget(connection, row number)`` is called in the transaction before an object is removed, for what it
    leaves behind in other tables (``state.leftovers``); ``gone(ids)`` on the loop with those that were
    removed to make room or for their age: what still works on them ends. The time of a call does not grow
    with what is stored.
    """

    def __init__(
        self,
        database: Database,
        kind: str,
        bounds: Bounds,
        gone: Callable[[list[str]], None] | None = None,
        forget: Callable[[sqlite3.Connection, int], None] | None = None,
    ) -> None:
        self.bounds = bounds
        self.held = 0, 0  # objects and bytes, as they were when room was last made
        self.database = database
        self.kind = kind
        self._gone = gone
        self._forget = forget
        self._writing: dict[
            str, tuple[str, int]
        ] = {}  # objects with writes that nobody waits for: their line, and how many

    # transactions

    async def run(self, client: Client, uid: str, work: Work[T]) -> T:
        """``Database.run`` for work on an object, behind what is being written of it:
        without keys, by other clients, too."""
        return await self.database.run(client, work, line=self._line(client, uid))

    async def write(self, client: Client, uid: str, work: Work[T], size: int = 0) -> T:
        """The same for work that adds about ``size`` bytes; what it adds has room made for it."""
        result, trimmed = await self.run(client, uid, self._with_room(work, size))
        self._trimmed(trimmed)
        return result

    def queue(
        self, client: Client, uid: str, work: Work[Any], size: int
    ) -> asyncio.Future[tuple[Any, Trimmed] | None]:
        """``Database.queue`` in the same way."""
        line = self._line(client, uid)
        written = self.database.queue(client, self._with_room(work, size), size, line)
        self._writing[uid] = line, self._writing.get(uid, (line, 0))[1] + 1
        written.add_done_callback(lambda done: self._written(uid, done.result()))
        return written

    def sweep(self) -> None:
        """Remove what is too old; to be called now and then, since what nobody asks for would stay."""
        self.database.clean(None, self.trim, self._trimmed)

    def _line(self, client: Client, uid: str) -> str:
        return self._writing.get(uid, (client.name, 0))[0]

    def _written(self, uid: str, done: tuple[Any, Trimmed] | None) -> None:
        line, count = self._writing.pop(uid)
        if count > 1:
            self._writing[uid] = line, count - 1
        if done is not None:
            self._trimmed(done[1])

    def _with_room(self, work: Work[T], size: int) -> Work[tuple[T, Trimmed]]:
        def parts(tx: sqlite3.Connection) -> Generator[None, None, tuple[T, Trimmed]]:
            found = work(tx)
            result = (yield from found) if isinstance(found, Generator) else found
            trimmed = self.trim(tx)
            yield from self.database.leftovers.free_for(tx, size)
            return result, trimmed

        return parts

    def _trimmed(self, trimmed: Trimmed) -> None:
        if not trimmed.ids:
            return
        if self._gone is not None:
            self._gone(trimmed.ids)
        self.database.tidy()
        if trimmed.more:
            self.sweep()

    # for work

    def add(self, tx: sqlite3.Connection, uid: str, client: Client, json: bytes, size: int) -> int:
        """Store an object that counts for ``size`` bytes; returns its number. ``uid`` must be new."""
        added = tx.execute(
            "INSERT INTO objects (kind, id, owner, client, stamp, size, json) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self.kind, uid, client.owner, client.name, clock.wall(), size, json),
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def find(self, tx: sqlite3.Connection, uid: str, owner: str) -> Row | None:
        found = one(
            tx,
            f"SELECT {ROW} FROM objects WHERE kind = ? AND id = ? AND owner = ? AND stamp > ?",
            *(self.kind, uid, owner, self._horizon()),
        )
        return found and Row(*found)

    def page(
        self,
        tx: sqlite3.Connection,
        owner: str,
        limit: int,
        after: int | None = None,
        newest_first: bool = True,
    ) -> list[Row]:
        """Up to ``limit`` objects of the owner behind number ``after``;
        ask for one more than is shown to know whether there are more."""
        order, side = ("DESC", "<") if newest_first else ("ASC", ">")
        beyond = "" if after is None else f"AND number {side} {after:d}"
        found = tx.execute(
            f"SELECT {ROW} FROM objects WHERE kind = ? AND owner = ? AND stamp > "
            f"? {beyond} ORDER BY number {order} LIMIT ?",
            (self.kind, owner, self._horizon(), limit),
        )
        return [Row(*row) for row in found]

    def number(self, tx: sqlite3.Connection, uid: str) -> int | None:
        """That of an object, whoever owns it."""
        found = one(tx, "SELECT number FROM objects WHERE kind = ? AND id = ?", self.kind, uid)
        return found and found[0]

    def change(
        self, tx: sqlite3.Connection, number: int, json: bytes | None = None, size: int | None = None
    ) -> None:
        """Give an object another JSON, or other bytes to count for; its age is 0 again."""
        tx.execute(
            "UPDATE objects SET json = coalesce(?, json), size = "
            "coalesce(?, size), stamp = ? WHERE number = ?",
            (json, size, clock.wall(), number),
        )

    def remove(self, tx: sqlite3.Connection, number: int) -> None:
        if self._forget is not None:
            self._forget(tx, number)
        tx.execute("DELETE FROM objects WHERE number = ?", (number,))

    def trim(self, tx: sqlite3.Connection) -> Trimmed:
        """Make room, until others should have their turn."""
        removed: list[str] = []
        size = 0
        while (found := self._least(tx)) is not None:
            if len(removed) == BATCH or size > LARGE:
                return Trimmed(removed, True)
            number, uid, length = found
            self.remove(tx, number)
            removed.append(uid)
            size += length
        return Trimmed(removed, False)

    def _least(self, tx: sqlite3.Connection) -> tuple[int, str, int] | None:
        """Number, id and bytes of JSON of the object that has to go next."""
        oldest = (
            "SELECT number, id, length(json) FROM objects WHERE kind = ? {} ORDER BY stamp, number LIMIT 1"
        )
        count, size, stamp = one(
            tx,
            "SELECT count, bytes, (SELECT min(stamp) FROM objects WHERE "
            "kind = ?1) FROM totals WHERE kind = ?1",
            self.kind,
        ) or (0, 0, None)
        if stamp is not None and stamp <= self._horizon():
            return one(tx, oldest.format(""), self.kind)
        if count > self.bounds.limit:
            most = "count"
        elif count and size > self.bounds.bytes:
            most = "bytes"
        else:
            self.held = count, size
            return None
        (client,) = one(
            tx,
            f"SELECT client FROM shares WHERE kind = ? AND count > 0 ORDER BY {most} DESC LIMIT 1",
            self.kind,
        )
        return one(tx, oldest.format("AND client = ?"), self.kind, client)

    def _horizon(self) -> float:
        """What was last changed then is too old."""
        return clock.wall() - self.bounds.ttl


class Pieces(NamedTuple):
    """A table that has what belongs to an object in pieces, ``data``: the columns that name the object, that
    order its pieces, and of the bytes."""

    table: str
    object: str
    order: str
    data: str = "data"

    def free(self, tx: sqlite3.Connection, numbers: str, size: int) -> None:
        """A way of ``Leftovers``."""
        tx.execute(
            f"""
            DELETE FROM {self.table} WHERE rowid IN (
                SELECT row FROM (
                    SELECT row, sum(size) OVER (ORDER BY row ROWS UNBOUNDED PRECEDING) - size AS before FROM (
                        SELECT {self.table}.rowid AS row, length({self.table}.{self.data}) AS size
                        FROM json_each(?) AS gone
                        CROSS JOIN {self.table} ON {self.object} = gone.value LIMIT ?
                    )
                ) WHERE before < ?
            )
            """,
            (numbers, PART_PIECES, size),
        )
        off(
            tx,
            self.table,
            numbers,
            f"NOT EXISTS (SELECT 1 FROM {self.table} WHERE {self.object} = leftovers.number)",
        )

    def read(self, number: int, piece: int, start: int, tx: sqlite3.Connection) -> tuple[bytes, int, int]:
        """Up to PART bytes of object ``number`` from byte ``start`` of piece ``piece`` on, however large that
        is, and the piece and the byte where the next ones begin; b"" at the end."""
        rows = tx.execute(
            f"SELECT rowid, {self.order}, iif(length({self.data}) <= ?, {self.data}, NULL) FROM {self.table} "
            f"WHERE {self.object} = ? AND {self.order} >= ? ORDER BY {self.order} LIMIT ?",
            (PART, number, piece, PART_PIECES),
        )
        found = bytearray()
        for row, at, data in rows:
            if at != piece:
                piece, start = at, 0
            left = PART - len(found)
            if data is None:
                with tx.blobopen(self.table, self.data, row, readonly=True) as blob:
                    blob.seek(start)
                    data = blob.read(left)
            else:
                data = data[start : start + left]
            start += len(data)
            found += data
            if len(found) == PART:
                break
        return bytes(found), piece, start


def one(tx: sqlite3.Connection, query: str, *values: Any) -> Any:
    """The first row of a query; None if there is none."""
    return tx.execute(query, values).fetchone()

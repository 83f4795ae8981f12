"""Files that clients upload and batches make:
in pieces in the database, so that no file takes the memory of its size.

A file is an object of the shelf, found by its owner. One that is on its way up, or that a batch still writes,
is there too, as ``HIDDEN``'s; its bytes count from the first piece on. A file that is in use is pinned:
neither its age nor others' want of room removes it. The pieces of a file that is removed go a few at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Generator, Iterator
from functools import partial
from typing import Any

import msgspec

from sgla import clock
from sgla.config import Config
from sgla.errors import TooLarge
from sgla.http.bodies import Share
from sgla.http.clients import Client
from sgla.http.ids import random_id
from sgla.http.state.database import Database
from sgla.http.state.shelf import BATCH, ENTRY, Bounds, Pieces, Row, Shelf, one
from sgla.http.wire import encode

SCHEMA = """
CREATE TABLE pieces (
    file INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TRIGGER file_removed AFTER DELETE ON objects WHEN old.kind = 'file' BEGIN
    INSERT INTO leftovers VALUES ('pieces', old.number);
END;
"""

FILE = "file"  # the kind
PURPOSE, MADE = "batch", "batch_output"
HIDDEN = "\0"  # an owner that no client is
PINNED = 1e12  # a stamp that is never old
PIECE = 64 << 10  # bytes of an upload that are stored at once
SMALL = 4096  # bytes of pieces that are stored by one statement
COST = 64  # bytes that a piece counts for beside its data
PIECES = Pieces("pieces", "file", "number")
LISTED = 256  # files that are looked at in one transaction for a list
MOST_BYTES = 200 << 20  # of one file
TTL = 30 * 86400  # seconds that a file is kept, at most
UNBOUNDED = 1 << 62


class StorageFull(TooLarge):
    """Nothing can make room for what is to be stored."""

    code = "storage_full"


def file_bounds(config: Config) -> Bounds:
    size = (
        (256 << 20 if config.state_path is None else 4 << 30)
        if config.files_bytes is None
        else config.files_bytes
    )
    return Bounds(4096, size, TTL)


class Files:
    """Bounded in number, bytes and age. A client may have half of both; where all together have too much, the
    one that has most loses its oldest file that is not in use, unless it is the one that asks."""

    def __init__(self, database: Database, bounds: Bounds) -> None:
        self.bounds = bounds
        self.database = database
        self.shelf = Shelf(database, FILE, Bounds(UNBOUNDED, UNBOUNDED, bounds.ttl))
        database.leftovers.ways[PIECES.table] = PIECES.free

    @property
    def longest(self) -> int:
        """Bytes that one file may have."""
        return min(MOST_BYTES, self.bounds.bytes // 2)

    # in transactions

    def begin(self, tx: sqlite3.Connection, client: Client) -> int:
        """A hidden file without pieces, for which there is room; returns its number."""
        uid = f"file-{random_id()}"
        number = self.shelf.add(tx, uid, Client(client.name, HIDDEN), b"{}", ENTRY)
        self.pin(tx, number)
        return number

    def put(
        self, tx: sqlite3.Connection, number: int, piece: int, data: bytes, client: str
    ) -> Iterator[None]:
        """Add a piece to a hidden file. Raises StorageFull."""
        yield from self.make_room(tx, client, len(data) + COST)
        tx.execute("INSERT INTO pieces VALUES (?, ?, ?)", (number, piece, data))
        self.grow(tx, number, len(data) + COST)
        yield from self.database.leftovers.free_for(tx, len(data))

    def put_all(
        self,
        tx: sqlite3.Connection,
        texts: dict[int, list[tuple[int, bytes]]],
        client: str,
    ) -> Iterator[None]:
        """Add pieces of text to hidden files, by their numbers: all of them, or none. Raises StorageFull."""
        size = sum(COST + len(text) for pieces in texts.values() for _, text in pieces)
        yield from self.make_room(tx, client, size)
        for number, pieces in texts.items():
            small = [(piece, text.decode()) for piece, text in pieces if len(text) <= SMALL]
            tx.execute(
                "INSERT INTO pieces SELECT ?, json_extract(value, '$[0]'), "
                "CAST(json_extract(value, '$[1]') AS BLOB) FROM json_each(?)",
                (number, encode(small).decode()),
            )
            long = [(number, piece, text) for piece, text in pieces if len(text) > SMALL]
            tx.executemany("INSERT INTO pieces VALUES (?, ?, ?)", long)
            self.grow(tx, number, sum(COST + len(text) for _, text in pieces))
        yield from self.database.leftovers.free_for(tx, size)

    def grow(self, tx: sqlite3.Connection, number: int, size: int) -> None:
        tx.execute("UPDATE objects SET size = size + ? WHERE number = ?", (size, number))

    def show(self, tx: sqlite3.Connection, number: int, owner: str, file: dict[str, Any]) -> bytes:
        """Have a hidden file found, as ``file`` without its id; returns the JSON of the whole object."""
        (uid,) = one(tx, "SELECT id FROM objects WHERE number = ?", number)
        json = encode({"id": uid, **file})
        tx.execute(
            "UPDATE objects SET owner = ?, json = ?, stamp = ? WHERE number = ?",
            (owner, json, self.stamp(file["expires_at"]), number),
        )
        return json

    def pin(self, tx: sqlite3.Connection, number: int) -> None:
        tx.execute("UPDATE objects SET stamp = ? WHERE number = ?", (PINNED, number))

    def unpin(self, tx: sqlite3.Connection, number: int) -> None:
        found = one(tx, "SELECT json FROM objects WHERE number = ?", number)
        if found is not None:
            expires = msgspec.json.decode(found[0])["expires_at"]
            tx.execute("UPDATE objects SET stamp = ? WHERE number = ?", (self.stamp(expires), number))

    def pinned(self, tx: sqlite3.Connection, number: int) -> bool:
        return one(tx, "SELECT 1 FROM objects WHERE number = ? AND stamp = ?", number, PINNED) is not None

    def stamp(self, expires: float) -> float:
        """With which a file is too old then."""
        return expires - self.bounds.ttl

    def make_room(self, tx: sqlite3.Connection, client: str, more: int, files: int = 0) -> Iterator[None]:
        """For ``more`` bytes, or ``files``, that ``client`` stores next. Raises StorageFull."""
        bounds, removed = self.bounds, 0
        count, size = taken(tx, "shares WHERE kind = ? AND client = ?", FILE, client)
        count, size = count + files, size + more
        if count > bounds.limit // 2 or size > bounds.bytes // 2:
            raise StorageFull(
                f"your files would be {count} with {size} bytes; you may have {bounds.limit // 2} with "
                f"{bounds.bytes // 2}; delete some, or start the server with a larger --files-bytes"
            )
        while True:
            count, size = taken(tx, "totals WHERE kind = ?", FILE)
            count, size = count + files, size + more
            if count <= bounds.limit and size <= bounds.bytes:
                return
            most = "count" if count > bounds.limit else "bytes"
            (largest,) = one(
                tx, f"SELECT client FROM shares WHERE kind = ? ORDER BY {most} DESC LIMIT 1", FILE
            )
            oldest = one(
                tx,
                "SELECT number FROM objects WHERE kind = ? AND client = ? AND "
                "stamp < ? ORDER BY stamp, number LIMIT 1",
                *(FILE, largest, PINNED),
            )
            if largest == client or oldest is None:
                raise StorageFull(
                    f"the files of all clients would be {count} with {size} bytes; {bounds.limit} with "
                    f"{bounds.bytes} are the limit; delete some, or start the server with a larger "
                    "--files-bytes"
                )
            self.shelf.remove(tx, oldest[0])
            removed += 1
            if removed % BATCH == 0:
                yield

    def listed(
        self, tx: sqlite3.Connection, client: Client, purpose: str | None, after: int, newest_first: bool
    ) -> tuple[list[str], list[bytes], int | None]:
        """Ids and JSON of the client's files among the owner's next ``LISTED`` behind number ``after``, and
        the number of the last of these; None if there are no more. Without keys all have one owner, and a
        list would tell each the ids of the others."""
        order, side, last = ("DESC", "<", "min") if newest_first else ("ASC", ">", "max")
        ids, text, count, at = one(
            tx,
            f"""
            SELECT
                group_concat(iif(wanted, id, NULL)),
                cast(group_concat(iif(wanted, text, NULL), char(10)) AS BLOB),
                count(*),
                {last}(number)
            FROM (
                SELECT *, client = ?3 AND (?4 IS NULL OR json_extract(text, '$.purpose') = ?4) AS wanted
                FROM (
                    SELECT number, id, client, CAST(json AS TEXT) AS text FROM objects
                    WHERE kind = ?1 AND owner = ?2 AND number {side} ?5 AND stamp > ?6
                    ORDER BY number {order} LIMIT ?7
                )
            )
            """,
            *(FILE, client.owner, client.name, purpose, after, clock.wall() - self.bounds.ttl, LISTED),
        )
        found = (ids.split(","), text.split(b"\n")) if ids else ([], [])
        return *found, at if count == LISTED else None

    # on the loop

    async def find(self, uid: str, client: Client) -> Row | None:
        return await self.database.run(client, lambda tx: self.shelf.find(tx, uid, client.owner))

    async def page(
        self,
        client: Client,
        purpose: str | None,
        limit: int,
        after: int | None,
        newest_first: bool,
        share: Share,
    ) -> tuple[list[str], list[bytes], bool]:
        """Ids and JSON, which is in ``share``, of up to ``limit`` of the client's files behind number
        ``after``, and whether there are more."""
        ids: list[str] = []
        found: list[bytes] = []
        at: int | None = (UNBOUNDED if newest_first else 0) if after is None else after
        while at is not None and len(ids) <= limit:
            work = partial(self.listed, client=client, purpose=purpose, after=at, newest_first=newest_first)
            more, json, at = await self.database.run(client, work)
            share.take(sum(map(len, json)))
            ids += more
            found += json
        return ids[:limit], found[:limit], len(ids) > limit

    async def content(self, client: Client, number: int) -> AsyncIterator[bytes]:
        """The bytes of a file, a few at a time."""
        piece = start = 0
        while True:
            work = partial(PIECES.read, number, piece, start)
            data, piece, start = await self.database.run(client, work)
            if not data:
                return
            yield data

    async def open(self, client: Client) -> int:
        """A hidden file without pieces; returns its number. Raises StorageFull."""

        def work(tx: sqlite3.Connection) -> Generator[None, None, int]:
            yield from self.make_room(tx, client.name, ENTRY, 1)
            return self.begin(tx, client)

        return await self.database.run(client, work)

    def drop(self, number: int, client: Client) -> None:
        """Remove a hidden file."""
        self.database.clean(client, lambda tx: self.shelf.remove(tx, number), lambda _: self.tidy())

    def tidy(self) -> None:
        """Remove what is left of removed files, some pieces at a time, so that others get their turn."""
        self.database.tidy()


def taken(tx: sqlite3.Connection, place: str, *values: str) -> tuple[int, int]:
    """Files and bytes, of all or of a client."""
    return one(tx, f"SELECT count, bytes FROM {place}", *values) or (0, 0)


def file_object(size: int, name: str, purpose: str, created: int, expires: int) -> dict[str, Any]:
    """A file as clients see it, without its id."""
    return {
        "object": "file",
        "bytes": size,
        "created_at": created,
        "expires_at": expires,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }

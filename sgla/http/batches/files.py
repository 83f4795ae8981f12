"""Files that clients upload and batches make: in pieces in the database, so that no file takes the memory of its size.

A file is an object of the shelf, found by its owner. One that is on its way up, or that a batch still writes, is there too, as ``HIDDEN``'s; its
bytes count from the first piece on. A file that is in use is pinned: neither its age nor others' want of room removes it. The pieces of a
file that is removed go a few at a time.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from sgla import clock
from sgla.config import Config
from sgla.errors import TooLarge
from sgla.http.clients import Client
from sgla.http.state.database import Database
from sgla.http.state.shelf import ENTRY, PART_PIECES, Bounds, Pieces, Row, Shelf, one
from sgla.http.wire import encode

SCHEMA = """
CREATE TABLE pieces (
    file INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE removed_files (number INTEGER PRIMARY KEY);
CREATE TRIGGER file_removed AFTER DELETE ON objects WHEN old.kind = 'file' BEGIN
    INSERT INTO removed_files VALUES (old.number);
END;
"""

FILE = "file"  # the kind
PURPOSE, MADE = "batch", "batch_output"
HIDDEN = "\0"  # an owner that no client is
PINNED = 1e12  # a stamp that is never old
PIECE = 64 << 10  # bytes of an upload that are stored at once
COST = 64  # bytes that a piece counts for beside its data
PIECES = Pieces("pieces", "file", "number")
SHED = 2  # pieces of removed files that go with each new one
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
    """Bounded in number, bytes and age. A client may have half of both; where all together have too much, the one that has most loses its
    oldest file that is not in use, unless it is the one that asks."""

    def __init__(self, database: Database, bounds: Bounds) -> None:
        self.bounds = bounds
        self.database = database
        self.shelf = Shelf(database, FILE, Bounds(UNBOUNDED, UNBOUNDED, bounds.ttl), lambda _: self.tidy())

    @property
    def longest(self) -> int:
        """Bytes that one file may have."""
        return min(MOST_BYTES, self.bounds.bytes // 2)

    # in transactions -------------------------------------------------------------------------------------------------

    def begin(self, tx: sqlite3.Connection, client: Client) -> int:
        """A hidden file without pieces; returns its number. Raises StorageFull."""
        uid = f"file-{secrets.token_hex(16)}"
        number = self.shelf.add(tx, uid, Client(client.name, HIDDEN), b"{}", ENTRY)
        self.pin(tx, number)
        self.make_room(tx, client.name)
        return number

    def put(self, tx: sqlite3.Connection, number: int, piece: int, data: bytes, client: str) -> None:
        """Add a piece to a hidden file. Raises StorageFull."""
        shed(tx, SHED)
        tx.execute("INSERT INTO pieces VALUES (?, ?, ?)", (number, piece, data))
        self.grow(tx, number, len(data) + COST, client)

    def put_all(self, tx: sqlite3.Connection, number: int, lines: list[tuple[int, str]], client: str) -> None:
        """Add pieces of text, in one statement."""
        shed(tx, SHED * len(lines))
        tx.execute(
            "INSERT INTO pieces SELECT ?, json_extract(value, '$[0]'), CAST(json_extract(value, '$[1]') AS BLOB) FROM json_each(?)",
            (number, encode(lines).decode()),
        )
        self.grow(tx, number, sum(COST + len(text.encode()) for _, text in lines), client)

    def grow(self, tx: sqlite3.Connection, number: int, size: int, client: str) -> None:
        tx.execute("UPDATE objects SET size = size + ? WHERE number = ?", (size, number))
        self.make_room(tx, client)

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

    def make_room(self, tx: sqlite3.Connection, client: str) -> None:
        """For what ``client`` has just stored. Raises StorageFull."""
        bounds = self.bounds
        count, size = one(tx, "SELECT count, bytes FROM shares WHERE kind = ? AND client = ?", FILE, client)
        if count > bounds.limit // 2 or size > bounds.bytes // 2:
            raise StorageFull(
                f"your files would be {count} with {size} bytes; you may have {bounds.limit // 2} with {bounds.bytes // 2}; delete "
                "some, or start the server with a larger --files-bytes"
            )
        while True:
            count, size = one(tx, "SELECT count, bytes FROM totals WHERE kind = ?", FILE)
            if count <= bounds.limit and size <= bounds.bytes:
                return
            most = "count" if count > bounds.limit else "bytes"
            (largest,) = one(
                tx, f"SELECT client FROM shares WHERE kind = ? ORDER BY {most} DESC LIMIT 1", FILE
            )
            oldest = one(
                tx,
                "SELECT number FROM objects WHERE kind = ? AND client = ? AND stamp < ? ORDER BY stamp, number LIMIT 1",
                *(FILE, largest, PINNED),
            )
            if largest == client or oldest is None:
                raise StorageFull(
                    f"the files of all clients would be {count} with {size} bytes; {bounds.limit} with {bounds.bytes} are the limit; delete "
                    "some, or start the server with a larger --files-bytes"
                )
            self.shelf.remove(tx, oldest[0])

    def page(
        self,
        tx: sqlite3.Connection,
        client: Client,
        purpose: str | None,
        limit: int,
        after: int | None,
        newest_first: bool,
    ) -> tuple[list[str], str, bool]:
        """Ids and JSON of up to ``limit`` files of the client behind number ``after``, the JSON joined by commas, and whether there are
        more. Without keys all have one owner, and a list would tell each the ids of the others."""
        order, side = ("DESC", "<") if newest_first else ("ASC", ">")
        wanted = f"""
            FROM objects WHERE kind = ? AND owner = ? AND client = ? AND stamp > ? AND number {side} ?
            AND (?6 IS NULL OR json_extract(CAST(json AS TEXT), '$.purpose') = ?6) ORDER BY number {order} LIMIT ?7
        """
        start = (UNBOUNDED if newest_first else 0) if after is None else after
        values = (FILE, client.owner, client.name, clock.wall() - self.bounds.ttl, start, purpose)
        ids, text = one(
            tx,
            f"SELECT group_concat(id), group_concat(text) FROM (SELECT id, CAST(json AS TEXT) AS text {wanted})",
            *values,
            limit,
        )
        found = ids.split(",") if ids else []
        more = one(tx, f"SELECT count(*) FROM (SELECT 1 {wanted})", *values, limit + 1)[0]
        return found, text or "", more > limit

    # on the loop -----------------------------------------------------------------------------------------------------

    async def find(self, uid: str, owner: str) -> Row | None:
        return await self.database.run(lambda tx: self.shelf.find(tx, uid, owner))

    async def content(self, number: int) -> AsyncIterator[bytes]:
        """The bytes of a file, a few at a time."""
        piece = start = 0
        while True:
            data, piece, start = await self.database.run(partial(PIECES.read, number, piece, start))
            if not data:
                return
            yield data

    def drop(self, number: int) -> None:
        """Remove a hidden file."""
        self.database.queue(lambda tx: self.shelf.remove(tx, number), then=lambda _: self.tidy())

    def tidy(self) -> None:
        """Remove what is left of removed files, some pieces at a time, so that others get their turn."""
        self.database.queue(lambda tx: shed(tx, PART_PIECES), then=lambda more: self.tidy() if more else None)


def shed(tx: sqlite3.Connection, most: int) -> bool:
    """Remove up to ``most`` pieces of removed files; whether there may be more."""
    found = one(tx, "SELECT number FROM removed_files LIMIT 1")
    if found is None:
        return False
    gone = tx.execute(
        "DELETE FROM pieces WHERE rowid IN (SELECT rowid FROM pieces WHERE file = ? LIMIT ?)",
        (found[0], most),
    )
    if gone.rowcount < most:
        tx.execute("DELETE FROM removed_files WHERE number = ?", (found[0],))
    return True


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

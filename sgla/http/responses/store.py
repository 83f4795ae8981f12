"""The responses that ``previous_response_id``, ``item_reference`` and ``GET /v1/responses/{id}`` can find.

Those in the making are in memory, those that have ended in the database (``state.shelf`` says how they are
bounded). An owner (``Client.owner``) finds its own responses, a client (``Client.name``) items by their ids,
which others may have chosen too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from sgla.errors import InvalidField, SglaError, StorageFailed
from sgla.http.clients import Client
from sgla.http.errors import Busy
from sgla.http.responses import items as rows
from sgla.http.responses.background import Recorder
from sgla.http.responses.items import Item, Kept, Part, kept
from sgla.http.state.database import Database, Work
from sgla.http.state.shelf import ENTRY, Bounds, Pieces, Row, Shelf, one
from sgla.http.wire import encode

KIND = "response"
EVENTS = 16 << 10  # bytes of a stream that are stored together
NAMES = 1024  # of items that are looked for in one transaction
END = b"\n\n"  # of an event
STREAMS = Pieces("events", "response", "first")
LOST = "the server ended before the response did"

# ``asked``: so many items of the part are the response's input. ``live``: it is in the making; ``streamed``:
# in the background, with its events stored; ``lost``: the server ended before it did. ``conversation``: the
# id of the one that it belongs to, or "". ``events``: those of a stream in the background, from number
# ``first`` on.
SCHEMA = """
CREATE TABLE responses (
    object INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE,
    part INTEGER NOT NULL,
    asked INTEGER NOT NULL,
    live INTEGER NOT NULL,
    streamed INTEGER NOT NULL,
    lost INTEGER NOT NULL,
    conversation TEXT NOT NULL
);
CREATE INDEX responses_by_part ON responses (part);
CREATE INDEX responses_live ON responses (live) WHERE live = 1;
CREATE TABLE events (
    response INTEGER NOT NULL,
    first INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (response, first)
);
CREATE TRIGGER stream_removed AFTER DELETE ON responses WHEN old.streamed BEGIN
    INSERT INTO leftovers VALUES ('events', old.object);
END;
"""


class Found(NamedTuple):
    """A stored response that has ended, or been read while it was in the making."""

    row: Row
    part: int
    asked: int
    streamed: bool
    lost: bool
    conversation: str


class Place(msgspec.Struct, eq=False):
    """Where a response comes, so that what it goes on from is kept meanwhile.
    Read and written in the database's thread."""

    part: Part | None = None


class Earlier(NamedTuple):
    """What a request goes on from, ``past``, and the items that it refers to by their ids, b"" for one that
    there is not. ``size``: bytes of all of them; where that is too much, they are not there. ``length``:
    items of ``past``."""

    found: Found | None
    size: int
    length: int
    past: Sequence[bytes] = ()
    named: Mapping[str, bytes] = {}


class Stored(msgspec.Struct, kw_only=True, eq=False):
    """A response in the making. ``live`` is the object as clients see it now, and ``uid`` names the running
    request, until it has ended; ``json`` is what clients see then.

    ``stop`` ends a request that nobody waits for: without its place here its answer could not be found.
    ``recorder``: the events of one that streams in the background, of which ``recorded`` are in the database,
    as is the response itself where it is ``put``.
    """

    id: str
    client: Client
    asked: Sequence[Kept]
    place: Place = msgspec.field(default_factory=Place)
    conversation: str = ""
    uid: str | None
    live: dict[str, Any] | None = None
    live_size: int = 0  # bytes of its JSON at first
    json: bytes = b""
    stop: Callable[[], None] | None = None
    recorder: Recorder | None = None
    recorded: int = 0
    recorded_size: int = 0
    put: bool = False

    def shown(self) -> bytes:
        return self.json if self.live is None else encode(self.live)

    @property
    def size(self) -> int:
        """Bytes that it counts for, its items left out."""
        json = self.live_size if self.live is not None else len(self.json)
        return ENTRY + json + (self.recorder.size if self.recorder is not None else 0)


class ResponseStore:
    """See ``Shelf`` for what is dropped when."""

    def __init__(self, database: Database, bounds: Bounds) -> None:
        self.shelf = Shelf(database, KIND, bounds, self._gone, self._forget)
        self._live: dict[str, Stored] = {}
        for pieces in (STREAMS, rows.ITEMS):
            database.leftovers.ways[pieces.table] = pieces.free
        database.leftovers.ways["parts"] = rows.collect
        database.at_start(self._recover)

    @property
    def limit(self) -> int:
        return self.shelf.bounds.limit

    # in the making

    def open(self, entry: Stored) -> None:
        """Have a response found from now on by its id."""
        self._live[entry.id] = entry

    def live(self, uid: str, owner: str) -> Stored | None:
        entry = self._live.get(uid)
        return entry if entry is not None and entry.client.owner == owner else None

    def begin(self, entry: Stored) -> None:
        """Store a response whose stream begins, so that it can be told of if the server ends before it does.
        In memory nobody could ask for it then, so that is left to ``end``."""
        if self.shelf.database.on_disk:
            work, size = self._first(entry)
            entry.put = self._queue(entry, work, size)

    async def put(self, entry: Stored) -> None:
        """Store a response that may be asked for before it has ended, if it is not.
        Raises StorageFailed and Overloaded."""
        if entry.put:
            return
        entry.put = True
        try:
            await self.shelf.write(entry.client, entry.id, *self._first(entry))
        except SglaError:
            entry.put = False
            raise

    def _first(self, entry: Stored) -> tuple[Work[Any], int]:
        json = encode(entry.live)
        entry.live_size = len(json)
        streamed = entry.recorder is not None
        work = partial(self._insert, entry, entry.asked, json, entry.size, True, streamed)
        return work, len(json) + rows.taken(entry.asked)

    def grown(self, entry: Stored) -> None:
        """More of its events have come; they are stored a few at a time."""
        recorder = entry.recorder
        if recorder is None or not entry.put:
            return
        if recorder.size - entry.recorded_size < EVENTS and not recorder.ended.is_set():
            return
        first, data, size = entry.recorded, b"".join(recorder.blocks[entry.recorded :]), entry.size

        def work(tx: sqlite3.Connection) -> None:
            if (number := self.shelf.number(tx, entry.id)) is not None:
                tx.execute("INSERT INTO events VALUES (?, ?, ?)", (number, first, data))
                self.shelf.change(tx, number, size=size)

        entry.recorded, entry.recorded_size = len(recorder.blocks), recorder.size
        if recorder.ended.is_set():
            entry.recorder = None  # the two refer to each other, and the collector of circles comes late
        self._queue(entry, work, len(data))

    def end(self, entry: Stored, output: Iterable[Item]) -> None:
        """A response has ended, with these items."""
        entry.uid = entry.stop = None
        entry.json, entry.live = encode(entry.live), None
        if self._live.pop(entry.id, None) is not entry:
            self.release(entry.place, entry.client)
            return
        made = [kept(item) for item in output]
        json, size = entry.json, entry.size

        def change(tx: sqlite3.Connection) -> Iterator[None]:
            found = self._numbers(tx, entry.id)
            if found is not None:
                yield from rows.append(tx, found[1], made)
                found = self._numbers(tx, entry.id)
            if found is None:  # it has made room for others
                return
            self.shelf.change(tx, found[0], json, size)
            tx.execute("UPDATE responses SET live = 0 WHERE object = ?", (found[0],))

        items = made if entry.put else [*entry.asked, *made]
        streamed = entry.recorder is not None
        insert = partial(self._insert, entry, items, json, size, False, streamed)
        work = change if entry.put else insert
        if not self._queue(entry, work, len(json) + rows.taken(items)):
            self.drop(entry)

    def release(self, place: Place, client: Client) -> None:
        """No response comes there."""
        self.shelf.database.clean(client, partial(self._release, place))

    async def settled(self, client: Client) -> None:
        """Return when what was written for the client before is on the disk."""
        if self.shelf.database.on_disk:
            await self.shelf.database.run(client, lambda tx: None, always=True)

    # stored

    async def find(self, uid: str, client: Client) -> Found | None:
        return await self.shelf.run(client, uid, lambda tx: self._find(tx, uid, client.owner))

    async def delete(self, uid: str, client: Client) -> bool:
        """False: there is no such response."""
        entry = self.live(uid, client.owner)

        def work(tx: sqlite3.Connection) -> bool:
            found = self._find(tx, uid, client.owner)
            if found is not None:
                self.shelf.remove(tx, found.row.number)
            return found is not None

        if entry is not None:
            self._stop(entry)
        there = await self.shelf.run(client, uid, work)
        self.shelf.database.tidy()
        return there or entry is not None

    def drop(self, entry: Stored) -> None:
        """Forget a response whose client gets an error instead, and never knows its id."""
        self._live.pop(entry.id, None)
        uid, place = entry.id, entry.place

        def work(tx: sqlite3.Connection) -> None:
            if (number := self.shelf.number(tx, uid)) is not None:
                self.shelf.remove(tx, number)
            else:
                self._release(place, tx)

        database = self.shelf.database
        database.clean(entry.client, work, lambda _: database.tidy())

    async def earlier(
        self,
        client: Client,
        uid: str | None,
        part: int | None,
        names: Mapping[str, int],
        most: int,
        place: Place | None,
    ) -> Earlier:
        """What a request of the client goes on from, the response ``uid`` or the items of ``part``, and the
        items called ``names``, each so many times, of ``most`` bytes in all. ``place``: to be behind that
        response until ``release`` or ``end``."""

        def work(tx: sqlite3.Connection) -> Generator[None, None, Earlier]:
            found = None if uid is None else self._find(tx, uid, client.owner)
            number = part if found is None else found.part
            before = None if number is None else rows.part(tx, number)
            size, count = (0, 0) if before is None else (before.total, before.items)
            if found is not None and place is not None:
                place.part = rows.begin(tx, KIND, client.name, before)
            past = [] if before is None or size > most else rows.chain(tx, before.number)
            wanted = list(names)
            newest: list[tuple[int, int]] = []
            for at in range(0, len(wanted), NAMES):
                newest += rows.newest(tx, client.name, wanted[at : at + NAMES])
                yield
            size += sum(length * names[name] for name, (_, length) in zip(wanted, newest))
            if size > most:
                return Earlier(found, size, count)
            items = yield from rows.read(tx, past)
            if not all(items):
                raise Busy("what the request goes on from was changed while it was read; retry")
            named = yield from rows.read(tx, newest)
            return Earlier(found, size, count, items, dict(zip(wanted, named)))

        return await self.shelf.run(client, uid or "", work)

    async def page(
        self, uid: str, client: Client, limit: int, after: str | None, ascending: bool
    ) -> tuple[list[Kept], bool] | None:
        """Input items of a response, and whether there are more; None if there is no such response.
        Raises InvalidField if it has no input item ``after``."""

        def work(tx: sqlite3.Connection) -> tuple[list[Kept], bool] | None:
            found = self._find(tx, uid, client.owner)
            if found is None:
                return None
            at = None if after is None else rows.place(tx, found.part, after)
            if after is not None and (at is None or at >= found.asked):
                raise InvalidField("after must be the id of an input item of this response", param="after")
            return rows.page(tx, found.part, limit, at, ascending, found.asked)

        return await self.shelf.run(client, uid, work)

    async def events(self, client: Client, found: Found, number: int) -> AsyncIterator[bytes]:
        """The bytes of a stream's events from this number on,
        a few at a time, the two of ``END`` together."""
        database, response = self.shelf.database, found.row.number
        query = "SELECT coalesce(max(first), 0) FROM events WHERE response = ? AND first <= ?"
        (piece,) = await database.run(client, lambda tx: one(tx, query, response, number))
        start, skip = 0, number - piece
        while True:
            data, piece, start = await database.run(client, partial(STREAMS.read, response, piece, start))
            if not data:
                return
            if data.endswith(b"\n") and not data.endswith(END):
                data, start = data[:-1], start - 1
            if skip:
                *skipped, data = data.split(END, skip)
                skip -= len(skipped)
            if data and not skip:
                yield data

    # for work

    def _find(self, tx: sqlite3.Connection, uid: str, owner: str) -> Found | None:
        row = self.shelf.find(tx, uid, owner)
        if row is None:
            return None
        query = "SELECT part, asked, streamed, lost, conversation FROM responses WHERE object = ?"
        return Found(row, *one(tx, query, row.number))

    def _numbers(self, tx: sqlite3.Connection, uid: str) -> tuple[int, int] | None:
        """Those of a response and of its part."""
        query = "SELECT number, part FROM objects JOIN responses ON object = number WHERE kind = ? AND id = ?"
        found: tuple[int, int] | None = one(tx, query, KIND, uid)
        return found

    def _insert(
        self,
        entry: Stored,
        items: Sequence[Kept],
        json: bytes,
        size: int,
        live: bool,
        streamed: bool,
        tx: sqlite3.Connection,
    ) -> Iterator[None]:
        part = entry.place.part = entry.place.part or rows.begin(tx, KIND, entry.client.name)
        yield from rows.append(tx, part.number, items)
        number = self.shelf.add(tx, entry.id, entry.client._replace(name=part.client), json, size)
        tx.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, 0, ?)",
            (number, part.number, len(entry.asked), live, streamed, entry.conversation),
        )

    def _forget(self, tx: sqlite3.Connection, number: int) -> None:
        found = one(tx, "DELETE FROM responses WHERE object = ? RETURNING part", number)
        rows.collect(tx, f"[{found[0]}]")

    def _release(self, place: Place, tx: sqlite3.Connection) -> None:
        if place.part is not None:
            rows.collect(tx, f"[{place.part.number}]")

    def _recover(self, tx: sqlite3.Connection) -> None:
        """After an end of the server in the middle: responses that were in the making have failed, and places
        that were kept for some are given back."""
        live = tx.execute("SELECT number, json FROM objects JOIN responses ON object = number WHERE live = 1")
        for number, json in live.fetchall():
            response = {**msgspec.json.decode(json), "status": "failed"}
            response["error"] = {"code": "server_error", "message": LOST}
            self.shelf.change(tx, number, encode(response))
        tx.execute("UPDATE responses SET live = 0, lost = 1 WHERE live = 1")
        tx.execute(
            "INSERT OR IGNORE INTO leftovers SELECT 'parts', number FROM parts WHERE kind = ? "
            "AND NOT EXISTS (SELECT 1 FROM responses WHERE part = parts.number) "
            "AND NOT EXISTS (SELECT 1 FROM parts AS behind WHERE behind.before = parts.number)",
            (KIND,),
        )

    # the loop's side

    def _queue(self, entry: Stored, work: Work[Any], size: int) -> bool:
        """Whether it is taken. A failure costs what is stored, not the answer, which the client gets."""
        try:
            written = self.shelf.queue(entry.client, entry.id, work, size)
        except StorageFailed:
            return False
        written.add_done_callback(lambda done: None if done.result() else self.drop(entry))
        return True

    def _gone(self, ids: list[str]) -> None:
        for uid in ids:
            if (entry := self._live.get(uid)) is not None:
                self._stop(entry)

    def _stop(self, entry: Stored) -> None:
        del self._live[entry.id]
        if entry.stop is not None:
            entry.stop()

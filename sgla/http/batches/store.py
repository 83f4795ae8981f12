"""Batches in the database:
those that have ended as clients see them, the others with what it takes to go on after a restart."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from sgla.errors import InvalidField, NotFound, Overloaded
from sgla.http.batches.files import (
    COST,
    HIDDEN,
    MADE,
    PINNED,
    PURPOSE,
    UNBOUNDED,
    Files,
    StorageFull,
    file_object,
)
from sgla.http.batches.usage import no_usage
from sgla.http.clients import Client
from sgla.http.state.database import Database, Work
from sgla.http.state.shelf import ENTRY, PART_PIECES, ROW, Bounds, Row, Shelf, one
from sgla.http.wire import encode

T = TypeVar("T")

SCHEMA = """
CREATE TABLE unended_batches (
    batch INTEGER PRIMARY KEY REFERENCES objects ON DELETE CASCADE,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    errors INTEGER NOT NULL,
    kept INTEGER NOT NULL
);
"""

# What comes behind the end of a batch, as answers that its cancelling gave up, leaves it as it ended.
CHANGE = "UPDATE objects SET json = ? WHERE number = ? AND number IN (SELECT batch FROM unended_batches)"
BATCH = "batch"  # the kind
MOST = 4096  # batches, those that have ended included
MOST_UNENDED = 32  # of one client
TOGETHER = 64  # answers that are stored in one transaction
ENDED = ("completed", "failed", "expired", "cancelled")


class FileNotFound(NotFound):
    code = "file_not_found"


class OutputLine(NamedTuple):
    """What a line is answered, on its way to the database; ``kept`` is done when it is there."""

    line: int
    data: bytes
    failed: bool
    kept: asyncio.Future[None]


class Batch:
    """One that has not ended. ``seen`` is what clients see of it, but for the counts;
    ``input``, ``output`` and ``errors`` are numbers of files."""

    def __init__(
        self, number: int, client: Client, seen: dict[str, Any], files: tuple[int, int, int], kept: int
    ) -> None:
        self.number = number
        self.client = client
        self.seen = seen
        self.input, self.output, self.errors = files
        self.kept = kept  # seconds that the files it makes are kept
        self.total: int = seen["request_counts"]["total"]
        self.completed = self.failed = 0
        self.usage: dict[str, Any] = seen.setdefault("usage", no_usage())
        self.running = 0  # choices
        self.answers: list[OutputLine] = []
        self.keeping: asyncio.Task[None] | None = None  # while there are answers
        self.wanted = ""  # how it is to end, if somebody wants it to or its work is done
        self.local = False  # the operator's own: as many lines as there are, each for any route

    @property
    def id(self) -> str:
        return str(self.seen["id"])

    def shown(self) -> dict[str, Any]:
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return {**self.seen, "request_counts": counts}

    def become(self, status: str) -> None:
        self.seen["status"] = status
        self.seen[f"{status}_at"] = int(time.time())


class BatchStore:
    def __init__(self, database: Database, files: Files) -> None:
        self.files = files
        self.database = database
        self.shelf = Shelf(database, BATCH, Bounds(MOST, MOST * 16 * ENTRY, files.bounds.ttl))

    async def create(self, client: Client, seen: dict[str, Any], kept: int) -> Batch:
        """Raises FileNotFound, InvalidField for a file that is no input,
        Overloaded for too many batches, StorageFull."""

        def work(tx: sqlite3.Connection) -> Generator[None, None, Batch]:
            yield from self.files.make_room(tx, client.name, 2 * ENTRY, 2)
            row = self.files.shelf.find(tx, seen["input_file_id"], client.owner)
            if row is None:
                raise FileNotFound(f"there is no file {seen['input_file_id'][:100]!r}", param="input_file_id")
            if msgspec.json.decode(row.json)["purpose"] != PURPOSE:
                raise InvalidField(
                    f"input_file_id must be a file with purpose {PURPOSE}", param="input_file_id"
                )
            unended = one(
                tx,
                "SELECT count(*) FROM objects WHERE kind = ? AND client = ? AND stamp = ?",
                BATCH,
                client.name,
                PINNED,
            )[0]
            if unended >= MOST_UNENDED:
                raise Overloaded(
                    f"{unended} batches of yours have not ended, which is the limit; retry later",
                    retry_after=60.0,
                )
            made = [self.files.begin(tx, client) for _ in range(2)]
            json = encode(seen)
            number = self.shelf.add(tx, seen["id"], client, json, ENTRY + len(json))
            tx.execute("UPDATE objects SET stamp = ? WHERE number = ?", (PINNED, number))
            self.files.pin(tx, row.number)
            tx.execute(
                "INSERT INTO unended_batches VALUES (?, ?, ?, ?, ?)", (number, row.number, *made, kept)
            )
            self._make_room(tx)
            return Batch(number, client, seen, (row.number, made[0], made[1]), kept)

        return await self.database.run(client, work)

    def _make_room(self, tx: sqlite3.Connection) -> None:
        """Drop the oldest that have ended, first those of the client that has most."""
        while True:
            count, size = one(tx, "SELECT count, bytes FROM totals WHERE kind = ?", BATCH)
            if count <= self.shelf.bounds.limit and size <= self.shelf.bounds.bytes:
                return
            oldest = one(
                tx,
                "SELECT number FROM objects WHERE kind = ? AND stamp < ? ORDER BY "
                "(SELECT count FROM shares WHERE shares.kind = objects.kind AND shares.client = "
                "objects.client) DESC, stamp LIMIT 1",
                *(BATCH, PINNED),
            )
            if oldest is None:
                raise Overloaded(
                    f"{count} batches have not ended, which is the limit; retry later", retry_after=60.0
                )
            self.shelf.remove(tx, oldest[0])

    async def unended(self) -> list[Batch]:
        """Those that an earlier process has left, the oldest first. What it has left of uploads goes."""

        def work(tx: sqlite3.Connection) -> list[Batch]:
            tx.execute(
                "DELETE FROM objects WHERE kind = 'file' AND owner = ? AND number NOT IN "
                "(SELECT output FROM unended_batches UNION SELECT errors FROM unended_batches)",
                (HIDDEN,),
            )
            rows = tx.execute(
                "SELECT number, owner, client, json, input, output, errors, kept FROM unended_batches JOIN "
                "objects ON batch = number ORDER BY number"
            )
            return [
                Batch(number, Client(client, owner), msgspec.json.decode(json), (given, output, errors), kept)
                for number, owner, client, json, given, output, errors, kept in rows
            ]

        return await self.database.run(None, work)

    async def done(self, batch: Batch) -> bytearray:
        """For each line by its number whether it has been answered, up to the last one that has been;
        counts them, too."""

        def work(tx: sqlite3.Connection) -> tuple[int, list[tuple[int, str | None]]]:
            files = (batch.output, batch.errors)
            last = one(tx, "SELECT max(number) FROM pieces WHERE file IN (?, ?)", *files)[0]
            query = "SELECT count(*), group_concat(number) FROM pieces WHERE file = ?"
            return last or 0, [one(tx, query, number) for number in files]

        last, ((batch.completed, completed), (batch.failed, failed)) = await self._run(batch, work)
        done = bytearray(last + 1)
        for numbers in filter(None, (completed, failed)):
            for number in numbers.split(","):
                done[int(number)] = True
        return done

    async def clear(self, batch: Batch) -> None:
        """Forget what an earlier check of its lines has found."""

        def work(tx: sqlite3.Connection) -> Iterator[None]:
            some = "DELETE FROM pieces WHERE rowid IN (SELECT rowid FROM pieces WHERE file = ? LIMIT ?)"
            while tx.execute(some, (batch.errors, PART_PIECES)).rowcount:
                yield
            tx.execute("UPDATE objects SET size = ? WHERE number = ?", (ENTRY, batch.errors))

        await self._run(batch, work)

    async def keep(self, batch: Batch, line: int, data: bytes, failed: bool) -> None:
        """The answer to a line, and the usage with it, in one transaction with those that come while an
        earlier one runs. Raises StorageFull."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        batch.answers.append(OutputLine(line, data, failed, kept))
        if batch.keeping is None:
            batch.keeping = asyncio.ensure_future(self._keep(batch))
        await kept

    async def _keep(self, batch: Batch) -> None:
        """The answers that nobody has given up."""
        together = TOGETHER
        while batch.answers:
            some, batch.answers = batch.answers[:together], batch.answers[together:]
            group = [answer for answer in some if not answer.kept.done()]
            failure: Exception | None = None
            try:
                await self._put(batch, group)
            except StorageFull as error:
                if len(group) > 1:  # there may be room for some of them
                    batch.answers, together = group + batch.answers, 1
                    continue
                failure = error
            except Exception as error:
                failure = error
            for answer in group:
                if failure is None:
                    batch.failed += answer.failed
                    batch.completed += not answer.failed
                if answer.kept.done():
                    continue
                if failure is None:
                    answer.kept.set_result(None)
                else:
                    answer.kept.set_exception(failure)
        batch.keeping = None

    async def _put(self, batch: Batch, group: list[OutputLine]) -> None:
        texts: dict[int, list[tuple[int, bytes]]] = {}
        for answer in group:
            file = batch.errors if answer.failed else batch.output
            texts.setdefault(file, []).append((answer.line, answer.data))
        json = encode(batch.shown())

        def work(tx: sqlite3.Connection) -> Iterator[None]:
            yield from self.files.put_all(tx, texts, batch.client.name)
            tx.execute(CHANGE, (json, batch.number))

        await self._run(batch, work)

    async def keep_errors(self, batch: Batch, lines: list[tuple[int, bytes]]) -> None:
        """The same for lines that were not run."""
        texts = {batch.errors: list(lines)}
        await self._run(batch, lambda tx: self.files.put_all(tx, texts, batch.client.name))
        batch.failed += len(lines)

    async def save(self, batch: Batch) -> None:
        json = encode(batch.shown())
        await self._run(batch, lambda tx: tx.execute(CHANGE, (json, batch.number)))

    async def _run(self, batch: Batch, work: Work[T]) -> T:
        """What the server does for a batch, however much waits for the client."""
        return await self.database.run(batch.client, work, always=True)

    async def end(self, batch: Batch, status: str) -> None:
        """Show its files, and let go of what it holds."""

        def work(tx: sqlite3.Connection) -> None:
            batch.completed = self._publish(tx, batch, batch.output, "output")
            batch.failed = self._publish(tx, batch, batch.errors, "error")
            # An early end may come before they are counted.
            batch.total = max(batch.total, batch.completed + batch.failed)
            batch.become(status)
            tx.execute("DELETE FROM unended_batches WHERE batch = ?", (batch.number,))
            if one(tx, "SELECT 1 FROM unended_batches WHERE input = ?", batch.input) is None:
                self.files.unpin(tx, batch.input)
            json = encode(batch.shown())
            self.shelf.change(tx, batch.number, json, ENTRY + len(json))

        await self._run(batch, work)
        self.files.tidy()

    def _publish(self, tx: sqlite3.Connection, batch: Batch, number: int, name: str) -> int:
        """Show a file of the batch, if it has lines; how many these are."""
        (lines,) = one(tx, "SELECT count(*) FROM pieces WHERE file = ?", number)
        if not lines:
            self.files.shelf.remove(tx, number)
            return 0
        (size,) = one(tx, "SELECT size FROM objects WHERE number = ?", number)
        now = int(time.time())
        seen = file_object(
            size - ENTRY - lines * COST, f"{batch.id}_{name}.jsonl", MADE, now, now + batch.kept
        )
        json = self.files.show(tx, number, batch.client.owner, seen)
        batch.seen[f"{name}_file_id"] = msgspec.json.decode(json)["id"]
        return int(lines)

    async def find(self, uid: str, client: Client) -> Row | None:
        return await self.database.run(client, lambda tx: self.shelf.find(tx, uid, client.owner))

    async def page(self, client: Client, limit: int, after: str | None) -> list[Row]:
        """Up to ``limit`` of the client's batches, newest first. Raises InvalidField."""

        def work(tx: sqlite3.Connection) -> list[Row]:
            start = None if after is None else self.shelf.find(tx, after, client.owner)
            if after is not None and start is None:
                raise InvalidField("after must be the id of a batch", param="after")
            found = tx.execute(
                f"SELECT {ROW} FROM objects WHERE kind = ? AND owner = ? AND client = ? AND number < ? "
                "ORDER BY number DESC LIMIT ?",
                (BATCH, client.owner, client.name, UNBOUNDED if start is None else start.number, limit),
            )
            return [Row(*row) for row in found]

        return await self.database.run(client, work)

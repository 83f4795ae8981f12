"""The items of responses and conversations in the database:
lists of them (parts), of which one may go on from another.

Functions that take a connection are for the work of ``Database.run``.
Many items travel as one value, JSON a line: see ``state.database``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from sgla.http.state.leftovers import TOGETHER, off
from sgla.http.state.shelf import Pieces, one
from sgla.http.wire import encode

Item = dict[str, Any]

decode_found = msgspec.json.Decoder(list[tuple[int, int]]).decode

PAGE = 4 << 20  # bytes of JSON in one page of a list
# Bytes and items that are read or written in one transaction; an item may have more.
SLICE, SLICE_ITEMS = 1 << 20, 1024
ITEM = 512  # bytes that an item counts for beside its JSON

# A response's part has its input and then its output, and goes on from the part ``before`` it, which is kept
# as long as that is. ``client`` is who began the conversation and what all of it counts for, in the share of
# ``kind``. ``total``, ``count``: bytes of JSON and items of all up to the part's end; ``size``: what its own
# items count for. ``id`` is "" for an item that nobody can refer to.
SCHEMA = """
CREATE TABLE parts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    client TEXT NOT NULL,
    before INTEGER,
    total INTEGER NOT NULL,
    count INTEGER NOT NULL,
    size INTEGER NOT NULL
);
CREATE INDEX parts_by_before ON parts (before) WHERE before IS NOT NULL;
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    part INTEGER NOT NULL,
    place INTEGER NOT NULL,
    client TEXT NOT NULL,
    id TEXT NOT NULL,
    json BLOB NOT NULL,
    UNIQUE (part, place)
);
CREATE INDEX items_by_id ON items (client, id, part) WHERE id <> '';
CREATE TRIGGER part_put AFTER INSERT ON parts WHEN new.size <> 0 BEGIN
    INSERT INTO taken VALUES (new.kind, new.client, 0, new.size);
END;
CREATE TRIGGER part_resized AFTER UPDATE OF size ON parts WHEN new.size <> old.size BEGIN
    INSERT INTO taken VALUES (new.kind, new.client, 0, new.size - old.size);
END;
CREATE TRIGGER part_removed AFTER DELETE ON parts BEGIN
    INSERT INTO taken VALUES (old.kind, old.client, 0, -old.size);
    INSERT INTO leftovers VALUES ('items', old.number);
END;
CREATE TRIGGER part_left AFTER DELETE ON parts WHEN old.before IS NOT NULL BEGIN
    INSERT OR IGNORE INTO leftovers VALUES ('parts', old.before);
END;
"""


ITEMS = Pieces("items", "part", "place", "json")


class Kept(NamedTuple):
    id: str
    json: bytes


def kept(item: Item) -> Kept:
    return Kept(kept_id(item), encode(item))


def kept_id(item: Item) -> str:
    """Its id; "" if it has none that it can be found by."""
    uid = item.get("id")
    return uid if isinstance(uid, str) and "\0" not in uid else ""


def listed(item: Item) -> Item:
    """An item in its long form."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    form = (
        {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
    )
    return {"type": "message", **item, "content": [{**form, "text": content}]}


class Part(NamedTuple):
    """See ``SCHEMA``; ``items`` is its count."""

    number: int
    client: str
    total: int
    items: int


def part(tx: sqlite3.Connection, number: int) -> Part | None:
    found = one(tx, "SELECT number, client, total, count FROM parts WHERE number = ?", number)
    return found and Part(*found)


def begin(tx: sqlite3.Connection, kind: str, client: str, before: Part | None = None) -> Part:
    """A part without items. One that goes on from another is all of the client's that began it."""
    client, total, count = (client, 0, 0) if before is None else before[1:]
    begun = tx.execute(
        "INSERT INTO parts (kind, client, before, total, count, size) VALUES (?, ?, ?, ?, ?, 0)",
        (kind, client, before and before.number, total, count),
    )
    assert begun.lastrowid is not None
    return Part(begun.lastrowid, client, total, count)


def append(tx: sqlite3.Connection, number: int, items: Sequence[Kept]) -> Iterator[None]:
    """Put items behind those of a part. Of equal ids the first one counts."""
    named: set[str] = set()
    for at, end in slices([len(item.json) for item in items]):
        if at:
            yield
        _insert(tx, number, items[at:end], named)


def taken(items: Sequence[Kept]) -> int:
    """Bytes that they count for."""
    return sum(ITEM + len(item.id) + len(item.json) for item in items)


def slices(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From where to where items of these bytes are read or written in one transaction."""
    start = size = 0
    for at, more in enumerate(sizes):
        if at > start and (size + more > SLICE or at - start == SLICE_ITEMS):
            yield start, at
            start, size = at, 0
        size += more
    if sizes:
        yield start, len(sizes)


def _insert(tx: sqlite3.Connection, number: int, items: Sequence[Kept], named: set[str]) -> None:
    spans, at = [], 1
    for item in items:
        spans.append(("" if item.id in named else item.id, at, len(item.json)))
        named.add(item.id)
        at += len(item.json)
    tx.execute(
        """
        INSERT INTO items (part, place, client, id, json)
        SELECT
            part.number, coalesce((SELECT max(place) + 1 FROM items WHERE part = ?1), 0) + span.key, client,
            span.value ->> 0, substr(?2, span.value ->> 1, span.value ->> 2)
        FROM parts AS part, json_each(?3) AS span WHERE part.number = ?1
        """,
        (number, b"".join(item.json for item in items), encode(spans).decode()),
    )
    grow(tx, number, at - 1, len(items), taken(items))


def grow(tx: sqlite3.Connection, number: int, total: int, count: int, size: int) -> None:
    tx.execute(
        "UPDATE parts SET total = total + ?, count = count + ?, size = size + ? WHERE number = ?",
        (total, count, size, number),
    )


def chain(tx: sqlite3.Connection, number: int) -> list[tuple[int, int]]:
    """Number and bytes of JSON of each item of a part and of all that is before it."""
    query = """
        WITH RECURSIVE chain (number, before) AS (
            SELECT number, before FROM parts WHERE number = ?
            UNION ALL SELECT parts.number, parts.before FROM chain JOIN parts ON parts.number = chain.before
        )
        SELECT json_group_array(json_array(number, size)) FROM (
            SELECT items.number, length(json) AS size
            FROM chain JOIN items ON items.part = chain.number
            ORDER BY items.part, items.place
        )
    """
    return decode_found(one(tx, query, number)[0])


def newest(tx: sqlite3.Connection, client: str, ids: Iterable[str]) -> list[tuple[int, int]]:
    """Number and bytes of JSON of the client's newest item of each id; (0, 0) for one that has none."""
    (found,) = one(
        tx,
        """
        SELECT json_group_array(json_array(coalesce(number, 0), coalesce(length(json), 0))) FROM (
            SELECT items.number, items.json FROM json_each(?2) AS wanted LEFT JOIN items ON items.number = (
                SELECT number FROM items AS one WHERE client = ?1 AND id = wanted.value AND id <> ''
                AND EXISTS (SELECT 1 FROM parts WHERE number = one.part)
                ORDER BY part DESC, number DESC LIMIT 1
            )
        )
        """,
        client,
        encode(list(ids)).decode(),
    )
    return decode_found(found)


def read(tx: sqlite3.Connection, found: Sequence[tuple[int, int]]) -> Generator[None, None, list[bytes]]:
    """The JSON of these items; b"" for one that is not there, or no longer."""
    result: list[bytes] = []
    for at, end in slices([size for _, size in found]):
        if at:
            yield
        numbers = encode([number for number, _ in found[at:end]]).decode()
        (text,) = one(
            tx,
            "SELECT cast(group_concat(coalesce(items.json, ''), "
            "char(10)) AS BLOB) FROM json_each(?) AS wanted "
            "LEFT JOIN items ON items.number = wanted.value",
            numbers,
        )
        result += text.split(b"\n")
    return result


def page(
    tx: sqlite3.Connection,
    number: int,
    limit: int,
    after: int | None,
    ascending: bool,
    below: int | None = None,
) -> tuple[list[Kept], bool]:
    """Up to ``limit`` of a part's items behind place ``after``, of those before place ``below``, and whether
    there are more. A page has ``PAGE`` bytes, or one item."""
    order, side = ("ASC", ">") if ascending else ("DESC", "<")
    beyond = "" if after is None else f"AND place {side} {after:d}"
    beyond += "" if below is None else f" AND place < {below:d}"
    query = f"SELECT place, length(json) FROM items WHERE part = ? {beyond} ORDER BY place {order} LIMIT ?"
    found = tx.execute(query, (number, limit + 1)).fetchall()
    places: list[int] = []
    size = 0
    for at, length in found[:limit]:
        size += length
        if places and size > PAGE:
            break
        places.append(at)
    if not places:
        return [], False
    ends = min(places), max(places)
    query = f"SELECT id, json FROM items WHERE part = ? AND place BETWEEN ? AND ? ORDER BY place {order}"
    return [Kept(*row) for row in tx.execute(query, (number, *ends))], len(places) < len(found)


def place(tx: sqlite3.Connection, number: int, uid: str) -> int | None:
    """Where in a part the item with this id is."""
    found = one(
        tx,
        "SELECT place FROM items WHERE client = (SELECT client FROM parts WHERE number = ?1) AND id = ?2 "
        "AND id <> '' AND part = ?1",
        number,
        uid,
    )
    return found and found[0]


def collect(tx: sqlite3.Connection, numbers: str, size: int = 0) -> None:
    """Remove the parts that no response has and none goes on from, and so on with those before them; where
    these are many, the rest stays on the list. A way of ``Leftovers``."""
    off(tx, "parts", numbers)
    unused = "NOT EXISTS (SELECT 1 FROM responses WHERE part = parts.number)"
    tx.execute(
        f"""
        WITH RECURSIVE gone (number, before) AS (
            SELECT number, before FROM parts WHERE number IN (SELECT value FROM json_each(?)) AND {unused}
                AND NOT EXISTS (SELECT 1 FROM parts AS behind WHERE behind.before = parts.number)
            UNION ALL SELECT parts.number, parts.before FROM gone JOIN parts ON parts.number = gone.before
            WHERE {unused} AND NOT EXISTS (
                SELECT 1 FROM parts AS behind
                WHERE behind.before = parts.number AND behind.number <> gone.number
            ) LIMIT ?
        )
        DELETE FROM parts WHERE number IN (SELECT number FROM gone)
        """,
        (numbers, 2 * TOGETHER),
    )

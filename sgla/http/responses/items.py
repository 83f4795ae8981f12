"""The items of responses and conversations in the database: lists of them (parts), of which one may go on from another.

Functions that take a connection are for the work of ``Database.run``. Many items travel as one value, JSON a line: see ``state.database``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from sgla.http.state.shelf import one
from sgla.http.wire import encode

Item = dict[str, Any]

decode_sizes = msgspec.json.Decoder(list[int]).decode

PAGE = 4 << 20  # bytes of JSON in one page of a list
ITEM = 512  # bytes that an item counts for beside its JSON

# A response's part has its input and then its output, and goes on from the part ``before`` it, which is kept as long as that is. ``client``
# is who began the conversation and what all of it counts for, in the share of ``kind``. ``total``, ``count``: bytes of JSON and items of all
# up to the part's end; ``size``: what its own items count for. ``id`` is "" for an item that nobody can refer to.
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
    part INTEGER NOT NULL REFERENCES parts ON DELETE CASCADE,
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
CREATE TRIGGER part_removed AFTER DELETE ON parts WHEN old.size <> 0 BEGIN
    INSERT INTO taken VALUES (old.kind, old.client, 0, -old.size);
END;
"""


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


def begin(
    tx: sqlite3.Connection, kind: str, client: str, before: Part | None = None, items: Sequence[Kept] = ()
) -> Part:
    """A part with its first items. One that goes on from another is all of the client's that began it."""
    client, total, count = (client, 0, 0) if before is None else before[1:]
    total, count = total + sum(len(item.json) for item in items), count + len(items)
    begun = tx.execute(
        "INSERT INTO parts (kind, client, before, total, count, size) VALUES (?, ?, ?, ?, ?, ?)",
        (kind, client, before and before.number, total, count, taken(items)),
    )
    assert begun.lastrowid is not None
    _insert(tx, begun.lastrowid, items)
    return Part(begun.lastrowid, client, total, count)


def append(tx: sqlite3.Connection, number: int, items: Sequence[Kept]) -> None:
    """Put items behind those of a part."""
    _insert(tx, number, items)
    if items:
        grow(tx, number, sum(len(item.json) for item in items), len(items), taken(items))


def taken(items: Sequence[Kept]) -> int:
    """Bytes that they count for."""
    return sum(ITEM + len(item.id) + len(item.json) for item in items)


def _insert(tx: sqlite3.Connection, number: int, items: Sequence[Kept]) -> None:
    """Of equal ids the first one counts."""
    if not items:
        return
    named: set[str] = set()
    spans, at = [], 1
    for item in items:
        spans.append(("" if item.id in named else item.id, at, len(item.json)))
        named.add(item.id)
        at += len(item.json)
    tx.execute(
        """
        INSERT INTO items (part, place, client, id, json)
        SELECT part.number, coalesce((SELECT max(place) + 1 FROM items WHERE part = ?1), 0) + span.key, client,
            span.value ->> 0, substr(?2, span.value ->> 1, span.value ->> 2)
        FROM parts AS part, json_each(?3) AS span WHERE part.number = ?1
        """,
        (number, b"".join(item.json for item in items), encode(spans).decode()),
    )


def grow(tx: sqlite3.Connection, number: int, total: int, count: int, size: int) -> None:
    tx.execute(
        "UPDATE parts SET total = total + ?, count = count + ?, size = size + ? WHERE number = ?",
        (total, count, size, number),
    )


def read(tx: sqlite3.Connection, number: int) -> list[bytes]:
    """The items of a part and of all that is before it."""
    query = """
        WITH RECURSIVE chain (number, before) AS (
            SELECT number, before FROM parts WHERE number = ?
            UNION ALL SELECT parts.number, parts.before FROM chain JOIN parts ON parts.number = chain.before
        )
        SELECT cast(group_concat(json, char(10)) AS BLOB) FROM (
            SELECT json FROM chain JOIN items ON items.part = chain.number ORDER BY items.part, items.place
        )
    """
    return lines(one(tx, query, number)[0])


def lines(text: bytes | None) -> list[bytes]:
    return [] if text is None else text.split(b"\n")


NEWEST = "(SELECT number FROM items WHERE client = ?1 AND id = wanted.value AND id <> '' ORDER BY part DESC, number DESC LIMIT 1)"


def sizes(tx: sqlite3.Connection, client: str, ids: Iterable[str]) -> list[int]:
    """Bytes of the JSON of the client's newest item of each id; 0 for one that has none."""
    (found,) = one(
        tx,
        f"""
        SELECT json_group_array(coalesce((SELECT length(json) FROM items WHERE number = {NEWEST}), 0))
        FROM json_each(?2) AS wanted
        """,
        client,
        encode(list(ids)).decode(),
    )
    return decode_sizes(found)


def named(tx: sqlite3.Connection, client: str, ids: Iterable[str]) -> list[bytes]:
    """Those items; b"" for one that there is not."""
    (found,) = one(
        tx,
        f"""
        SELECT cast(group_concat(coalesce((SELECT json FROM items WHERE number = {NEWEST}), ''), char(10)) AS BLOB)
        FROM json_each(?2) AS wanted
        """,
        client,
        encode(list(ids)).decode(),
    )
    return lines(found)


def page(
    tx: sqlite3.Connection,
    number: int,
    limit: int,
    after: int | None,
    ascending: bool,
    below: int | None = None,
) -> tuple[list[Kept], bool]:
    """Up to ``limit`` of a part's items behind place ``after``, of those before place ``below``, and whether there are more. A page has
    ``PAGE`` bytes, or one item."""
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
        "SELECT place FROM items WHERE client = (SELECT client FROM parts WHERE number = ?1) AND id = ?2 AND id <> '' AND part = ?1",
        number,
        uid,
    )
    return found and found[0]


def collect(tx: sqlite3.Connection, number: int) -> None:
    """Remove a part that no response has and none goes on from, and so on with those before it."""
    unused = "NOT EXISTS (SELECT 1 FROM responses WHERE part = parts.number)"
    tx.execute(
        f"""
        WITH RECURSIVE gone (number, before) AS (
            SELECT number, before FROM parts WHERE number = ? AND {unused}
                AND NOT EXISTS (SELECT 1 FROM parts AS behind WHERE behind.before = parts.number)
            UNION ALL SELECT parts.number, parts.before FROM gone JOIN parts ON parts.number = gone.before
            WHERE {unused} AND NOT EXISTS (
                SELECT 1 FROM parts AS behind WHERE behind.before = parts.number AND behind.number <> gone.number
            )
        )
        DELETE FROM parts WHERE number IN (SELECT number FROM gone)
        """,
        (number,),
    )

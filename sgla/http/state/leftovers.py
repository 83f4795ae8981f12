"""What removed objects leave behind in other tables:
nobody finds it any more, and it is freed a part at a time.

Triggers list it in ``leftovers``, by its ``place`` and the number of what it belonged to, so that a process
that ends leaves the list to the next one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

SCHEMA = """
CREATE TABLE leftovers (
    place TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (place, number)
) WITHOUT ROWID;
"""

FREED = 1 << 20  # bytes that are freed at once
TOGETHER = 64  # numbers that are looked at for that

# Of a connection, numbers as JSON, and how many bytes to free at most: one step for these numbers, which
# takes those off the list of which nothing is left.
Way = Callable[[sqlite3.Connection, str, int], None]


class Leftovers:
    """``ways``: how they are freed, by place."""

    def __init__(self) -> None:
        self.ways: dict[str, Way] = {}

    def free(self, tx: sqlite3.Connection) -> bool:
        """Free about ``FREED`` bytes; whether there may be more."""
        place, numbers = tx.execute(
            "SELECT place, json_group_array(number) FROM (SELECT place, number FROM leftovers "
            "WHERE place = (SELECT place FROM leftovers LIMIT 1) LIMIT ?)",
            (TOGETHER,),
        ).fetchone()
        if place is not None:
            self.ways[place](tx, numbers, FREED)
        return place is not None

    def free_for(self, tx: sqlite3.Connection, size: int) -> Iterator[None]:
        """Free twice what is stored anew, so that what is left gets less."""
        while self.free(tx) and (size := size - FREED // 2) > 0:
            yield

    def free_all(self, tx: sqlite3.Connection) -> Iterator[None]:
        while self.free(tx):
            yield


def off(tx: sqlite3.Connection, place: str, numbers: str, when: str = "1") -> None:
    """Take ``numbers`` off the list, where ``when`` is so."""
    tx.execute(
        f"DELETE FROM leftovers WHERE place = ? AND number IN (SELECT value FROM json_each(?)) AND {when}",
        (place, numbers),
    )

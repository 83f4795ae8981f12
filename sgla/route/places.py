"""How many connections of clients there may be, and which one makes room for another."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from sgla.errors import Overloaded

SPARE = 64  # connections beyond the limit, for health and metrics


PART = 8  # the last eighth of all places is for clients that do not have all others


class Held(Protocol):
    def abort(self) -> None: ...


class Places:
    """``limit`` connections, and ``SPARE`` more. Where all places are taken, one that waits for a request, or
    for the rest of it, goes: of the client that has most of these, which is known by its address, the one
    that waits longest. Of the spare ones, the oldest goes. The requests of one client, which is known by its
    key where there are keys, may have all but an eighth of the places."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Held, str] = {}  # whose it is
        self._waiting: dict[str, dict[Held, None]] = {}  # of these, by client
        self._spare: dict[Held, None] = {}
        self._busy: dict[Held, str] = {}  # whose request is on it
        self._requests: Counter[str] = Counter()  # by client
        self._most = max(1, limit - max(1, limit // PART))

    def open(self, connection: Held, client: str) -> bool:
        """Whether it is a spare one."""
        if len(self._held) >= self.limit and self._waiting:
            most = max(self._waiting, key=lambda client: len(self._waiting[client]))
            self._drop(next(iter(self._waiting[most])))
        if len(self._held) < self.limit:
            self._held[connection] = client
            self.waits(connection)
            return False
        if len(self._spare) >= SPARE:
            self._drop(next(iter(self._spare)))
        self._spare[connection] = None
        return True

    def _drop(self, connection: Held) -> None:
        self.close(connection)
        connection.abort()

    def busy(self, connection: Held, client: str) -> None:
        """A whole request of ``client`` is on it. Raises Overloaded."""
        if self._requests[client] >= self._most:
            raise Overloaded(
                f"{self._most} of your requests run, of {self.limit} that there are places for; retry "
                "later, or raise --max-connections",
                retry_after=1.0,
            )
        self._requests[client] += 1
        self._busy[connection] = client
        self._waits_no_longer(connection)

    def _waits_no_longer(self, connection: Held) -> None:
        client = self._held.get(connection, "")
        waiting = self._waiting.get(client, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(client, None)

    def waits(self, connection: Held) -> None:
        """For the next request."""
        self._is_done(connection)
        if connection in self._held:
            self._waiting.setdefault(self._held[connection], {})[connection] = None

    def close(self, connection: Held) -> None:
        self._is_done(connection)
        self._waits_no_longer(connection)
        self._held.pop(connection, None)
        self._spare.pop(connection, None)

    def _is_done(self, connection: Held) -> None:
        """With the request that is on it, if there is one."""
        client = self._busy.pop(connection, None)
        if client is not None:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

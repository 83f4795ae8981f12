"""How many connections of clients there may be, and which one makes room for another."""

from __future__ import annotations

from typing import Protocol

SPARE = 64  # connections beyond the limit, for health and metrics


class Held(Protocol):
    def abort(self) -> None: ...


class Places:
    """``limit`` connections, and ``SPARE`` more. Where all places are taken, one that waits for a request, or
    for the rest of it, goes: of the client that has most of these, which is known by its address, the one
    that waits longest. Of the spare ones, the oldest goes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Held, str] = {}  # whose it is
        self._waiting: dict[str, dict[Held, None]] = {}  # of these, by client
        self._spare: dict[Held, None] = {}

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

    def busy(self, connection: Held) -> None:
        """A whole request is on it."""
        client = self._held.get(connection, "")
        waiting = self._waiting.get(client, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(client, None)

    def waits(self, connection: Held) -> None:
        """For the next request."""
        if connection in self._held:
            self._waiting.setdefault(self._held[connection], {})[connection] = None

    def close(self, connection: Held) -> None:
        self.busy(connection)
        self._held.pop(connection, None)
        self._spare.pop(connection, None)

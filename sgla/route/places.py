"""How many connections of clients there may be, and which one makes room for another."""

from __future__ import annotations

from typing import Protocol

SPARE = 64  # connections beyond the limit, for health and metrics


class Held(Protocol):
    def abort(self) -> None: ...


class Places:
    """``limit`` connections, and ``SPARE`` more. Where all places are taken, the connection that has waited
    longest for a request goes; of the spare ones, the oldest."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: set[Held] = set()
        self._idle: dict[Held, None] = {}  # of these, those without a request
        self._spare: dict[Held, None] = {}

    def open(self, connection: Held) -> bool:
        """Whether it is a spare one."""
        if len(self._held) >= self.limit and self._idle:
            self._drop(next(iter(self._idle)))
        if len(self._held) < self.limit:
            self._held.add(connection)
            self._idle[connection] = None
            return False
        if len(self._spare) >= SPARE:
            self._drop(next(iter(self._spare)))
        self._spare[connection] = None
        return True

    def _drop(self, connection: Held) -> None:
        self.close(connection)
        connection.abort()

    def busy(self, connection: Held) -> None:
        """A request is on it."""
        self._idle.pop(connection, None)

    def idle(self, connection: Held) -> None:
        if connection in self._held:
            self._idle[connection] = None

    def close(self, connection: Held) -> None:
        self._held.discard(connection)
        self._idle.pop(connection, None)
        self._spare.pop(connection, None)

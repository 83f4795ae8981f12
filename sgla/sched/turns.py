"""Turns of clients whose requests wait, so that nobody waits for all that another has asked for."""

from __future__ import annotations

SPARE = 64  # clients that are remembered beside those that have a turn to come


class Turns:
    """In each turn every client has one request served. A request's turn is the one behind the last turn of
    its client, or behind the one that is served now, and never changes: the waiting list stays sorted, and
    clients that come later, however many, get later turns.
    """

    def __init__(self) -> None:
        self._served = 0  # the turn that is served now
        self._last: dict[str, int] = {}  # the last turn of each client

    def take(self, client: str, alone: bool) -> int:
        """The turn of a client's new request. ``alone``: no other waits, so it comes behind all that were
        given, whose requests may still run."""
        if alone and self._last:
            self._served = max(self._served, *self._last.values())
            self._last.clear()
        turn = self._last[client] = max(self._last.get(client, 0), self._served) + 1
        return turn

    def serve(self, turn: int, waiting: int) -> None:
        """``turn`` is that of the first request of all that wait, of which there are ``waiting``."""
        self._served = max(self._served, turn)
        if len(self._last) > 2 * waiting + SPARE:
            self._last = {client: last for client, last in self._last.items() if last > self._served}

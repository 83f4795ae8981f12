"""How much of something a client may have at a time."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class PerClient:
    """``most`` places for each client. Whoever waits for one comes in the order of asking."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, client: str) -> asyncio.Semaphore:
        """The client's places, which last as long as somebody holds the semaphore."""
        return self._places.setdefault(client, asyncio.Semaphore(self._most))

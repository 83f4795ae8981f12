"""Pages of the prefix tree that have a copy outside the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from sgla.cache.loose import LoosePool
from sgla.cache.tree import NO_MARKS, Marks


class HostTier(LoosePool):
    """Pages of host memory, each under a key that says all tokens up to its end. One that a copy goes to is
    *coming* and held; one that a copy comes from is held. Those that nobody holds are lost when others need
    their places, the one longest unused first."""

    __slots__ = ("_coming", "_tickets")

    def __init__(self, pages: int) -> None:
        super().__init__(pages + 1)
        self._tickets: dict[bytes, int] = {}  # of each key; some are void
        self._coming: set[int] = set()  # tickets

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first keys, as far as all are there."""
        pages = []
        for key in keys:
            ticket = self._tickets.get(key, 0)
            if not self.has(ticket) or ticket in self._coming:
                break
            pages.append(self.page(ticket))
        return pages

    def lacks(self, key: bytes) -> bool:
        return not self.has(self._tickets.get(key, 0))

    def receive(self, key: bytes) -> int:
        """A page for a copy of what ``key`` names; 0: all are held."""
        if not len(self):
            if not self.evictable:
                return 0
            self.evict(1)
        pages = self.alloc(1)
        [ticket] = self.give(pages, held=True)
        self._tickets[key] = ticket
        self._coming.add(ticket)
        if len(self._tickets) > 2 * self.total + 64:
            self._tickets = {key: ticket for key, ticket in self._tickets.items() if self.has(ticket)}
        return pages[0]

    def received(self, pages: Iterable[int], ok: bool) -> None:
        """A copy to ``pages`` is done, or has failed."""
        for page in pages:
            ticket = self._ticket[page]
            self._coming.discard(ticket)
            if not ok:
                self.void(ticket)
        self.unhold(pages)

    def forget_keys(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            ticket = self._tickets.pop(key, 0)
            self._coming.discard(ticket)
            self.void(ticket)

    def flush(self) -> None:
        """Forget what nobody holds."""
        self.evict(self.evictable)


def chain(namespace: str, tokens: bytes, width: int, marks: Marks = NO_MARKS) -> list[bytes]:
    """A key for each whole page of ``width`` bytes:
    a 128-bit hash of the namespace, and of all tokens and marks up to its end."""
    keys, key = [], blake2b(namespace.encode(), digest_size=16).digest()
    for i, at in enumerate(range(0, len(tokens) - width + 1, width)):
        key = blake2b(key + tokens[at : at + width] + marks.get(i, b""), digest_size=16).digest()
        keys.append(key)
    return keys

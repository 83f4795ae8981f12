"""Units of the prefix tree that have a copy beside the device, in host memory or on a disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

from sgla.cache.loose import LoosePool
from sgla.cache.tree import NO_MARKS, Marks
from sgla.messages import KEY

T = TypeVar("T")

NOWHERE = 1  # the number of units that have none


class TierPool(LoosePool):
    """Units of one cache group, each under a key that says all tokens up to its end. One that a copy goes to
    is *coming* and held; one that a copy comes from is held. Those that nobody holds are lost when others
    need their places, the one longest unused first; of a text the last one, without which the others are
    still of use, or if it is the ``ends`` that are, as of windows and states, the first one."""

    __slots__ = ("_coming", "_ends", "_highest", "_tickets")

    def __init__(self, units: int, found: bytes = b"", ends: bool = False) -> None:
        """``found``: keys of what the first units hold already, zeros for none."""
        super().__init__(units + 1)
        self._ends = ends
        self._tickets: dict[bytes, int] = {}  # of each key; some are void
        self._coming: set[int] = set()  # tickets
        self._highest = 0  # of the units that have been written to
        keys = {found[at : at + KEY]: at // KEY + 1 for at in range(0, len(found), KEY)}
        keys.pop(bytes(KEY), None)
        for unit in keys.values():
            self._out[unit] = 1
        self._free = [unit for unit in self._free if not self._out[unit]]
        self._tickets = dict(zip(keys, self.give(keys.values(), held=False)))
        self._highest = max(keys.values(), default=0)

    def has_key(self, key: bytes) -> bool:
        """Whether a copy is there, and complete."""
        ticket = self._tickets.get(key, 0)
        return self.has(ticket) and ticket not in self._coming

    def lacks(self, key: bytes) -> bool:
        """Whether there is no copy, nor one coming."""
        return not self.has(self._tickets.get(key, 0))

    def place(self, key: bytes) -> int:
        """The unit of a key that it ``has_key``."""
        return self.page(self._tickets[key])

    def make_room(self, n: int, more: int = 0) -> int:
        """For so many copies, as far as that is possible: in the places of a text that goes, in its order.
        Returns for how many of ``more`` others there is room without that."""
        going = max(0, min(n - len(self), self.evictable))
        lost = [self._idle.popitem(last=False)[0] for _ in range(going)]
        self._lose([*self._backwards(lost)])
        return max(0, min(more, len(self) - n))

    def receive(self, key: bytes) -> int:
        """A unit for a copy of what ``key`` names; 0: all are held."""
        if not len(self):
            if not self.evictable:
                return 0
            self.evict(1)
        pages = self.alloc(1)
        self._highest = max(self._highest, pages[0])
        [ticket] = self.give(pages, held=True)
        self._tickets[key] = ticket
        self._coming.add(ticket)
        if len(self._tickets) > 2 * self.total + 64:
            self._tickets = {key: ticket for key, ticket in self._tickets.items() if self.has(ticket)}
        return pages[0]

    def received(self, pages: Sequence[int], ok: bool) -> list[int]:
        """A copy to ``pages``, in the order of their tokens, is done or has failed. Returns those that hold
        nothing of use."""
        for page in pages:
            ticket = self._ticket[page]
            self._coming.discard(ticket)
            if not ok:
                self.void(ticket)
        return self.leave(pages)

    def leave(self, pages: Sequence[int]) -> list[int]:
        """``unhold`` what a copy was of. Returns those that have been forgotten meanwhile."""
        gone = [page for page in pages if not self._ticket[page] and self._holds[page] == 1]
        self.unhold(self._backwards(pages))
        return gone

    def use(self, keys: Sequence[bytes]) -> None:
        """Somebody has had what these keys name, though not from here."""
        for key in self._backwards(keys):
            page = self._page.get(self._tickets.get(key, 0), 0)
            if page in self._idle:
                self._idle.move_to_end(page)

    def _backwards(self, units: Sequence[T]) -> Iterable[T]:
        """Of a text, in the order in which they are to go."""
        return units if self._ends else reversed(units)

    def forget_keys(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the units that held them, and that no copy is of."""
        pages = []
        for key in keys:
            ticket = self._tickets.pop(key, 0)
            if self.has(ticket) and not self._holds[self.page(ticket)]:
                pages.append(self.page(ticket))
            self._coming.discard(ticket)
            self.void(ticket)
        return pages

    def shrink(self, pages: Iterable[int]) -> None:
        """There is no room for ``pages``, which are free, nor for any that has never been written to: older
        copies make room for new ones from now on."""
        lacking = set(pages)
        gone = {page for page in self._free if page > self._highest or page in lacking}
        for page in gone:
            self._out[page] = 1
        self._free = [page for page in self._free if page not in gone]
        self._retired += sorted(gone, reverse=True)

    def grow(self, n: int) -> None:
        """There may be room again: ``n`` of the units that there was none for are the last to be used."""
        back = self._retired[-n:]
        del self._retired[-n:]
        for page in back:
            self._out[page] = 0
        self._free[:0] = reversed(back)

    @property
    def room(self) -> int:
        """Units that it has or could have."""
        return self.total - 1 - len(self._retired)

    def flush(self) -> list[int]:
        """Forget what nobody holds. Returns the units."""
        pages = list(self._idle)
        self.evict(self.evictable)
        return pages


class StorePool:
    """What is known of one cache group in a tier that others write to, too: keys that were found there or
    written, the latest ``MOST``. What it has need not be among them. Units have no numbers."""

    __slots__ = ("_known",)
    MOST = 1 << 20

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    @property
    def cached(self) -> int:
        return len(self._known)

    @property
    def room(self) -> int:
        return 0

    def grow(self, n: int) -> None:
        pass

    def shrink(self, pages: Iterable[int]) -> None:
        pass

    def has_key(self, key: bytes) -> bool:
        return key in self._known

    def lacks(self, key: bytes) -> bool:
        return key not in self._known

    def place(self, key: bytes) -> int:
        return NOWHERE

    def make_room(self, n: int, more: int = 0) -> int:
        return more

    def receive(self, key: bytes) -> int:
        return NOWHERE

    def seen(self, keys: Iterable[bytes]) -> None:
        """They are there."""
        for key in keys:
            self._known[key] = None
        while len(self._known) > self.MOST:
            del self._known[next(iter(self._known))]

    def forget_keys(self, keys: Iterable[bytes]) -> list[int]:
        for key in keys:
            self._known.pop(key, None)
        return []

    def flush(self) -> list[int]:
        self._known.clear()
        return []

    def use(self, keys: Sequence[bytes]) -> None:
        pass

    def hold(self, pages: Iterable[int]) -> None:
        pass

    def leave(self, pages: Sequence[int]) -> list[int]:
        return []

    def received(self, pages: Sequence[int], ok: bool) -> list[int]:
        return []

    def check_owners(self, owned: Sequence[int], held: Sequence[int]) -> None:
        pass


def chain(
    keys: list[bytes], namespace: str, tokens: bytes, width: int, count: int, marks: Marks = NO_MARKS
) -> list[bytes]:
    """Keys of the first ``count`` pages of ``width`` bytes: a 128-bit hash of the namespace, and of all
    tokens and marks up to their ends. ``keys``: the first of them, which the others join."""
    key = keys[-1] if keys else blake2b(namespace.encode(), digest_size=KEY).digest()
    for i in range(len(keys), count):
        page = tokens[i * width : (i + 1) * width]
        key = blake2b(key + page + marks.get(i, b""), digest_size=KEY).digest()
        keys.append(key)
    return keys[:count]

"""Copies of the prefix tree's pages on the host:
saved when a request has computed them, loaded when another wants them."""

from __future__ import annotations

from sgla.cache.pages import PagePool
from sgla.cache.radix import RadixCache
from sgla.cache.tier import HostTier, chain
from sgla.cache.tree import TOKEN_BYTES, Node, marks_from
from sgla.messages import Copy, Moved, int32
from sgla.sched.request import Request


class Numbers:
    """Of copies: 1, 2, 3 ..."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0

    @property
    def next(self) -> int:
        return self._last + 1

    def take(self) -> int:
        self._last += 1
        return self._last


class Transfer:
    """Pages on their way between the device and the host. It keeps ``node`` locked, whose path has those of
    the device, and holds ``places``, those of the host. ``waiters``: requests that are held until it is
    done."""

    __slots__ = ("inward", "keys", "node", "places", "waiters")

    def __init__(self, inward: bool, node: Node, keys: list[bytes], places: list[int]) -> None:
        self.inward = inward
        self.node = node
        self.keys = keys
        self.places = places
        self.waiters: list[str] = []


class Transfers:
    """``under_way``: transfers that have begun or begin with the next plan, which takes ``copies``.
    Without host pages there are none, and it is not ``active``. ``numbers``: of all copies."""

    def __init__(
        self, cache: RadixCache, pool: PagePool, host_pages: int, page_size: int, numbers: Numbers
    ) -> None:
        self.under_way: dict[int, Transfer] = {}
        self.copies: list[Copy] = []
        self.tier = HostTier(host_pages)
        self.active = host_pages > 0
        self._cache = cache
        self._pool = pool
        self._width = page_size * TOKEN_BYTES
        self._page_size = page_size
        self._numbers = numbers

    def load(self, request: Request, room: int) -> bool:
        """Have pages behind those that the request found in the tree copied from the host, ``room`` at most.
        They are the tree's at once, which lacks them until the copy has ended. False: there are none."""
        if not self.active or not request.reads_cache:
            return False
        assert request.node is not None
        first, last = request.shared, (request.known - 1) // self._page_size
        keys = chain(request.namespace, request.data[: last * self._width], self._width, request.marks)
        places = self.tier.find(keys[first : first + room])
        if not places:
            return False
        last = first + len(places)
        self._cache.evict(len(places) - len(self._pool))
        pages = self._pool.alloc(len(places))
        tokens = request.data[first * self._width : last * self._width]
        marks = marks_from(request.marks, first)
        node = self._cache.adopt(request.node, request.namespace, tokens, pages, marks=marks)
        assert node is not None, "the tree has more than it was found to have"
        self.tier.hold(places)
        begun = self._begin(Transfer(True, node, keys[first:last], places), pages)
        self._cache.expect(node, request.node, begun)
        self.wait(begun, request.rid)
        return True

    def wait(self, transfer: int, rid: str) -> None:
        """A request is held until that transfer is done."""
        self.under_way[transfer].waiters.append(rid)

    def save(self, request: Request, count: int) -> None:
        """Have those of the request's first ``count`` pages copied to the host of which it has no copy.
        The tree has all."""
        if not self.active:
            return
        tokens = request.tokens[: count * self._page_size].tobytes()
        keys = chain(request.namespace, tokens, self._width, request.marks)
        node = self._cache.find(request.namespace, tokens, count * self._page_size, request.marks)
        if node is None or not self._cache.ready(node):
            return
        new, pages, places = list[bytes](), list[int](), list[int]()
        for key, page in zip(keys, self._cache.pages_to(node)):
            if self.tier.lacks(key):
                if not (place := self.tier.receive(key)):
                    break
                new.append(key)
                pages.append(page)
                places.append(place)
        if places:
            self._begin(Transfer(False, node, new, places), pages)

    def _begin(self, transfer: Transfer, pages: list[int]) -> int:
        self._cache.lock(transfer.node)
        number = self._numbers.take()
        self.under_way[number] = transfer
        ends = [("device", int32(pages)), ("host", int32(transfer.places))]
        (target, targets), (source, sources) = ends if transfer.inward else ends[::-1]
        self.copies.append(Copy(number, source, target, sources, targets))
        return number

    def forget(self, request: Request) -> None:
        """Nothing of the request's text is left on the host."""
        if self.active:
            tokens = request.tokens.tobytes()
            self.tier.forget_keys(chain(request.namespace, tokens, self._width, request.marks))

    def moved(self, moved: Moved) -> list[str]:
        """A transfer has ended. Returns who waited for it.
        Of one that has failed nothing is left, so that nobody tries again."""
        transfer = self.under_way.pop(moved.transfer)
        if transfer.inward:
            self._cache.arrive(transfer.node, moved.ok)
            self.tier.unhold(transfer.places)
            if not moved.ok:
                self.tier.forget_keys(transfer.keys)
        else:
            self._cache.unlock(transfer.node)
            self.tier.received(transfer.places, moved.ok)
        return transfer.waiters

    def check(self) -> None:
        """Raises AssertionError if a page of the host is lost or doubled."""
        places = [place for transfer in self.under_way.values() for place in transfer.places]
        self.tier.check_owners([], places)

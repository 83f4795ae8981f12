"""Which adapter each place of the device has, and who may use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgla.messages import ADAPTER, Copy, Moved, int32
from sgla.sched.moving import Numbers
from sgla.sched.request import Request

PLACE = "place"  # see Adapters.awaited
AHEAD = 4  # copies under way up to which another begins for a request whose turn has not come


class AdapterPlace:
    """``adapter`` 0: it is empty. ``users``: requests with a slot that have it. ``transfer``: the copy that
    brings the adapter, while it is under way, for which ``waiters`` are held. ``used``: when somebody last
    had it, ``since``: since when it has this adapter; both count uses."""

    __slots__ = ("adapter", "number", "since", "transfer", "used", "users", "waiters")

    def __init__(self, number: int) -> None:
        self.number = number
        self.adapter = self.users = self.transfer = self.used = self.since = 0
        self.waiters: list[str] = []


class Adapters:
    """Places are filled by copies, which a plan takes as ``copies``, beside the steps under way; a request
    with an adapter is held until it has come. The place that nobody has used for longest is given away,
    ``pinned`` adapters aside.

    Where all are in use, the first request that wants one *claims* that which has had its adapter for
    longest: no further request is admitted there, so it will be free. Claims are made anew in each plan.
    Thousands may wait: what is found for one of them holds for the others until a place changes hands.
    While others run, adapters of those that come next are brought to places that nobody uses.
    """

    def __init__(self, places: int, numbers: Numbers) -> None:
        """``numbers``: of all copies."""
        self.copies: list[Copy] = []
        self.pinned: set[int] = set()
        self.loads = 0  # copies begun
        self._numbers = numbers
        self._places = [AdapterPlace(number + 1) for number in range(places)]
        self._of: dict[int, AdapterPlace] = {}  # by adapter
        self._coming: dict[int, AdapterPlace] = {}  # by the transfer
        self._expected: set[int] = set()  # adapters of those that come next
        self._claims: dict[int, int] = {}  # number of a place -> the adapter that is to have it
        self._claimed: dict[int, int] = {}  # the same by the adapter
        self._full = False  # no place can be given away but to who has claimed it
        self._busy: list[AdapterPlace] | None = None  # those to be claimed next, the last one first
        self._clock = 0

    @property
    def under_way(self) -> bool:
        """Some copy has begun, or begins with the next plan."""
        return bool(self._coming)

    @property
    def held(self) -> list[str]:
        """Requests, for copies."""
        return [rid for place in self._coming.values() for rid in place.waiters]

    @property
    def count(self) -> int:
        """Of places."""
        return len(self._places)

    @property
    def used(self) -> int:
        """Places that have an adapter."""
        return len(self._of)

    def begin(self) -> None:
        """A plan begins."""
        self._claims.clear()
        self._claimed.clear()
        self._changed()

    def _changed(self) -> None:
        """Places are used by others than before."""
        self._full, self._busy = False, None

    def has(self, adapter: int) -> bool:
        """It has come, or 0, the base."""
        return not adapter or (adapter in self._of and not self._of[adapter].transfer)

    def awaited(self, request: Request, bring: bool = True) -> str:
        """What the request is to wait for before it can have its adapter, if it wants one: nothing, the
        ``ADAPTER``, which a copy brings, or a ``PLACE`` that others use. ``bring`` False: no copy begins."""
        if not request.adapter:
            return ""
        place = self._of.get(request.adapter)
        if place is None:
            if not bring:
                return PLACE
            place = self._free(request.adapter)
            if place is None:
                self._claim(request.adapter)
                return PLACE
            self._load(place, request.adapter)
        if place.transfer:
            place.waiters.append(request.rid)
            return ADAPTER
        return PLACE if place.number in self._claims else ""

    def comes(self, adapter: int) -> bool:
        """A copy brings it."""
        return adapter in self._of and bool(self._of[adapter].transfer)

    def expect(self, adapters: Sequence[int], most: int = AHEAD) -> None:
        """Those of the requests that come next, in their order (0: the base). Beside ``most`` copies none
        begins, so that a request whose turn comes does not wait long for its own; and no adapter that is
        expected makes room for another."""
        self._expected = set(adapters) - {0}
        room = most - len(self._coming)
        if room <= 0:
            return
        lacking = [adapter for adapter in dict.fromkeys(adapters) if adapter and adapter not in self._of]
        if not lacking:
            return
        kept = self.pinned | self._expected
        free = [
            place
            for place in self._places
            if not (place.users or place.transfer or place.adapter in kept or place.number in self._claims)
        ]
        free.sort(key=self._worth)
        for adapter, place in zip(lacking[:room], free):
            self._load(place, adapter)

    def take(self, request: Request) -> None:
        """The request, which gets a slot, uses the place of its adapter."""
        place = self._of[request.adapter]
        place.users += 1
        request.place = place.number
        self._touch(place)
        self._changed()

    def give_back(self, request: Request) -> None:
        """No step contains the request any more."""
        if not request.place:
            return
        place = self._places[request.place - 1]
        place.users -= 1
        request.place = 0
        self._touch(place)
        self._changed()

    def forget(self, adapter: int) -> None:
        """The adapter is gone, and no open request has it."""
        self.pinned.discard(adapter)
        self._changed()
        if (place := self._of.pop(adapter, None)) is not None:
            place.adapter = place.used = 0

    def leave(self, rid: str) -> None:
        """A request that is held has ended."""
        for place in self._coming.values():
            if rid in place.waiters:
                place.waiters.remove(rid)
                return

    def moved(self, moved: Moved) -> list[str] | None:
        """A copy has ended. Returns who was held for it; None if it is none of an adapter."""
        place = self._coming.pop(moved.transfer, None)
        if place is None:
            return None
        place.transfer, waiters, place.waiters = 0, place.waiters, []
        self._changed()
        if not moved.ok:
            self.forget(place.adapter)
        return waiters

    def _touch(self, place: AdapterPlace) -> None:
        self._clock += 1
        place.used = self._clock

    def claimed(self, adapter: int) -> int:
        """The place that is to have the adapter when it is free; 0: none is."""
        return self._claimed.get(adapter, 0)

    def _free(self, adapter: int) -> AdapterPlace | None:
        """The place to give away; None if all are in use."""
        claimed = adapter in self._claimed
        if self._full and not claimed:
            return None
        free = [
            place
            for place in self._places
            if not (place.users or place.transfer or place.adapter in self.pinned)
            and self._claims.get(place.number, adapter) == adapter
        ]
        self._full |= not free and not claimed
        return min(free, key=self._worth, default=None)

    def _worth(self, place: AdapterPlace) -> tuple[bool, int, int]:
        """The first to be given away are those that nobody expects, and has used for longest."""
        return place.adapter in self._expected, place.used, place.number

    def _claim(self, adapter: int) -> None:
        if adapter in self._claimed:
            return
        if self._busy is None:
            usable = [place for place in self._places if place.users and place.adapter not in self.pinned]
            self._busy = [place for place in usable if place.number not in self._claims]
            self._busy.sort(key=lambda place: place.since, reverse=True)
        if self._busy:
            number = self._busy.pop().number
            self._claims[number], self._claimed[adapter] = adapter, number

    def _load(self, place: AdapterPlace, adapter: int) -> None:
        transfer = self._numbers.take()
        self._of.pop(place.adapter, None)
        self._touch(place)
        place.adapter, place.transfer, place.since = adapter, transfer, self._clock
        self._of[adapter] = self._coming[transfer] = place
        self.loads += 1
        self.copies.append(Copy(transfer, "adapters", "places", [int32([adapter])], [int32([place.number])]))

    def check(self, holders: Iterable[Request]) -> None:
        """``holders``: the requests that have a slot. Raises AssertionError if places do not add up."""
        users = [0] * len(self._places)
        for request in holders:
            assert bool(request.place) == bool(request.adapter), "an adapter without a place"
            if request.place:
                users[request.place - 1] += 1
                adapter = self._places[request.place - 1].adapter
                assert adapter in (0, request.adapter), "another's place"  # 0: it is gone meanwhile
        assert users == [place.users for place in self._places], "users of places lost or doubled"
        assert all(place is self._places[place.number - 1] for place in self._of.values())
        there = {place.adapter: place for place in self._places if place.adapter}
        assert there == self._of, "an adapter has two places, or none"
        assert all(not place.users for place in self._places if place.transfer)
        coming = {place.transfer: place for place in self._places if place.transfer}
        assert coming == self._coming, "a copy is lost"
        assert all(place.transfer for place in self._places if place.waiters), "held for nothing"

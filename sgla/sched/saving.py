"""What the prefix tree has is copied to tiers: when a request ends, beside the steps that read a long prompt,
or before the tree loses it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from sgla.cache.spaces import weights_of
from sgla.cache.tier import chain
from sgla.cache.tree import Node
from sgla.cache.window import WindowPool
from sgla.messages import Copy
from sgla.sched.moving import Moving, Transfer, columns, joined
from sgla.sched.request import Request

# What is on its way out cannot be evicted meanwhile: a fourth of the device's pages at most, unless it is one
# text alone.
LEAVING = 4
AHEAD = 4  # with write_back, so large a part of the pages has been copied before it is the first to go
# Each time when so many texts have been saved, a tier that had no room is tried with so many units more, the
# next time with twice as many.
AGAIN, MORE = 256, 64


class Saving:
    """``policy``: that of ``--kv-write-policy``. With ``write_back`` pages of whole histories are copied when
    they are among the next to go; what else stands in the tree is little, and copied as ever. ``leaving``:
    pages on their way to each tier; ``weights``: the name of those of now. What requests that began with
    others go on with is of both, and stays out of tiers."""

    def __init__(self, moving: Moving, policy: str) -> None:
        self._moving, self._policy = moving, policy
        self.leaving = [0] * len(moving.tiers)
        self.weights = ""
        self._saved = 0  # texts
        self._more = [MORE] * len(moving.tiers)
        self._going: deque[tuple[Node, int]] = deque()  # leaves, of which so many pages go next
        self._looked: int | None = None  # pages that the tree had lost when it was last asked for these

    def renew(self, weights: str) -> None:
        """Weights of this name come: the device forgets what no request uses."""
        self._moving.cache.flush()
        self.weights = weights

    def save(self, request: Request, count: int) -> None:
        """Have what the tree has of the request's first ``count`` pages copied to each tier that lacks it.
        Steps that have been planned compute it; the tree has all pages."""
        moving = self._moving
        if not moving.told or not count or weights_of(request.namespace) != self.weights:
            return
        self._saved += 1
        if self._saved % AGAIN == 0:
            for tier, pools in enumerate(moving.tiers):
                for pool in pools:
                    pool.grow(self._more[tier])
                self._more[tier] *= 2
        tokens = request.tokens[: count * moving.page_size].tobytes()
        node = moving.cache.find(request.namespace, tokens, count * moving.page_size, request.marks)
        if node is None:
            return
        keys = request.chain(moving.page_size, count)
        there = moving.cache.units(node)
        units = [dict(enumerate(there.pages)), *there.windows]
        if moving.pools.states is not None:
            units.append({end - 1: unit for end, unit in there.states.items()})
        for tier, told in enumerate(moving.told):
            policy = "write_through" if told.early else self._policy
            most = request.borrowed if policy == "write_through_selective" else count
            if not most or told.computes:
                continue
            saved = [{i: unit for i, unit in group.items() if i < most} for group in units]
            if policy == "write_back":
                saved[0] = {}
            ends = {most, min(most, request.prompt_len // moving.page_size)}
            self._save(tier, node, keys, saved, ends=ends)

    def lack(self, tier: int, full: Sequence[bytes]) -> None:
        """There is no room for these places, of each cache group."""
        for pool, places in zip(self._moving.tiers[tier], full):
            pool.shrink(array("i", places))
        if full:
            self._more[tier] = MORE

    def save_part(self, request: Request) -> None:
        """Have the pages of whole histories that the tree has of a prompt copied to tiers where others wait
        for them, beside the steps that read its rest."""
        moving = self._moving
        early = [tier for tier, told in enumerate(moving.told) if told.early]
        if not early or not request.shared or request.node is None:
            return
        keys = request.chain(moving.page_size, request.shared)
        pages = dict(enumerate(moving.cache.units(request.node).pages))
        for tier in early:
            self._save_pages(tier, request.node, keys, pages)

    def save_rest(self, request: Request, count: int) -> None:
        """Of a request whose prompt has been computed, and nothing else, have the page in which that ends,
        behind ``count`` whole ones, copied to the tier where others wait for it, and own it meanwhile. Not
        of one with pictures, whose key no request looks for (``Request.rest``)."""
        moving, early = self._moving, [tier for tier, told in enumerate(self._moving.told) if told.early]
        if not early or request.marks or request.node is None or moving.pools.states is not None:
            return
        size = moving.page_size
        if not count or request.least != request.prompt_len or request.prompt_len - count * size <= 1:
            return
        keys, tokens = request.chain(size, count).copy(), request.tokens[: request.prompt_len].tobytes()
        keys = chain(keys, request.namespace, tokens, moving.width, count + 1)
        columns = (request.pages, *request.windows)
        own = [pages[count] for pages in columns]
        if self._save(early[0], request.node, keys, [{count: page} for page in own], own):
            for pages in columns:
                del pages[count]

    def go_on(self) -> None:
        """A plan begins: with ``write_back``, have one of the leaves that go next copied."""
        if self._policy != "write_back" or not self._moving.told:
            return
        cache, pool = self._moving.cache, self._moving.pools.pages
        ahead = pool.total // AHEAD
        seen = self._looked is not None and cache.lost - self._looked < max(1, ahead // 4)
        if len(pool) < ahead and not seen:
            self._looked = cache.lost
            self._going = deque(cache.going(ahead))
        while self._going:
            node, count = self._going.popleft()
            if node.is_leaf:
                self._save_end(node, count)
                return

    def _save_end(self, node: Node, count: int) -> None:
        """The last ``count`` pages down to a leaf."""
        moving = self._moving
        namespace, tokens, marks = moving.cache.text(node)
        if weights_of(namespace) != self.weights:
            return
        total = len(tokens) // moving.width
        keys = chain([], namespace, tokens, moving.width, total, marks)
        pages = dict(list(enumerate(moving.cache.units(node).pages))[-count:])
        for tier, told in enumerate(moving.told):
            if not (told.early or told.computes):
                self._save_pages(tier, node, keys, pages)

    def _save_pages(self, tier: int, node: Node, keys: list[bytes], pages: dict[int, int]) -> None:
        self._save(tier, node, keys, [pages, *[{}] * (self._moving.pools.count - 1)])

    def _save(
        self,
        tier: int,
        node: Node,
        keys: list[bytes],
        there: list[dict[int, int]],
        own: Sequence[int] = (),
        ends: Iterable[int] = (),
    ) -> bool:
        """``there``: the units of each cache group, by the page that they end with. ``own``: all of them, if
        the tree has none. ``ends``: numbers of pages behind which others will go on; of windows what these do
        not read takes no other's place. False: the tier lacks nothing, or has no room."""
        moving, told = self._moving, self._moving.told[tier]
        named: list[list[bytes]] = []
        units, places = list[list[int]](), list[list[int]]()
        total = moving.pools.pages.total
        leaving = self.leaving[tier]
        few = leaving and not told.early
        room = max(total // LEAVING - leaving, 0) if few else total
        read = [None, *(self._read(pool, ends) for pool in moving.pools.windows), None]
        for pool, found, needed in zip(moving.tiers[tier], there, read):
            pool.use(keys if not needed else [keys[i] for i in sorted(needed)])
            wanted = [i for i in sorted(found) if pool.lacks(keys[i])][:room]
            others = [i for i in wanted if needed and i not in needed]
            spare = pool.make_room(len(wanted) - len(others), len(others))
            left_out = {*others[: len(others) - spare]}
            received = list[tuple[int, int]]()
            for i in (i for i in wanted if i not in left_out):
                if not (place := pool.receive(keys[i])):
                    break
                received.append((i, place))
            named.append([keys[i] for i, _ in received])
            units.append([found[i] for i, _ in received])
            places.append([place for _, place in received])
        if not any(units):
            return False
        self.leaving[tier] += len(units[0])
        moving.cache.lock(node)
        held = [[], *([] if own else unit for unit in units[1:])]
        moving.pools.hold(held)
        owned = [[page] for page in own]
        number = moving.begin(Transfer(tier, places, node, held, owned, keys=named))
        moving.later.append(Copy(number, "device", told.name, columns(units), columns(places), joined(named)))
        return True

    def _read(self, pool: WindowPool, ends: Iterable[int]) -> set[int]:
        """The pages that a token behind each of the ``ends`` reads."""
        size = self._moving.page_size
        return {i for end in ends for i in range(pool.first(end * size), end)}

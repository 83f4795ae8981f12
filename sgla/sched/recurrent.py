"""Units of the group of states: every function here that moves ownership says so.

A running request owns ``unit``, the state that its rows go on with. Until its next row it holds ``read``,
the checkpoint of the tree which that row begins with, and it owns ``mark`` and ``tails``, checkpoints of its
prompt and of its output for the tree to take over at the end. Of a row that verifies guesses it owns a
``trial``, checkpoints behind each of its tokens but the last.
"""

from __future__ import annotations

from sgla.cache.radix import NullCache, RadixCache
from sgla.cache.states import StatePool
from sgla.cache.tree import TOKEN_BYTES
from sgla.sched.request import Request

TAILS = 2  # of an output: steps are planned before its end is known, so the last may lie behind that


class Recurrent:
    """The states of requests, and the checkpoints that they leave in the tree."""

    def __init__(self, pool: StatePool, cache: RadixCache, slots: list[int], page_size: int) -> None:
        """``slots``: the free ones."""
        self.pool, self._cache, self._slots, self._page_size = pool, cache, slots, page_size
        self._keeps = not isinstance(cache, NullCache)
        self._left: list[int] = []  # units that the plan being made reads, and nobody behind it

    def wanted(self, request: Request) -> int:
        """Units that the request takes when it grows. One with none of its own can go on in the checkpoint
        that it begins with, if nobody else uses that: the tree loses it."""
        return int(not (request.unit or (request.read and self.pool.seizable(request.read))))

    def fits(self, request: Request) -> bool:
        """Whether there are as many as it takes."""
        return self.wanted(request) <= self.pool.available

    def begin_with(self, request: Request, state: int) -> None:
        """The request's next row reads that checkpoint of the tree,
        if it is one, which the request holds until then."""
        if state:
            self.pool.hold((state,))
            if request.read:
                self.pool.unhold((request.read,))
            request.read = state

    def take(self, request: Request) -> None:
        """Give the request a unit, if it has none; one ``fits``."""
        if request.unit:
            return
        request.unit = self.pool.take()
        if not request.unit:
            self.pool.seize(request.read)
            request.unit, request.read = request.read, 0

    def begin(self, request: Request) -> int:
        """The request's row of the plan reads the checkpoint that it holds, which this is."""
        unit, request.read = request.read, 0
        self.pool.pin(unit)
        return unit

    @property
    def room(self) -> int:
        """Checkpoints that rows of the plan may write behind guesses."""
        return max(0, self.pool.available - len(self._slots))

    def verify(self, request: Request, guesses: int) -> list[int]:
        """The request's row of the plan, which is still to be added, reads so many guesses. Checkpoints that
        it is to write, as those of ``checkpoint``, since its next row goes on behind the last right one."""
        first = request.planned + 1
        request.trial = [(length, self.pool.take()) for length in range(first, first + guesses)]
        return [number for mark in request.trial for number in mark]

    def go_back(self, request: Request) -> int:
        """It is known how far the row with guesses has got. The checkpoint that the next one, of the
        plan, reads; 0: it goes on with the own state of the request."""
        found = [unit for length, unit in request.trial if length == request.planned]
        self.pool.free(unit for _, unit in request.trial if unit not in found)
        request.trial = []
        self._left += found
        return found[0] if found else 0

    def planned(self) -> None:
        """The plan is made."""
        self.pool.planned()
        self.pool.free(self._left)
        self._left = []

    def checkpoint(self, request: Request, start: int) -> list[int]:
        """Checkpoints that the request's row of the plan, which reads its prompt from ``start`` on and has
        been shared, is to write: each as its length in tokens and its unit. The tree takes over those for
        which it has the pages, the request the last one of the others."""
        told = list[int]()
        if not self._keeps:
            return told
        private = 0
        for length in self._places(request, start):
            node = self._cache.find(request.namespace, request.data, length, request.marks)
            if node is None:
                private = length
            elif not self.pool.has(node.state) and (unit := self.pool.take()):
                node.state = self.pool.write(unit)
                request.given.append(node.state)
                told += (length, unit)
        if private and self._spare():
            if request.mark is not None:
                self.pool.free(request.mark[1:])
            request.mark = (private, self.pool.take())
            told += request.mark
        return told

    def checkpoint_output(self, request: Request) -> list[int]:
        """``checkpoint`` for the end of a prompt, and for a row of one token that the host does not know yet:
        where that is the end of a page, in place of those before, so that the next turn begins there."""
        if not self._keeps or request.planned % self._page_size or not self._spare():
            return []
        if len(request.tails) == TAILS:
            self.pool.free(request.tails.pop(0)[1:])
        request.tails.append((request.planned, self.pool.take()))
        return [*request.tails[-1]]

    def _spare(self) -> bool:
        """Whether there are states enough for all free slots."""
        return self.pool.available > len(self._slots)

    def _places(self, request: Request, start: int) -> list[int]:
        """Where a prompt leaves checkpoints:
        at its last page, where others have gone on differently, and every so many tokens."""
        known, every = len(request.data) // TOKEN_BYTES, self.pool.every
        end = min(request.planned, known)
        places = set(range((start // every + 1) * every, end + 1, every))
        places |= {request.branch, (known - 1) // self._page_size * self._page_size}
        return sorted(length for length in places if start < length <= end)

    def release(self, request: Request, length: int) -> None:
        """Give the request's states back, and its checkpoints to the tree, which has ``length`` of its
        tokens: those of its prompt and of the last of its output. None is left of a ``spoiled`` one."""
        pool = self.pool
        if request.read:
            pool.unhold((request.read,))
        if request.unit:
            pool.free((request.unit,))
        pool.free(unit for _, unit in request.trial)
        last = max((end for end in request.tails if end[0] <= length), default=None)
        for mark in self._own(request):
            node = None
            if mark[0] <= length and mark in (request.mark, last):
                tokens = request.tokens.tobytes()
                node = self._cache.find(request.namespace, tokens, mark[0], request.marks)
            if node is not None and not pool.has(node.state):
                [node.state] = pool.give(mark[1:], held=False)
            else:
                pool.free(mark[1:])
        if request.spoiled:
            for ticket in request.given:
                pool.void(ticket)

    @staticmethod
    def _own(request: Request) -> list[tuple[int, int]]:
        return [*request.tails] if request.mark is None else [request.mark, *request.tails]

    def check(self, holders: list[Request], owned: list[int], held: list[int]) -> None:
        """``owned`` and ``held``: those of transfers. Raises AssertionError if a state is lost, doubled or
        held for nobody."""
        owned = owned + [request.unit for request in holders]
        owned += [unit for request in holders for _, unit in (*self._own(request), *request.trial)]
        self.pool.check_owners(owned, held + [request.read for request in holders if request.read])

"""States of layers that keep no tokens,
but one value made of all of them (linear attention, state space models)."""

from __future__ import annotations

from collections.abc import Sequence

from sgla.cache.loose import LoosePool


class StatePool(LoosePool):
    """Each unit holds one state. A running request owns the one that its rows go on with. The tree has
    *checkpoints*: a state behind the last token of a node, which is of no use at any other place.

    ``every``: a prompt leaves a checkpoint every so many tokens. All rows of a step run at the same time. So
    what one of them reads or writes is *pinned* until the plan is made, and a checkpoint that one of them
    writes is *fresh*: no other row of the step can begin with it.
    """

    __slots__ = ("_fresh", "_pins", "every")

    def __init__(self, total: int, every: int) -> None:
        super().__init__(total)
        self.every = every
        self._pins: list[int] = []
        self._fresh: set[int] = set()

    @property
    def available(self) -> int:
        """Units that are free or can be made so."""
        return len(self) + self.evictable

    def take(self) -> int:
        """A unit, which the caller owns, for which the tree loses the checkpoint longest unused if need be;
        0: there is none."""
        if not len(self):
            if not self.evictable:
                return 0
            self.evict(1)
        return self.alloc(1)[0]

    def readable(self, ticket: int) -> bool:
        """Whether a row of the plan being made can begin with that checkpoint."""
        return ticket in self._page and self._page[ticket] not in self._fresh

    def write(self, unit: int) -> int:
        """The plan being made has a row write a checkpoint of the tree to ``unit``, which the caller owned.
        Returns its ticket."""
        [ticket] = self.give((unit,), held=True)
        self._pins.append(unit)
        self._fresh.add(unit)
        return ticket

    def pin(self, unit: int) -> None:
        """A row of the plan being made reads ``unit``, which the caller held."""
        self._pins.append(unit)

    def planned(self) -> None:
        """The plan is made. Later steps run later, so they may do with its units what they like."""
        self.unhold(self._pins)
        self._pins.clear()
        self._fresh.clear()

    def seizable(self, unit: int) -> bool:
        """Whether nobody but the caller, who holds it, uses the checkpoint ``unit``."""
        return self._holds[unit] == 1

    def seize(self, unit: int) -> None:
        """The caller becomes the owner of a checkpoint that is ``seizable``."""
        self.void(self._ticket[unit])
        self._holds[unit] = 0

    def check_owners(self, owned: Sequence[int], held: Sequence[int]) -> None:
        assert not self._pins, "a unit is pinned and no plan is made"
        super().check_owners(owned, held)

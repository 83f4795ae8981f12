"""Memory that several cache groups share.

It is cut into slabs of equal bytes. A slab belongs to one group at a time, as so many of its pages with
numbers in a row, or to none: a group that is short of pages takes one, and gives it back with its last page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

NOBODY = -1


class Slabs:
    """``pages``: of a slab, in the numbers of each group; page 1 of every group is in the first slab.

    A page is free, or out and then *fixed*, if it cannot be made free at once. A slab without fixed pages
    is *loose*: whichever group wants it can have it.
    """

    __slots__ = (
        "_fixed",
        "_free",
        "_left",
        "_loose",
        "_open",
        "_out",
        "_owner",
        "_room",
        "_spare",
        "_value",
        "pages",
    )

    def __init__(self, count: int, pages: Sequence[int]) -> None:
        self.pages = tuple(pages)
        self._value = lcm(*pages)  # of a slab; a page is worth its part of that
        self._free = list(range(count - 1, -1, -1))  # slabs of nobody
        self._owner = [NOBODY] * count
        self._left: list[list[int]] = [[] for _ in range(count)]  # free pages of each slab that has an owner
        # Of each group, slabs that have so many free pages.
        self._open: list[list[dict[int, None]]] = [[{} for _ in range(size)] for size in pages]
        self._spare = [0] * len(pages)  # free pages in slabs of each group
        self._out = [0] * len(pages)  # and others
        self._fixed = [0] * count
        self._room = [0] * len(pages)  # pages beside fixed ones, of each group
        self._loose = count

    def free(self, group: int) -> int:
        """Pages that the group can have without taking any from others."""
        return self._spare[group] + len(self._free) * self.pages[group]

    def out(self, group: int) -> int:
        """Pages of the group that are not free."""
        return self._out[group]

    def obtainable(self, group: int) -> int:
        """Pages that the group can have if the others get none."""
        return self._room[group] + self._loose * self.pages[group]

    @property
    def available(self) -> int:
        """What all pages are worth that are free or can be made so. What is beside fixed pages can be had by
        their group alone."""
        return self._loose * self._value + self.worth(self._room)

    def worth(self, pages: Sequence[int]) -> int:
        """``pages`` of each group, as parts of slabs."""
        return sum(count * (self._value // size) for count, size in zip(pages, self.pages))

    def fits(self, pages: Sequence[int]) -> bool:
        """Whether each group can have so many, all at the same time."""
        needed = 0
        for count, size, room in zip(pages, self.pages, self._room):
            if count > room:
                needed -= (room - count) // size
        return needed <= self._loose

    def take(self, group: int, n: int) -> list[int]:
        """Pages, fixed, from the slabs that have fewest left: so the others are empty sooner."""
        size, opened, found = self.pages[group], self._open[group], list[int]()
        while n:
            for slabs in opened:
                if slabs:
                    slab, _ = slabs.popitem()
                    break
            else:
                slab = self._begin(group)
            left, fixed = self._left[slab], self._fixed[slab]
            count = min(n, len(left))
            found += left[: -count - 1 : -1]
            del left[-count:]
            if left:
                opened[len(left)][slab] = None
            if not fixed:
                self._loose -= 1
                self._room[group] += size
            self._fixed[slab] = fixed + count
            self._room[group] -= count
            self._spare[group] -= count
            self._out[group] += count
            n -= count
        return found

    def _begin(self, group: int) -> int:
        """A slab that was nobody's."""
        slab, size = self._free.pop(), self.pages[group]
        self._owner[slab] = group
        self._left[slab] = list(range((slab + 1) * size, slab * size, -1))
        self._spare[group] += size
        return slab

    def give(self, group: int, pages: Sequence[int]) -> None:
        """Take back pages, which were fixed."""
        self.loosen(group, pages)
        size, opened = self.pages[group], self._open[group]
        for page in pages:
            slab = (page - 1) // size
            left = self._left[slab]
            if count := len(left):
                del opened[count][slab]
            left.append(page)
            if count + 1 < size:
                opened[count + 1][slab] = None
            else:
                left.clear()
                self._owner[slab] = NOBODY
                self._spare[group] -= size
                self._free.append(slab)
        self._spare[group] += len(pages)
        self._out[group] -= len(pages)

    def fix(self, group: int, pages: Iterable[int]) -> None:
        """Pages that are out cannot be made free any more."""
        size, fixed = self.pages[group], self._fixed
        for page in pages:
            slab = (page - 1) // size
            if not fixed[slab]:
                self._loose -= 1
                self._room[group] += size
            fixed[slab] += 1
            self._room[group] -= 1

    def loosen(self, group: int, pages: Iterable[int]) -> None:
        """They can."""
        size, fixed = self.pages[group], self._fixed
        for page in pages:
            slab = (page - 1) // size
            fixed[slab] -= 1
            self._room[group] += 1
            if not fixed[slab]:
                self._loose += 1
                self._room[group] -= size

    def check(self, out: Sequence[Sequence[int]], fixed: Sequence[Sequence[int]]) -> None:
        """``out``: pages of each group that are not free, and which of them are ``fixed``. Raises
        AssertionError if a slab is of two groups, or a number is off."""
        owner: dict[int, int] = {}
        for group, (pages, size) in enumerate(zip(out, self.pages)):
            for slab in {(page - 1) // size for page in pages}:
                assert owner.setdefault(slab, group) == group, "a slab has two owners"
        assert owner == {s: g for s, g in enumerate(self._owner) if g != NOBODY}, "a slab has a wrong owner"
        assert sorted([*owner, *self._free]) == list(range(len(self._owner))), "slabs lost or doubled"
        there = [0] * len(self._owner)
        for pages, size in zip(fixed, self.pages):
            for page in pages:
                there[(page - 1) // size] += 1
        assert there == self._fixed, "fixed pages are off"
        assert self._loose == there.count(0), "loose slabs are off"
        for group, size in enumerate(self.pages):
            own = [slab for slab, of in owner.items() if of == group]
            left = [page for slab in own for page in self._left[slab]]
            assert len(left) == self._spare[group], "free pages are off"
            assert sorted([*left, *out[group]]) == sorted(
                page for slab in own for page in range(slab * size + 1, (slab + 1) * size + 1)
            ), "pages lost or doubled"
            room = sum(size - there[slab] for slab in own if there[slab])
            assert room == self._room[group], "room beside fixed pages is off"
            for count, slabs in enumerate(self._open[group]):
                assert all(len(self._left[slab]) == count for slab in slabs), "a slab is filed wrongly"
            assert sum(map(len, self._open[group])) == sum(bool(self._left[slab]) for slab in own)

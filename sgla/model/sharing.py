"""How cache groups of pages share one memory. Loads no torch.

It is cut into slabs, each of which holds a whole number of pages of any one group. Pages of a group lie at
equal distances from each other in all of it, and have numbers from the first slab on; what lies in a slab is
decided while the server runs (``cache/slabs.py``). In a page tensors of all layers follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

TENSOR = 128  # bytes of which those of a tensor of a page are a multiple
WASTE = 1 / 16  # of a slab, at most, where that can be had
PAGES = 32  # of one group in a slab, at most


class Slab(NamedTuple):
    """``pages``: of each group that one holds."""

    bytes: int
    pages: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], whole: int = TENSOR) -> Slab:
        """The smallest in which pages of these ``sizes``, of each group, leave little room over: the smaller
        it is, the sooner all of its pages are free. Between pages are a multiple of ``whole`` bytes."""
        found = sorted({count * size for size in sizes for count in range(1, PAGES + 1)})
        tried = [cls._around(room, sizes, whole) for room in found if room >= max(sizes)]
        most = max(WASTE, min(slab.waste(sizes) for slab in tried))
        return next(slab for slab in tried if slab.waste(sizes) <= most)

    @classmethod
    def _around(cls, room: int, sizes: Sequence[int], whole: int) -> Slab:
        """Of so many bytes, or so many more that pages of each group are as far apart as they may be."""
        pages = tuple(room // size for size in sizes)
        unit = lcm(*pages) * whole
        return cls(-(-room // unit) * unit, pages)

    def waste(self, sizes: Sequence[int]) -> float:
        """The part of it that is left over beside pages of the group whose pages fill least."""
        return max(1 - count * size / self.bytes for count, size in zip(self.pages, sizes))

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from page to page of each group."""
        return tuple(self.bytes // count for count in self.pages)

    @property
    def dummy(self) -> int:
        """Bytes of the dummy pages, which lie over each other in front of the first slab."""
        return max(self.strides)

    def total(self, pages: Sequence[int]) -> int:
        """Bytes of all, in which each group has so many pages with its dummy."""
        return (pages[0] - 1) // self.pages[0] * self.bytes + self.dummy

    def count(self, pages: Sequence[int]) -> int:
        """Slabs that so many pages of each group take together."""
        return sum(-(-n // each) for n, each in zip(pages, self.pages))


def longest(slabs: int, each: Sequence[int], least: Sequence[int]) -> int:
    """Pages of the first group that one request can have in so many ``slabs``, of ``each`` group's pages, if
    it has as many of the others, but no more than are the ``least`` that it needs."""
    first, *others = each

    def fits(pages: int) -> bool:
        needed = sum(-(-min(pages, most) // size) for size, most in zip(others, least))
        return needed - (-pages // first) <= slabs

    beside = sum(-(-most // size) for size, most in zip(others, least))
    if (pages := (slabs - beside) * first) >= max(least):
        return pages
    low, high = 0, slabs * first
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def read_pages(window: int, page_size: int) -> int:
    """Pages of a window that one token reads, at most."""
    return -(-(window - 1) // page_size) + 1


def least_pages(window: int, step_tokens: int, page_size: int) -> int:
    """Pages of a window with which one request reads its prompt at full speed: what a token reads, and what a
    step writes."""
    return read_pages(window, page_size) - (-step_tokens // page_size)

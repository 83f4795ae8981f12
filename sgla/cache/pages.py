"""The free list of KV pages."""

from __future__ import annotations

from collections.abc import Iterable

from sgla.cache.slabs import Slabs

LARGE = 4  # so large a part of what is free is put in order before it is handed out


class PagePool:
    """Pages ``1 .. total - 1``; page 0 is the dummy and is never handed out.

    A page is either in here or *out*: owned by the radix tree or by exactly one request. Those of ``slabs``
    are lent by these to the cache ``group``.
    """

    __slots__ = ("_free", "_group", "_out", "_slabs", "total")

    def __init__(self, total: int, slabs: Slabs | None = None, group: int = 0) -> None:
        assert total >= 1, "a pool needs the dummy page"
        self.total = total
        self._slabs, self._group = slabs, group
        self._free = list(range(total - 1, 0, -1)) if slabs is None else []
        self._out = bytearray(total)

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free) if self._slabs is None else self._slabs.free(self._group)

    def alloc(self, n: int) -> list[int]:
        """Hand out ``n`` pages, which the caller owns: such as follow each other, where there are any, since
        these are copied at once."""
        assert 0 < n <= len(self), f"{n} pages wanted, {len(self)} free"
        if self._slabs is not None:
            pages = self._slabs.take(self._group, n)
        else:
            if n * LARGE >= len(self._free):
                self._free.sort(reverse=True)
            pages = self._free[: -n - 1 : -1]
            del self._free[-n:]
        out = self._out
        for page in pages:
            out[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take back pages that nobody reads or writes any more. Whoever gets them next has them in this
        order."""
        out, back = self._out, list(pages)
        for page in back:
            assert out[page], f"page {page} freed twice"
            out[page] = 0
        if self._slabs is not None:
            self._slabs.give(self._group, back)
            return
        back.reverse()
        self._free += back

    def fix(self, pages: Iterable[int]) -> None:
        """These cannot be made free until ``loosen``, or ``free``, as is true of all that ``alloc`` gives."""
        if self._slabs is not None:
            self._slabs.fix(self._group, pages)

    def loosen(self, pages: Iterable[int]) -> None:
        """The tree can give these up at any time."""
        if self._slabs is not None:
            self._slabs.loosen(self._group, pages)

    def out(self) -> list[int]:
        """Pages that are not free."""
        return [page for page, out in enumerate(self._out) if out]

    def check(self) -> None:
        """Free and out pages are disjoint and complete."""
        assert not self._out[0], "the dummy page was handed out"
        if self._slabs is not None:  # which has a check of its own
            return
        assert len(self._free) + sum(self._out) == self.total - 1, "pages lost or doubled"
        assert not any(self._out[page] for page in self._free), "a free page is marked out"

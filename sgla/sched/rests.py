"""Where prompts end: the tokens behind their whole pages, which a prefill server has read."""

from __future__ import annotations

from collections.abc import Sequence

from sgla.sched.moving import Pools
from sgla.sched.request import Request


class Rests:
    """The page of each group in which the prompt of a waiting request ends, until that takes its slot. The
    prefix tree takes whole pages alone. Where there is no other page to be had, these are given up: what they
    hold is computed then."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._pages: dict[str, list[int]] = {}  # by the request, one of each group of pages

    def __len__(self) -> int:
        return len(self._pages)

    def keep(self, rid: str, pages: list[int]) -> None:
        """They are the request's from now on."""
        self.drop(rid)
        self._pages[rid] = pages

    def take(self, rid: str) -> list[int]:
        """The caller owns them; [] if there are none."""
        return self._pages.pop(rid, [])

    def give(self, request: Request, page_size: int) -> bool:
        """To a request that begins, if the tree has all in front of the page: then its last token alone is
        computed. False: it gets none."""
        pages, end = self.take(request.rid), request.prompt_len - 1
        if not pages or request.planned + end % page_size != end:
            self.free(pages)
            return False
        for column, page in zip((request.pages, *request.windows), pages):
            column.append(page)
        request.planned = end
        request.allocated += page_size
        return True

    def take_back(self, request: Request, page_size: int) -> None:
        """What it was given: it does not begin yet."""
        self.keep(request.rid, [column.pop() for column in (request.pages, *request.windows)])
        request.planned = request.shared * page_size
        request.allocated -= page_size

    def free(self, pages: Sequence[int]) -> None:
        """One of each group, or none."""
        for pool, page in zip(self._pools.paged, pages):
            pool.free((page,))

    def drop(self, rid: str) -> None:
        self.free(self.take(rid))

    def clear(self) -> None:
        for rid in list(self._pages):
            self.drop(rid)

    def owned(self, group: int) -> list[int]:
        return [pages[group] for pages in self._pages.values() if group < len(pages)]

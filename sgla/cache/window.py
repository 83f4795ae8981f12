"""Pages of layers that look back a few tokens only (sliding windows)."""

from __future__ import annotations

from sgla.cache.loose import LoosePool
from sgla.cache.slabs import Slabs


class WindowPool(LoosePool):
    """Pages of ``page_size`` tokens for layers in which a token reads itself and the ``window - 1`` tokens
    before it. A prefix is served where the pages of its last tokens are left."""

    __slots__ = ("page_size", "window")

    def __init__(
        self, total: int, window: int, page_size: int, slabs: Slabs | None = None, group: int = 0
    ) -> None:
        assert window > 0
        super().__init__(total, slabs, group)
        self.window = window
        self.page_size = page_size

    @property
    def most(self) -> int:
        """Pages of a request that computes one token at a time, at most."""
        return (self.window + self.page_size - 2) // self.page_size + 1

    def first(self, length: int) -> int:
        """Index of the first page that the token at position ``length`` reads, and so does none behind it."""
        return max(0, length - self.window + 1) // self.page_size

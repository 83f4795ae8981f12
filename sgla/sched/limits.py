"""What the scheduler may use."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """Capacities come from ``Facts``, choices from ``Config``."""

    slots: int
    pages: int  # including the dummy page 0
    page_size: int
    context_len: int
    step_tokens: int  # most tokens in one step
    depth: int = 2  # most steps in flight
    itl_target: float | None = None  # seconds a step with decode rows should take at most
    max_queued: int = 1024  # waiting requests before Overloaded
    policy: str = "fcfs"
    eviction: str = "lru"
    prefix_cache: bool = True
    reserve: float = 0.5  # part of its possible outputs for which a request gets pages reserved, at first
    encoder: bool = False  # prompts are computed in one step, longer ones alone in it, and need no pages
    patience: float = 10.0  # seconds in the waiting list after which arrival order beats the policy

    def __post_init__(self) -> None:
        assert min(self.slots, self.page_size, self.step_tokens) > 0, "empty limits"
        assert 1 <= self.depth <= 3, "depth is 1, 2 or 3"
        assert self.encoder or self.pages > 1, "no pages but the dummy"

    @property
    def rows(self) -> int:
        """Most requests resident: each needs a token of the step's budget."""
        return min(self.slots, self.step_tokens)

    @property
    def pool_tokens(self) -> int:
        """Tokens all pages can hold; an encoder needs none."""
        if self.encoder:
            return self.context_len
        return (self.pages - 1) * self.page_size

# mypy: allow-untyped-defs
"""The tokens of all slots on a GPU: the id of a token stands where its keys and values do.

So the table is as large as the pool of pages, whatever the context is, and what requests share is there once.
What a slot has no page for yet, the token that it has drawn and guesses behind it, stands in a ring of its
own, until it gets its page."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgla.kernels.triton.common import cdiv

# Tokens that a slot may have behind its pages: guesses of a step and the token that it draws
# (``messages.VERIFIED``), and as many again.
RING = tl.constexpr(128)


class TokenTable:
    """``ids`` int32[*]: RING tokens of each slot, then from ``base`` on those of each page of the first
    cache group. ``pages`` int32[slots, *]: the pages of each slot; ``held`` int32[slots]: for how many tokens
    it has pages."""

    def __init__(self, pages: Tensor, held: Tensor, page_size: int) -> None:
        self.pages, self.held, self.page_size = pages, held, page_size
        self.slots, self.base = len(held), len(held) * RING.value
        self.ids = torch.zeros(0, dtype=torch.int32, device=held.device)
        self.resize(1)

    @property
    def device(self) -> torch.device:
        return self.held.device

    def resize(self, pages: int) -> None:
        """Have room for the tokens of so many pages. What was there is gone, but where that is no change."""
        size = self.base + pages * self.page_size
        if size != len(self.ids):
            self.ids = torch.zeros(size, dtype=torch.int32, device=self.device)

    @property
    def longest(self) -> int:
        """Tokens that a slot may have."""
        return self.pages.shape[1] * self.page_size

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Ids int32[R, n] at ``positions`` int64[R, n] of ``slots`` int64[R]."""
        slots, size = slots[:, None], self.page_size
        page = self.pages[slots, positions // size].long()
        behind = slots * RING.value + positions % RING.value
        inside = positions < self.held[slots]
        return self.ids[torch.where(inside, self.base + page * size + positions % size, behind)]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of kernels that call ``_token``."""
        return self.ids, self.pages, self.pages.stride(0), self.held, self.page_size, self.base


@triton.jit
def _token(ids, pages, stride, held, page_size, base, slot, position):
    """Where the id at ``position`` of ``slot`` (int64) stands. What is masked off may be any position."""
    inside = (position >= 0) & (position < tl.load(held + slot))
    page = tl.load(pages + slot * stride + position // page_size, mask=inside, other=0).to(tl.int64)
    return ids + tl.where(
        inside, base + page * page_size + position % page_size, slot * RING + position % RING
    )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "positions", "values"])
def _put(slots, positions, values, ids, pages, stride, held, page_size, base, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    slot = tl.load(slots + i, mask=live, other=0).to(tl.int64)
    position = tl.load(positions + i, mask=live, other=0)
    value = tl.load(values + i, mask=live, other=0)
    place = _token(ids, pages, stride, held, page_size, base, slot, position)
    tl.store(place, value, mask=live & (position >= 0))


def put_tokens(slots: Tensor, positions: Tensor, values: Tensor, tokens: TokenTable) -> None:
    """``values`` int32[n] at ``positions`` of ``slots``, none of which is RING behind its slot's pages. A
    value at a position below 0 goes nowhere."""
    count = len(slots)
    _put[(cdiv(count, 128),)](slots, positions, values, *tokens.arguments, count, BLOCK=128)

"""How a worker is chosen: pure functions of what is known of the workers, each of which gives an index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple


class View(NamedTuple):
    """A worker that may be chosen. ``running``: requests it has. ``unread``: bytes of their prompts that it
    has still to read, less what was cached. ``matched``: bytes of this request's prompt that it has cached.
    ``kept``: bytes of prompts that it has cached in all. ``last``: the number of the last request that it was
    sent. Bytes are estimates."""

    url: str
    running: int = 0
    unread: int = 0
    matched: int = 0
    kept: int = 0
    last: int = 0


def cache_aware(views: Sequence[View], size: int, weight: int) -> int:
    """Where a prompt of ``size`` bytes is answered soonest: what has to be read before and of it, and
    ``weight`` bytes for each running request, with which it shares steps. Of equals, whose cache is emptiest,
    so that new prompts spread.

    A long match outweighs load until it would be quicker to read the prompt elsewhere: then it is, and that
    worker has it too.
    """
    return min(
        range(len(views)),
        key=lambda i: (
            views[i].unread + max(0, size - views[i].matched) + weight * views[i].running,
            views[i].kept,
            views[i].last,
        ),
    )


def least_load(views: Sequence[View]) -> int:
    """The one with fewest requests, and of these with fewest bytes to read."""
    return min(range(len(views)), key=lambda i: (views[i].running, views[i].unread, views[i].last))


def power_of_two(views: Sequence[View], first: int, second: int) -> int:
    """The one with less load of two that are drawn: any two numbers, each of which stands for a worker.
    See M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing."""
    one = first % len(views)
    other = (one + 1 + second % max(1, len(views) - 1)) % len(views)
    pair = sorted({one, other})
    return pair[least_load([views[i] for i in pair])]


def round_robin(views: Sequence[View]) -> int:
    """The one whose last request is longest ago."""
    return min(range(len(views)), key=lambda i: views[i].last)


def consistent_hashing(views: Sequence[View], key: str) -> int:
    """The worker that ``key`` weighs most with (rendezvous hashing): when one goes, its keys spread over the
    others and no other key moves. See Thaler and Ravishankar, Using Name-Based Mappings to Increase Hit
    Rates."""
    return max(range(len(views)), key=lambda i: (_weight(views[i].url, key), views[i].url))


def _weight(url: str, key: str) -> bytes:
    text = f"{url}\0{key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()

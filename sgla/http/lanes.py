"""Work of handlers that takes longer than a step may wait: in lanes, or in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from sgla.actors.lanes import INLINE_SIZE
from sgla.http.clients import CLIENT
from sgla.http.server import ASKED
from sgla.http.turns import pause
from sgla.http.wire import encode

SLICE = 4096  # items that are encoded in one turn of the loop

T = TypeVar("T")


async def beside(request: web.Request, size: int, work: Callable[[], T], inline: int = INLINE_SIZE) -> T:
    """``work()``, here if ``size`` (characters or tokens) is at most ``inline``.
    Raises Overloaded, with what ``work`` raises."""
    if size <= inline:
        return work()
    return await request[ASKED].ingress.lanes.run(request[CLIENT].runs_as, size, work)


async def sliced(items: Sequence[Any], shape: Callable[[Any], Any] | None = None, size: int = SLICE) -> Any:
    """A long list as JSON, each item as ``shape`` makes it, which takes a turn of the loop for each ``size``
    items; a short one as it is."""
    if len(items) <= size:
        return list(items) if shape is None else list(map(shape, items))
    parts = []
    for at in range(0, len(items), size):
        part = items[at : at + size]
        parts.append(encode(list(part) if shape is None else list(map(shape, part)))[1:-1])
        await pause()
    return joined(parts)


async def sliced_lists(lists: Sequence[Sequence[Any]], shape: Callable[[Any], Any] | None = None) -> Any:
    """``sliced`` for a list of lists, which may be many and short."""
    parts, shown, since = [], [], 0
    for items in lists:
        shown.append(await sliced(items, shape))
        since += len(items)
        if since > SLICE:
            parts.append(encode(shown)[1:-1])
            shown, since = [], 0
            await pause()
    return joined([*parts, encode(shown)[1:-1]] if shown else parts) if parts else shown


def joined(parts: list[bytes]) -> msgspec.Raw:
    """A list as JSON, of the JSON of some of its items each, without brackets."""
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def total(texts: Iterable[Any]) -> int:
    """The size of a list: of its members, and a little for each."""
    return sum(64 + len(text) for text in texts)

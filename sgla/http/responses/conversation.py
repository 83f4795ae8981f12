"""What a request of the Responses API is about: what it sends, and what is stored of what it goes on from and refers to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from sgla import census
from sgla.errors import InvalidField, NotFound, TooLarge
from sgla.http.bodies import Share
from sgla.http.clients import Client
from sgla.http.errors import Busy
from sgla.http.responses.input import ResponsesRequest, input_items, referred, resolved
from sgla.http.responses.output import new_id
from sgla.http.responses.store import ITEM, Item, Kept, Part, ResponseStore, kept

MAX_ITEMS = 8192  # of a conversation
SLICE = 256 << 10  # bytes of JSON that are read or written before others have the loop

_decode = msgspec.json.Decoder(Item).decode


class PreviousResponseNotFound(NotFound):
    code = "previous_response_not_found"


class Slices:
    def __init__(self) -> None:
        self._size = 0

    async def after(self, size: int) -> None:
        """Let others have the loop, if enough has been done since they had it."""
        self._size += size + ITEM
        if self._size > SLICE:
            self._size = 0
            await asyncio.sleep(0)


async def gather(
    fields: ResponsesRequest, store: ResponseStore, client: Client, limit: int, share: Share
) -> tuple[Part | None, list[Item], list[Item]]:
    """What the request goes on from; its own items, with stored ones in place of references; the whole conversation.

    What is stored counts as if it were sent: raises TooLarge beyond ``limit`` bytes, and Overloaded where ``share`` gets no memory for
    it. Raises PreviousResponseNotFound, Busy and InvalidField.
    """
    before = earlier(store, client.owner, fields.previous_response_id)
    items = input_items(fields)
    count = len(items) + (before.count if before is not None else 0)
    if count > MAX_ITEMS:
        raise InvalidField(
            f"input: the conversation has {count} items, the limit is {MAX_ITEMS}; leave out old ones",
            param="input",
        )
    names = list(referred(items))
    found = {name: store.item(name, client.name) for name in set(names)}
    size = sum(len(found[name] or b"") for name in names) + (before.total if before is not None else 0)
    if size > limit:
        raise TooLarge(
            f"the stored items that this request goes on from and refers to have {size} bytes, the limit is {limit}; begin "
            "a new conversation, or start the server with a larger --max-body-bytes"
        )
    slices = Slices()
    stored = {name: await decoded(json, share, slices) for name, json in found.items() if json is not None}
    own = []
    for item in resolved(items, stored.get):
        own.append({"id": new_id("item"), **item})
        await slices.after(0)
    stored_items = before.conversation() if before is not None else ()
    past = [await decoded(json, share, slices) for json in stored_items]
    return before, own, [*past, *own]


def earlier(store: ResponseStore, owner: str, uid: str | None) -> Part | None:
    """The conversation that the request goes on with."""
    if uid is None:
        return None
    entry = store.get(uid, owner)
    if entry is None:
        raise PreviousResponseNotFound(
            f"there is no stored response {uid[:200]!r}; responses are kept for a while and up to a number",
            param="previous_response_id",
        )
    if entry.uid is not None:
        raise Busy(f"response {uid!r} is still in progress", param="previous_response_id")
    return entry.part


async def decoded(json: bytes, share: Share, slices: Slices) -> Item:
    counted = census.Census()
    for _ in census.counting(json, counted):
        await asyncio.sleep(0)
    share.take(counted.memory(json))
    await slices.after(len(json))
    return _decode(json)


async def to_keep(items: Iterable[Item], share: Share) -> list[Kept]:
    slices, result = Slices(), []
    for item in items:
        result.append(kept(item))
        share.take(len(result[-1].json))
        await slices.after(len(result[-1].json))
    return result

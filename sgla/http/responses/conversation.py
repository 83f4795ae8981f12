"""What a request of the Responses API is about:
what it sends, and what is stored of what it goes on from and refers to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import msgspec

from sgla import census
from sgla.errors import InvalidField, NotFound, TooLarge
from sgla.http.bodies import Share
from sgla.http.clients import Client
from sgla.http.conversations.store import MAX_ITEMS, ConversationStore, Turn
from sgla.http.errors import Busy
from sgla.http.responses.input import ResponsesRequest, input_items, referred, resolved
from sgla.http.responses.items import ITEM, Item, Kept, kept, kept_id, listed
from sgla.http.responses.output import new_id
from sgla.http.responses.store import Earlier, Place, ResponseStore

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


class Context(msgspec.Struct, eq=False):
    """What a request is about:
    its ``own`` items, with stored ones in place of references, and those ``past`` ones that it goes on from.

    ``place`` and ``turn``: where its response comes, behind another or in a conversation. Whoever takes one
    over puts None there; ``close`` gives back what is left.
    """

    store: ResponseStore
    client: Client
    place: Place | None = None
    turn: Turn | None = None
    own: list[Item] = []
    past: list[Item] = []

    def to_converse(self) -> list[Item]:
        """``own`` as they come into the conversation, none with the id of an item there."""
        taken, items = {item["id"] for item in self.past}, []
        for item in self.own:
            items.append(in_conversation({**item, "id": new_id("item")} if item["id"] in taken else item))
            taken.add(item["id"])
        return items

    def close(self) -> None:
        if self.place is not None:
            self.store.release(self.place, self.client)
        if self.turn is not None:
            self.turn.close()


async def gather(
    fields: ResponsesRequest,
    stores: tuple[ResponseStore, ConversationStore],
    client: Client,
    limit: int,
    share: Share,
    answered: bool,
) -> Context:
    """What is stored counts as if it were sent: raises TooLarge beyond ``limit`` bytes, and Overloaded where
    ``share`` gets no memory for it. Raises PreviousResponseNotFound, ConversationNotFound, Busy and
    InvalidField. ``answered``: a response comes of it, for which the context has a place or a turn.
    """
    store, conversations = stores
    context = Context(store, client)
    uid, part = fields.previous_response_id, None
    try:
        if (conversation := conversation_id(fields)) is not None:
            if answered:
                context.turn = conversations.turn(conversation, client)
            part = (await conversations.find(conversation, client)).part.number
        if uid is not None:
            check_ended(store, uid, client)
            context.place = Place() if answered else None
        items = input_items(fields)
        earlier = await look(items, store, client, limit, share, uid, part, context.place)
        slices = Slices()
        context.own = await resolve(items, earlier, share, slices)
        context.past = [await decoded(json, share, slices) for json in earlier.past]
        share.give(earlier.size)
    except BaseException:
        context.close()
        raise
    return context


async def own_items(
    items: list[Item], store: ResponseStore, client: Client, limit: int, share: Share
) -> list[Item]:
    """``items`` with ids, and with stored ones in place of references.
    Raises TooLarge, Overloaded and InvalidField."""
    earlier = await look(items, store, client, limit, share)
    own = await resolve(items, earlier, share, Slices())
    share.give(earlier.size)
    return own


async def look(
    items: list[Item],
    store: ResponseStore,
    client: Client,
    limit: int,
    share: Share,
    uid: str | None = None,
    part: int | None = None,
    place: Place | None = None,
) -> Earlier:
    """What ``items`` come behind and refer to, as JSON that is in ``share``."""
    names = Counter(referred(items))
    earlier = Earlier(None, 0, 0)
    if names or uid is not None or part is not None:
        earlier = await store.earlier(client, uid, part, names, limit, place)
    if uid is not None and earlier.found is None:
        raise PreviousResponseNotFound(
            f"there is no stored response {uid[:200]!r}; responses are kept for a while and up to a number",
            param="previous_response_id",
        )
    if earlier.found is not None and earlier.found.conversation:
        raise InvalidField(
            f"response {uid!r} is part of a conversation; send conversation: {earlier.found.conversation!r}",
            param="previous_response_id",
        )
    if (count := len(items) + earlier.length) > MAX_ITEMS:
        raise InvalidField(
            f"input: the conversation has {count} items, the limit is {MAX_ITEMS}; leave out old ones",
            param="input",
        )
    if earlier.size > limit:
        raise TooLarge(
            f"the stored items that this request goes on from and refers to have {earlier.size} bytes, the "
            f"limit is {limit}; begin a new conversation, or start the server with a larger --max-body-bytes"
        )
    share.take(earlier.size)
    share.body += earlier.size
    return earlier


async def resolve(items: list[Item], earlier: Earlier, share: Share, slices: Slices) -> list[Item]:
    stored = {name: await decoded(json, share, slices) for name, json in earlier.named.items() if json}
    own = []
    for item in resolved(items, stored.get):
        own.append(item if kept_id(item) else {**item, "id": new_id("item")})
        await slices.after(0)
    return own


def conversation_id(fields: ResponsesRequest) -> str | None:
    """Raises InvalidField."""
    asked = fields.conversation
    uid = asked.get("id") if isinstance(asked, dict) else asked
    if asked is None:
        return None
    if not isinstance(uid, str):
        raise InvalidField("conversation must be the id of one, or {id}", param="conversation")
    if fields.previous_response_id is not None:
        raise InvalidField(
            "conversation and previous_response_id exclude each other; leave one out", param="conversation"
        )
    return uid


def check_ended(store: ResponseStore, uid: str, client: Client) -> None:
    """Raises Busy."""
    if store.live(uid, client.owner) is not None:
        raise Busy(f"response {uid!r} is still in progress", param="previous_response_id")


def in_conversation(item: Item) -> Item:
    """An item as conversations have it."""
    item = {"type": "message", **listed(item)}
    if item["type"] != "reasoning":
        item = {"status": "completed", **item}
    return item


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

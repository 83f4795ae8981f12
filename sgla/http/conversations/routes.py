"""/v1/conversations: lists of items that clients read and change, and that ``/v1/responses`` goes on with."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import InvalidField, UnsupportedField
from sgla.http import answer_types as to
from sgla.http.bodies import SHARE
from sgla.http.clients import CLIENT, Client
from sgla.http.conversations.store import ConversationStore
from sgla.http.operation import operation
from sgla.http.request.intake import intake, optional_intake
from sgla.http.request.paging import page, page_of
from sgla.http.request.schema import Schema, check_count
from sgla.http.responses.conversation import in_conversation, own_items, to_keep
from sgla.http.responses.input import chat_messages
from sgla.http.responses.items import Item
from sgla.http.responses.output import new_id
from sgla.http.server import ASKED, PATH_ID
from sgla.http.wire import encode, json_response

PREFIX = "/v1/conversations"
MAX_ADDED = 20  # items in one request
MAX_PAGE = 100  # items
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # entries; characters

# What OpenAI's server can show beside items.
# Here all that an item has is shown, and the tools that the rest belongs to are not there.
INCLUDES = (
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)


class ConversationCreate(msgspec.Struct, kw_only=True):
    """``items``: what it begins with, up to 20 items as ``/v1/responses`` takes them."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    metadata: dict[str, str] | None


class ConversationItems(msgspec.Struct, kw_only=True):
    items: list[dict[str, Any]]


CREATE, UPDATE, ITEMS = Schema(ConversationCreate), Schema(ConversationUpdate), Schema(ConversationItems)


def asked(request: web.Request) -> tuple[ConversationStore, Client, str, str]:
    """The store; the client who asks; the ids of the conversation and of the item in the path."""
    uid, _, item = request[PATH_ID].partition("/")
    return request[ASKED].conversations, request[CLIENT], uid, item


@operation("OpenAI: begin a conversation", ConversationCreate, to.Conversation, optional=True)
async def create(request: web.Request) -> web.Response:
    fields = await optional_intake(request, CREATE)
    uid = new_id("conv")
    body = conversation(uid, int(time.time()), fields.metadata)
    items = await given_items(request, fields.items or [])
    store = request[ASKED].conversations
    await store.create(request[CLIENT], uid, body, await to_keep(items, request[SHARE]))
    return shown(request, body)


@operation("OpenAI: a conversation", answer=to.Conversation)
async def retrieve(request: web.Request) -> web.Response:
    store, client, uid, _ = asked(request)
    return shown(request, (await store.find(uid, client)).json)


@operation("OpenAI: a conversation's metadata anew", ConversationUpdate, to.Conversation)
async def update(request: web.Request) -> web.Response:
    fields = await intake(request, UPDATE)
    store, client, uid, _ = asked(request)
    created = msgspec.json.decode((await store.find(uid, client)).json)["created_at"]
    body = conversation(uid, created, fields.metadata)
    await store.update(uid, client, body)
    return shown(request, body)


@operation("OpenAI: forget a conversation", answer=to.DeletedConversation)
async def delete(request: web.Request) -> web.Response:
    store, client, uid, _ = asked(request)
    await store.delete(uid, client)
    return json_response({"id": uid, "object": "conversation.deleted", "deleted": True})


@operation("OpenAI: more items for a conversation", ConversationItems, to.Items, query=("include",))
async def add_items(request: web.Request) -> web.Response:
    fields = await intake(request, ITEMS)
    check_include(request)
    store, client, uid, _ = asked(request)
    items = await given_items(request, fields.items)
    await store.add(uid, client, await to_keep(items, request[SHARE]))
    return page(items, [item["id"] for item in items], False)


@operation("OpenAI: what a conversation has", answer=to.Items, query=("limit", "after", "order", "include"))
async def list_items(request: web.Request) -> web.Response:
    """A page of its items, newest first, or oldest first with ``order=asc``."""
    check_include(request)
    store, client, uid, _ = asked(request)
    limit, ascending = page_of(request, most=MAX_PAGE)
    items, more = await store.page(uid, client, limit, request.query.get("after"), ascending)
    request[SHARE].take(sum(len(item.json) for item in items))
    return page([msgspec.Raw(item.json) for item in items], [item.id for item in items], more)


@operation("OpenAI: an item of a conversation", answer=to.Object, query=("include",))
async def retrieve_item(request: web.Request) -> web.Response:
    check_include(request)
    store, client, uid, item = asked(request)
    return shown(request, await store.item(uid, client, item))


@operation("OpenAI: forget an item of a conversation", answer=to.Conversation)
async def delete_item(request: web.Request) -> web.Response:
    """Answers with the conversation."""
    store, client, uid, item = asked(request)
    return shown(request, await store.delete_item(uid, client, item))


# bodies


def check_metadata(entries: dict[str, str]) -> None:
    """Raises InvalidField beyond OpenAI's limits."""
    check_count("metadata", entries, MAX_METADATA)
    if any(len(name) > MAX_KEY or len(value) > MAX_VALUE for name, value in entries.items()):
        raise InvalidField(
            f"metadata: names may have {MAX_KEY} characters, values {MAX_VALUE}", param="metadata"
        )


def conversation(uid: str, created: int, metadata: dict[str, str] | None) -> bytes:
    """Raises InvalidField for metadata beyond OpenAI's limits."""
    entries = metadata or {}
    check_metadata(entries)
    return encode({"id": uid, "object": "conversation", "created_at": created, "metadata": entries})


def shown(request: web.Request, body: bytes) -> web.Response:
    request[SHARE].take(len(body))
    return web.Response(body=body, content_type="application/json")


async def given_items(request: web.Request, items: list[Item]) -> list[Item]:
    """Items as conversations have them, with stored ones in place of references. Raises InvalidField and
    UnsupportedField for what no response could go on from."""
    check_count("items", items, MAX_ADDED)
    server = request[ASKED]
    limit, share = server.config.max_body_bytes, request[SHARE]
    try:
        own = await own_items(items, server.responses, request[CLIENT], limit, share)
        chat_messages(None, own)
    except (InvalidField, UnsupportedField) as error:
        raise type(error)(re.sub(r"\binput\b", "items", error.message), param="items") from error
    ids = Counter(item["id"] for item in own)
    if twice := [uid for uid, count in ids.items() if count > 1]:
        raise InvalidField(f"items: two of them have the id {twice[0][:200]!r}", param="items")
    return list(map(in_conversation, own))


def check_include(request: web.Request) -> None:
    """Raises InvalidField for an ``include`` that nobody knows."""
    for name in [*request.query.getall("include", ()), *request.query.getall("include[]", ())]:
        if name not in INCLUDES:
            raise InvalidField(
                f"include has no {name[:100]!r}; it may have {', '.join(INCLUDES)}", param="include"
            )

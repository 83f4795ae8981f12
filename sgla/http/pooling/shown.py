"""Inputs of embeddings that have pictures or videos: conversations (vLLM's ``messages``), and objects in
``input`` (SGLang's), each with ``text``, ``image`` and ``video`` or some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiohttp import web

from sgla.errors import InvalidField, UnsupportedField
from sgla.http.bodies import SHARE
from sgla.http.media.parts import Message, Source
from sgla.http.pooling.common import inputs
from sgla.http.request.chat import check_parts, checked_messages
from sgla.http.request.schema import MAX_CHOICES, check_count
from sgla.http.server import ASKED, IGNORED_FIELDS, Server

KINDS = ("image", "video")  # in the order in which they stand before the text


class Input(NamedTuple):
    """Fields of a job, and where its media come from."""

    fields: dict[str, Any]
    sources: Sequence[Source] = ()


async def prompts(
    request: web.Request,
    value: Any,
    messages: list[Message] | None,
    sizes: dict[str, Any] | None = None,
    **flags: bool,
) -> list[dict[str, Any]]:
    """Job fields of ``input``, or of one conversation, with their media. ``sizes``: of pictures and videos;
    ``flags``: of what stands behind the conversation. Raises BadRequest kinds."""
    if (value is None) == (messages is None):
        raise InvalidField("input is required", param="input")
    server = request[ASKED]
    if messages is not None:
        checked, sources = checked_messages(messages)
        return await loaded(request, [conversation(server, checked, sources, flags)], sizes)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return await loaded(request, objects(server, value), sizes)
    return inputs(value, "input")


async def loaded(
    request: web.Request, found: Sequence[Input], sizes: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Job fields with media."""
    server, sources = request[ASKED], [entry.sources for entry in found]
    check_parts("input", sources)
    for entry in found:
        server.media.check(entry.sources, server.ingress)
        ignored = (name for source in entry.sources for name in source.ignored)
        request.setdefault(IGNORED_FIELDS, []).extend(ignored)
    kwargs = server.media.sizes(sizes, server.ingress)
    media = await server.media.pictures(sources, server.ingress, request[SHARE], kwargs)
    return [entry.fields | {"pictures": own, "media_kwargs": kwargs} for entry, own in zip(found, media)]


def objects(server: Server, items: list[Any]) -> list[Input]:
    """Of SGLang's objects. Raises InvalidField, UnsupportedField."""
    check_count("input", items, MAX_CHOICES)
    return [_object(server, item, f"input[{i}]") for i, item in enumerate(items)]


def _object(server: Server, item: Any, place: str) -> Input:
    if not isinstance(item, dict) or not all(isinstance(given, str | None) for given in item.values()):
        raise InvalidField(
            f"{place} must be an object of texts: text, image, video; texts and objects do not go together",
            param=place,
        )
    for name in item:
        if name not in ("text", *KINDS):
            raise UnsupportedField(f"{place}.{name[:40]} is not supported; leave it out", param=place)
    sources = [Source(item[kind], f"{place}.{kind}", kind) for kind in KINDS if item.get(kind)]
    text = item.get("text") or ""
    return one(server, text, sources, place)


def one(server: Server, text: str, sources: Sequence[Source], place: str) -> Input:
    """A text behind its media. Raises InvalidField."""
    if not sources and not text:
        raise InvalidField(f"{place} has neither a text nor a picture", param=place)
    if takes_one(server):
        return alone(server, text, sources, place)
    if server.ingress.template is None:
        return Input({"text": "".join(placeholder(server, each) for each in sources) + text}, sources)
    parts = [*(source.part for source in sources), *([{"type": "text", "text": text}] if text else [])]
    return Input({"messages": [{"role": "user", "content": parts}], "add_generation_prompt": True}, sources)


def conversation(
    server: Server, messages: list[Message], sources: Sequence[Source], flags: dict[str, bool]
) -> Input:
    """Raises InvalidField."""
    if not takes_one(server):
        return Input({"messages": messages, "add_generation_prompt": False, **flags}, sources)
    texts = [
        part if isinstance(part, str) else part.get("text", "")
        for message in messages
        for part in _parts(message.get("content"))
    ]
    return alone(server, "".join(texts), sources, "messages")


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content or ""]


def takes_one(server: Server) -> bool:
    """Whether the model makes a vector of a text, or of a picture, and reads no two of them together."""
    facts = server.ingress.facts
    return facts is not None and facts.pooling is not None and facts.pooling.encoder and bool(facts.media)


def alone(server: Server, text: str, sources: Sequence[Source], place: str) -> Input:
    """Raises InvalidField."""
    if len(sources) + bool(text) != 1:
        raise InvalidField(
            f"{place}: this model makes a vector of one text or of one picture; send them as inputs of their "
            "own",
            param=place,
        )
    return Input({"text": text}, sources)


def placeholder(server: Server, source: Source) -> str:
    """What stands for a picture or a video in a text; "" for a model that takes none, which ``loaded``
    says."""
    facts = server.ingress.facts
    return "" if facts is None else facts.media.get(source.kind, "")

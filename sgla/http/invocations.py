"""POST /invocations: SageMaker's one route for everything, told apart by the fields that a body has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from sgla.errors import BadRequest
from sgla.http.openai import chat, text
from sgla.http.operation import EVENTS, operation
from sgla.http.pooling import classify, embeddings, pooling, rerank, score
from sgla.http.request.intake import looked_at
from sgla.http.server import ASKED

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

NULL = msgspec.Raw(b"null")
Value = msgspec.Raw | msgspec.UnsetType


class InvocationRequest(msgspec.Struct, kw_only=True):
    """The fields that tell what is asked for; the others are those of its route."""

    model: Value = msgspec.UNSET
    messages: Value = msgspec.UNSET
    prompt: Value = msgspec.UNSET
    input: Value = msgspec.UNSET
    task: Value = msgspec.UNSET
    query: Value = msgspec.UNSET
    queries: Value = msgspec.UNSET
    documents: Value = msgspec.UNSET
    text_1: Value = msgspec.UNSET
    data_1: Value = msgspec.UNSET


@operation("SageMaker: what the fields of the body ask for", InvocationRequest, stream=EVENTS)
async def invocations(request: web.Request) -> web.StreamResponse:
    fields = await looked_at(request)
    facts = request[ASKED].ingress.facts
    task = facts.pooling.task if facts is not None and facts.pooling is not None else ""
    return await asked(fields, task)(request)


def asked(fields: Mapping[str, msgspec.Raw], task: str) -> Handler:
    """What answers ``fields``. ``task``: what a model is for that answers with vectors, else "".
    Raises BadRequest."""
    has = {name for name, value in fields.items() if value != NULL}
    if has.issuperset({"query", "documents"}):
        return rerank.rerank
    if has & {"query", "queries", "text_1", "data_1"}:
        return score.score
    if "prompt" in has:
        return text.completions
    if "messages" in has and not task:
        return chat.chat_completions
    if "task" in has:
        return pooling.pooling
    if has & {"input", "messages"}:
        return classify.classify if task == "classify" else embeddings.embeddings
    raise BadRequest(
        "the body has none of the fields messages, prompt, input, query, queries, text_1 and data_1, by "
        "which this route knows what is asked for"
    )

"""POST /v1/responses/input_tokens and /v1/responses/compact:
how long a conversation is, and a shorter one in its place."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from sgla.http import answer_types as to
from sgla.http.answer.reading import Reading
from sgla.http.answer.whole import answered
from sgla.http.bodies import SHARE
from sgla.http.clients import CLIENT
from sgla.http.openai.chat import chat_work
from sgla.http.openai.common import answer_size
from sgla.http.openai.render import prompt_length
from sgla.http.operation import operation
from sgla.http.request.intake import intake
from sgla.http.request.schema import ChatRequest
from sgla.http.responses import mcp
from sgla.http.responses.answer import usage_object
from sgla.http.responses.conversation import gather
from sgla.http.responses.input import RESPONSES, Item, ResponsesRequest, chat_request, check_fields, sealed
from sgla.http.responses.items import listed
from sgla.http.responses.output import new_id
from sgla.http.server import ASKED, raise_aborted
from sgla.http.wire import json_response
from sgla.text.tools.cursor import CONTENT

LONGEST = 4096  # tokens of a summary, which is a fourth of the context at most
TASK = (
    "Summarize the conversation so far for somebody who is to continue it and will see nothing else of what "
    "the assistant said and did. Keep what was asked, what was decided and done and why, names and numbers, "
    "and what is still to do. Answer with the summary alone."
)


async def asked(request: web.Request) -> tuple[list[Item], ChatRequest]:
    """The items of the whole conversation, and the chat that they are."""
    server = request[ASKED]
    fields = await intake(request, RESPONSES)
    fields.model = server.model(fields.model)
    check_fields(fields)
    stores, limit = (server.responses, server.conversations), server.config.max_body_bytes
    context = await gather(fields, stores, request[CLIENT], limit, request[SHARE], answered=False)
    items = [*context.past, *context.own]
    offers = await mcp.offers(fields, server.tools)
    remote = {label: offer.functions() for label, offer in offers.items()}
    return items, chat_request(fields, items, remote)


@operation("OpenAI: the size of a response's prompt", ResponsesRequest, to.InputTokens)
async def input_tokens(request: web.Request) -> web.Response:
    """What the request would have as its prompt, in tokens; nothing is computed."""
    _, chat = await asked(request)
    count = await prompt_length(request, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@operation("OpenAI: a summary in place of a conversation", ResponsesRequest, to.Compaction)
async def compact(request: web.Request) -> web.StreamResponse:
    """The messages of the user, and in place of the rest one item with the model's summary. A conversation
    that is too long for the model is summarized without its oldest turns."""
    server = request[ASKED]
    items, chat = await asked(request)
    facts = server.ingress.facts
    assert facts is not None
    chat.messages = [*chat.messages, {"role": "user", "content": TASK}]
    chat.tool_choice = "none" if chat.tools else None
    longest = min(LONGEST, facts.context_len // 4)
    chat.max_completion_tokens = min(longest, chat.max_completion_tokens or longest)
    reading = Reading(server, chat)
    work = await chat_work(request, server, chat, reading, clip=True)
    work.jobs[0].drop_turns = True
    (choice,) = choices = await server.collect(work)
    raise_aborted(choices)
    reader = reading.reader()

    def whole() -> dict[str, Any]:
        summary = "".join(piece.text for piece in reader.read(choice) if piece.kind == CONTENT)
        kept = [listed(item) for item in items if item.get("role") == "user"]
        item = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": sealed(summary)}
        return {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*kept, item],
            "usage": usage_object(choice.usage, reader.reasoning_tokens),
        }

    return await answered(request, answer_size(choices, work), whole)

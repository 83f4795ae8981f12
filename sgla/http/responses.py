"""POST /v1/responses, and what can be asked about the responses that are stored."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from sgla.errors import ContextTooLong, NotFound, Overloaded, SglaError
from sgla.http import sse
from sgla.http.collect import Choice, Collector
from sgla.http.errors import Busy
from sgla.http.intake import IGNORED_FIELDS, intake
from sgla.http.openai_chat import chat_work
from sgla.http.parts import Reader
from sgla.http.reading import Reading
from sgla.http.responses_input import (
    CLIENT_TOOLS,
    RESPONSES,
    Item,
    ResponsesRequest,
    chat_request,
    check_fields,
    custom_names,
    input_items,
    resolved,
)
from sgla.http.responses_output import OutputItems, new_id
from sgla.http.responses_store import ResponseStore, Stored
from sgla.http.server import PATH_ID, SERVER, Server, Work
from sgla.http.wire import encode, json_response
from sgla.messages import Event, Rejected, Usage

PREFIX = "/v1/responses"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class PreviousResponseNotFound(NotFound):
    code = "previous_response_not_found"


async def create(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    fields = await intake(request, RESPONSES)
    fields.model = server.model(fields.model)
    check_fields(fields)
    kinds = {str(tool.get("type")) for tool in fields.tools or [] if tool.get("type") not in CLIENT_TOOLS}
    request[IGNORED_FIELDS] += [f"tools.{kind}" for kind in sorted(kinds)]
    store = server.responses
    own = [{"id": new_id("item"), **item} for item in resolved(input_items(fields), store.item)]
    items = [*earlier(store, fields.previous_response_id), *own]
    chat = chat_request(fields, items)
    reading = Reading(server, chat)
    work = chat_work(request, server, chat, reading)
    answer = Answer(fields, reading.reader(), store.limit > 0)
    sink = None if fields.stream else server.start(work)
    if answer.response["store"]:
        answer.keep(
            store, Stored(response=answer.response, input=own, items=items, uid=work.uid, size=work.size)
        )
    if sink is None:
        return await stream(request, server, work, answer)
    running = finish(server, work, sink, answer)
    if fields.background:
        server.spawn(running)
    elif error := await running:
        answer.forget()
        raise error
    return json_response(answer.response)


def earlier(store: ResponseStore, uid: str | None) -> list[Item]:
    """The conversation that the request goes on with."""
    if uid is None:
        return []
    entry = store.get(uid)
    if entry is None:
        raise PreviousResponseNotFound(
            f"there is no stored response {uid[:200]!r}; responses are kept for a while and up to a number",
            param="previous_response_id",
        )
    if entry.uid is not None:
        raise Busy(f"response {uid!r} is still in progress", param="previous_response_id")
    return entry.items


async def stream(request: web.Request, server: Server, work: Work, answer: Answer) -> web.StreamResponse:
    try:
        return await sse.stream(request, server, work, ResponseStream(answer))
    except SglaError:
        answer.forget()
        raise
    finally:
        answer.cancel()


async def finish(server: Server, work: Work, sink: Collector, answer: Answer) -> SglaError | None:
    """Wait for the end of a request; returns the error that it ended with."""
    try:
        (choice,) = await server.wait(work, sink)
        answer.take(choice)
    except SglaError as error:
        answer.fail(error)
        return error
    finally:
        answer.cancel()
    return None


# stored responses -----------------------------------------------------------------------------------------------------


def find(request: web.Request) -> Stored:
    uid = request[PATH_ID]
    entry = request.app[SERVER].responses.get(uid)
    if entry is None:
        raise ResponseNotFound(f"there is no stored response {uid[:200]!r}")
    return entry


async def retrieve(request: web.Request) -> web.Response:
    return json_response(find(request).response)


async def delete(request: web.Request) -> web.Response:
    entry = find(request)
    request.app[SERVER].responses.delete(entry.response["id"])
    return json_response({"id": entry.response["id"], "object": "response", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """End a response that is still in progress; one that has ended stays as it is."""
    entry = find(request)
    if entry.uid is not None:
        request.app[SERVER].abort(entry.uid)
        for _ in range(100):  # whoever runs it sees the end in the loop's next turns
            if entry.uid is None:
                break
            await asyncio.sleep(0)
    return json_response(entry.response)


async def input_list(request: web.Request) -> web.Response:
    """What the request sent, newest first as OpenAI lists it, or oldest first with ``order=asc``."""
    items = [listed(item) for item in find(request).input]
    if request.query.get("order") != "asc":
        items = items[::-1]
    ids = [item["id"] for item in items] or [None]
    return json_response(
        {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
    )


def listed(item: Item) -> Item:
    """An item in its long form."""
    content = item.get("content")
    if not isinstance(content, str):
        return item
    form = (
        {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
    )
    return {"type": "message", **item, "content": [{**form, "text": content}]}


# the answer -----------------------------------------------------------------------------------------------------------


class Answer:
    """One response in the making. ``response`` is the object that clients see, and what the store keeps."""

    def __init__(self, fields: ResponsesRequest, reader: Reader, may_store: bool) -> None:
        self.response = response_object(fields, may_store)
        self._reader = reader
        seal = "reasoning.encrypted_content" in (fields.include or [])
        self._output = OutputItems(custom_names(fields), seal)
        self._store: ResponseStore | None = None
        self._entry: Stored | None = None

    def keep(self, store: ResponseStore, entry: Stored) -> None:
        """Have the response found in ``store`` from now on."""
        self._store, self._entry = store, entry
        store.put(entry)

    def forget(self) -> None:
        """The client gets an error instead, and never knows the response's id."""
        if self._store is not None:
            self._store.delete(self.response["id"])

    @property
    def ended(self) -> bool:
        return self.response["status"] != "in_progress"

    def take(self, event: Event | Choice) -> list[dict[str, Any]]:
        """The events of the next piece of text; the last one ends the response."""
        events = self._output.take(self._reader.read(event))
        if event.finish is None:
            return events
        events += self._output.close("completed" if event.finish == "stop" else "incomplete")
        self.response["usage"] = usage_object(event.usage, self._reader.reasoning_tokens)
        if event.finish == "stop":
            self._end("completed", completed_at=int(time.time()))
            return [*events, self.whole("response.completed")]
        if event.finish == "length":
            self._end("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            self._end("cancelled")
        return [*events, self.whole("response.incomplete")]

    def fail(self, error: SglaError | Rejected) -> dict[str, Any]:
        if not self.ended:
            self._output.close("incomplete")
            self._end("failed", error={"code": error_code(error), "message": error.message})
        return self.whole("response.failed")

    def cancel(self) -> None:
        """Nobody waits for the rest; no effect on a response that has ended."""
        if not self.ended:
            self._output.close("incomplete")
            self._end("cancelled")

    def whole(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "response": self.response}

    def _end(self, status: str, **fields: Any) -> None:
        self.response.update(status=status, output=self._output.items, **fields)
        if self._entry is not None and self._store is not None:
            self._entry.uid = None
            self._entry.items = [*self._entry.items, *self._output.items]
            self._store.grow(self._entry, len(encode(self._output.items)))


def response_object(fields: ResponsesRequest, may_store: bool) -> dict[str, Any]:
    """The response before its first item."""
    text, reasoning = fields.text, fields.reasoning
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(fields.background),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": fields.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "store": may_store and fields.store is not False,
        "temperature": fields.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_p": fields.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def usage_object(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_code(error: SglaError | Rejected) -> str:
    """The codes of failed responses that clients know."""
    if error.code == ContextTooLong.code:
        return error.code
    if error.status == Overloaded.status:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


class ResponseStream(sse.Encoder):
    """Events -> typed events with sequence numbers."""

    done = b""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._number = 0

    def begin(self) -> bytes:
        whole = self._answer.whole
        return self._blocks([whole("response.created"), whole("response.in_progress")])

    def encode(self, event: Event) -> bytes:
        return self._blocks(self._answer.take(event))

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: Rejected | SglaError) -> bytes:
        return self._blocks([self._answer.fail(error)])

    def _blocks(self, events: list[dict[str, Any]]) -> bytes:
        data = b""
        for event in events:
            kind = event["type"].encode()
            data += b"event: %b\ndata: %b\n\n" % (kind, encode({**event, "sequence_number": self._number}))
            self._number += 1
        return data

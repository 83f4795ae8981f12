"""POST /v1/responses, and what can be asked about the responses that are stored."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import (
    BadRequest,
    ContextTooLong,
    InvalidField,
    NotFound,
    Overloaded,
    SglaError,
    StorageFailed,
)
from sgla.http.answer import sse
from sgla.http.answer.collect import Collector
from sgla.http.answer.parts import Reader
from sgla.http.answer.reading import Reading
from sgla.http.bodies import SHARE, Share
from sgla.http.clients import CLIENT
from sgla.http.conversations.store import Turn
from sgla.http.openai.chat import chat_work
from sgla.http.request.intake import intake
from sgla.http.request.paging import page, page_of
from sgla.http.request.schema import MAX_REPEATED, ChatRequest
from sgla.http.responses import mcp
from sgla.http.responses.agent import Agent
from sgla.http.responses.background import Recorder
from sgla.http.responses.conversation import (
    Context,
    Slices,
    conversation_id,
    decoded,
    gather,
    in_conversation,
    to_keep,
)
from sgla.http.responses.input import (
    NONE,
    RESPONSES,
    Remote,
    ResponsesRequest,
    chat_request,
    check_fields,
    tool_names,
)
from sgla.http.responses.items import kept, listed
from sgla.http.responses.output import OutputItems, new_id
from sgla.http.responses.store import END, Found, Place, ResponseStore, Stored
from sgla.http.server import PATH_ID, SERVER, Server, Work, check_logprobs
from sgla.http.state.shelf import UNREAD
from sgla.http.wire import encode, json_response
from sgla.messages import Event, Rejected, TokenLogprob, Usage
from sgla.text.logprobs import chat_logprobs
from sgla.text.tools.cursor import CONTENT, Piece

PREFIX = "/v1/responses"
SHOWN = 75  # bytes of a logprob as JSON


class ResponseNotFound(NotFound):
    code = "response_not_found"


async def create(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    fields = await intake(request, RESPONSES)
    fields.model = server.model(fields.model)
    check_fields(fields)
    stored = server.responses.limit > 0 and fields.store is not False
    if fields.background and not stored:
        raise InvalidField(
            "background: this server stores no responses (--response-store 0)", param="background"
        )
    context = await gather(
        fields,
        (server.responses, server.conversations),
        request[CLIENT],
        server.config.max_body_bytes,
        request[SHARE],
        answered=True,
    )
    try:
        return await respond(request, fields, context, stored)
    finally:
        context.close()


async def respond(
    request: web.Request, fields: ResponsesRequest, context: Context, stored: bool
) -> web.StreamResponse:
    server, store, share = request.app[SERVER], request.app[SERVER].responses, request[SHARE]
    items = [*context.past, *context.own]
    offers = await mcp.offers(fields, server.tools)
    approved = mcp.approved(items, offers)
    remote = {label: offer.functions() for label, offer in offers.items()}
    chat = chat_request(fields, items, remote)
    reading = Reading(server, chat)
    work = await chat_work(request, server, chat, reading)
    check_logprobs(work.jobs, server.ingress.facts, MAX_REPEATED)
    work.jobs[0].drop_turns = fields.truncation == "auto"
    answer = Answer(fields, reading.reader(), stored, logprobs_of(server, chat), context.turn, remote)
    if context.turn is not None:
        context.turn.asked = await to_keep(context.to_converse(), share)
    entry = Stored(
        id=answer.response["id"],
        client=request[CLIENT],
        asked=await to_keep(context.own, share) if stored else [],
        place=context.place or Place(),
        conversation="" if context.turn is None else context.turn.uid,
        uid=work.uid,
        live=answer.response,
    )
    sink: Taker | Recorder | Agent | None = None
    if offers:
        sink = Agent(server, work, share, fields, chat, answer, offers)
        if fields.stream:
            encoder = ResponseStream(answer)
            sink.recorder = Recorder(encoder, partial(store.grown, entry))
            sink.blocks = encoder.blocks
            entry.recorder = sink.recorder if fields.background else None
        told = {
            item.get("server_label")
            for item in items
            if item.get("type") == "mcp_list_tools" and item.get("tools")
        }
        sink.start(approved, [offer for offer in offers.values() if offer.label not in told])
    elif not fields.stream:
        sink = Taker(answer, share)
    elif fields.background:
        sink = entry.recorder = Recorder(ResponseStream(answer), partial(store.grown, entry), share)
    if sink is not None and not isinstance(sink, Agent):
        server.open(work, sink)
    context.turn = None  # it is the answer's
    if stored:
        context.place = None  # it is the entry's
        answer.keep(store, entry)
    if sink is None:
        return await stream(request, work, answer, entry)
    if fields.background:
        return await in_background(request, work, answer, entry, sink)
    if fields.stream:
        assert isinstance(sink, Agent)
        return await stream_turns(request, work, answer, entry, sink)
    if (error := await finish(server, work, sink, answer)) and not answer.called:
        answer.forget()
        raise error
    await store.settled(request[CLIENT])
    return shown(entry)


async def stream(request: web.Request, work: Work, answer: Answer, entry: Stored) -> web.StreamResponse:
    server = request.app[SERVER]
    try:
        if answer.response["store"]:
            server.responses.begin(entry)
        response = await sse.stream(request, server, work, ResponseStream(answer))
    except SglaError:
        answer.forget()
        raise
    finally:
        answer.cancel()
    await server.responses.settled(request[CLIENT])
    return response


async def stream_turns(
    request: web.Request, work: Work, answer: Answer, entry: Stored, agent: Agent
) -> web.StreamResponse:
    """``stream`` of many turns, which is recorded, since the answer cannot wait for a slow reader."""
    server = request.app[SERVER]
    assert agent.recorder is not None
    running = asyncio.ensure_future(agent.run())
    try:
        if answer.response["store"]:
            server.responses.begin(entry)
        await sse.first_message(server, work, agent.wake)
        if agent.rejected is not None and not answer.called:
            raise SglaError.from_rejected(agent.rejected)
        response = await agent.recorder.play(request)
    except SglaError:
        answer.forget()
        raise
    finally:
        running.cancel()
    await server.responses.settled(request[CLIENT])
    return response


async def in_background(
    request: web.Request, work: Work, answer: Answer, entry: Stored, sink: Taker | Recorder | Agent
) -> web.StreamResponse:
    server, share = request.app[SERVER], request[SHARE]
    entry.stop = partial(server.end, work.uid)
    queued = shown(entry)
    # The memory is held until the response has ended and nobody reads it, not as long as its request.
    request[SHARE] = Share(server.budget, request[CLIENT].name)
    recorder = entry.recorder
    done = share.close if recorder is None else partial(recorder.when_unread, share.close)
    server.spawn(finish(server, work, sink, answer), done)
    with nullcontext() if recorder is None else recorder.reader():
        try:
            await server.responses.put(entry)
        except StorageFailed:
            server.end(work.uid)
            answer.forget()
            raise
        return queued if recorder is None else await recorder.play(request)


class Taker(Collector):
    """A sink that has its answer take what comes at once, so that a long one is not read in one go."""

    def __init__(self, answer: Answer, share: Share) -> None:
        super().__init__(1, share)
        self._answer = answer

    def _hold(self, event: Event) -> None:
        if event.logprobs:
            self._due += SHOWN * len(event.logprobs) * (1 + len(event.logprobs[-1].top))
        try:
            self._answer.start()
            self._answer.take(event)
        except Exception as error:  # a bug here must not reach the actor that serves all requests
            self.done.set_exception(error)

    def abort(self) -> None:
        self.push(Event(rid="", index=0, finish="abort", usage=self._answer.used))


async def finish(
    server: Server, work: Work, sink: Taker | Recorder | Agent, answer: Answer
) -> SglaError | None:
    """Wait for the end of a request; returns the error that it ended with, which a stream has told."""
    if isinstance(sink, Agent):
        return await sink.run()
    try:
        if isinstance(sink, Taker):
            await server.wait(work, sink)
        else:
            await sink.ended.wait()
    except SglaError as error:
        answer.fail(error)
        return error
    finally:
        server.close(work)
        answer.cancel()
    return None


# stored responses -----------------------------------------------------------------------------------------------------


def not_found(uid: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no stored response {uid[:200]!r}")


async def find(request: web.Request) -> Stored | Found:
    uid, client = request[PATH_ID], request[CLIENT]
    store = request.app[SERVER].responses
    entry = store.live(uid, client.owner) or await store.find(uid, client)
    if entry is None:
        raise not_found(uid)
    return entry


def shown(entry: Stored) -> web.Response:
    return web.Response(body=entry.shown(), content_type="application/json")


def shown_again(request: web.Request, entry: Stored | Found) -> web.Response:
    if isinstance(entry, Stored):
        response = shown(entry)
        assert isinstance(response.body, bytes)
        request[SHARE].take(len(response.body))
        return response
    request[SHARE].take(len(entry.row.json))
    return web.Response(body=entry.row.json, content_type="application/json")


async def retrieve(request: web.Request) -> web.StreamResponse:
    """The response; with ``stream=true`` its events, those after number ``starting_after`` if that is given."""
    entry = await find(request)
    if request.query.get("stream") != "true":
        return shown_again(request, entry)
    if not (entry.streamed if isinstance(entry, Found) else entry.recorder):
        raise BadRequest(
            "only a response that was made with background: true and stream: true can be streamed again"
        )
    after = request.query.get("starting_after", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise InvalidField("starting_after must be a sequence number", param="starting_after")
    if isinstance(entry, Found):
        return await play_again(request, entry, int(after) + 1)
    assert entry.recorder is not None
    return await entry.recorder.play(request, int(after) + 1)


async def play_again(request: web.Request, entry: Found, start: int) -> web.StreamResponse:
    """Stream the events from number ``start`` on of a response that has ended. If it was lost, the last one says so."""
    request[SHARE].take(len(entry.row.json) + UNREAD)
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    async for data in request.app[SERVER].responses.events(request[CLIENT], entry, start):
        start += data.count(END)
        await response.write(data)
    if entry.lost:
        failed = {"type": "response.failed", "response": msgspec.Raw(entry.row.json)}
        await response.write(event_block(failed, start))
    return response


async def delete(request: web.Request) -> web.Response:
    uid = request[PATH_ID]
    if not await request.app[SERVER].responses.delete(uid, request[CLIENT]):
        raise not_found(uid)
    return json_response({"id": uid, "object": "response", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """End a response that is still in progress; one that has ended stays as it is."""
    entry = await find(request)
    if isinstance(entry, Stored) and entry.uid is not None:
        request.app[SERVER].end(entry.uid)
        for _ in range(100):  # whoever runs it sees the end in the loop's next turns
            if entry.uid is None:
                break
            await asyncio.sleep(0)
        await request.app[SERVER].responses.settled(entry.client)
    return shown_again(request, entry)


async def input_list(request: web.Request) -> web.Response:
    """A page of what the request sent: newest first as OpenAI lists it, or oldest first with ``order=asc``."""
    limit, ascending = page_of(request)
    uid, client, share = request[PATH_ID], request[CLIENT], request[SHARE]
    store, after = request.app[SERVER].responses, request.query.get("after")
    if (entry := store.live(uid, client.owner)) is not None:
        await store.put(entry)
    found = await store.page(uid, client, limit, after, ascending)
    if found is None:
        raise not_found(uid)
    rows, more = found
    share.take(sum(len(item.json) for item in rows))
    slices = Slices()
    items = [listed(await decoded(item.json, share, slices)) for item in rows]
    return page([msgspec.Raw(encode(item)) for item in items], [item["id"] for item in items], more)


# the answer -----------------------------------------------------------------------------------------------------------


class Answer:
    """One response in the making. ``response`` is the object that clients see, and what the store keeps."""

    def __init__(
        self,
        fields: ResponsesRequest,
        reader: Reader,
        may_store: bool,
        logprobs: Callable[[list[TokenLogprob]], list[Any]] | None = None,
        turn: Turn | None = None,
        remote: Remote = NONE,
    ) -> None:
        """``logprobs`` shows those of tokens, if they are asked for. ``turn``: the response's in a conversation. ``remote``: functions of
        MCP servers."""
        self.response = response_object(fields, may_store)
        self._turn = turn
        self._reader = reader
        self._show_logprobs = logprobs
        self._tokens = 0  # read
        self._usage, self._before = Usage(), Usage()  # in this turn of the model, and in those before
        self._thought = 0  # tokens of reasoning in turns before
        self._held: list[TokenLogprob] = []  # of tokens whose text has not come
        seal = "reasoning.encrypted_content" in (fields.include or [])
        self.output = OutputItems(tool_names(fields, remote), seal)
        self._store: ResponseStore | None = None
        self._entry: Stored | None = None

    def keep(self, store: ResponseStore, entry: Stored) -> None:
        """Have the response found in ``store`` from now on."""
        self._store, self._entry = store, entry
        store.open(entry)

    def forget(self) -> None:
        """The client gets an error instead, and never knows the response's id."""
        if self._store is not None and self._entry is not None:
            self._store.drop(self._entry)

    @property
    def ended(self) -> bool:
        return self.response["status"] not in ("queued", "in_progress")

    @property
    def used(self) -> Usage:
        """By all turns of the model."""
        before, usage = self._before, self._usage
        return Usage(
            before.prompt_tokens + usage.prompt_tokens,
            before.completion_tokens + usage.completion_tokens,
            before.cached_tokens + usage.cached_tokens,
        )

    @property
    def called(self) -> bool:
        """Whether this server has called a tool, which nobody can take back."""
        return any(item["type"] == "mcp_call" for item in self.output.items)

    def start(self) -> bool:
        """A response that was queued is in progress now; False for one that was before."""
        queued = bool(self.response["status"] == "queued")
        if queued:
            self.response["status"] = "in_progress"
        return queued

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The events of the next piece of text; the last one ends the response."""
        events = self.read(event)
        return events if event.finish is None else [*events, *self.finish(event.finish)]

    def read(self, event: Event) -> list[dict[str, Any]]:
        """The events of the next piece of text; the last one ends the turn of the model, which others may follow."""
        self._usage = event.usage
        pieces = self._reader.read(event)
        events = self.output.take(pieces, self._logprobs(event, pieces))
        if event.finish is not None:
            events += self.output.close("completed" if event.finish == "stop" else "incomplete")
        return events

    def again(self, reader: Reader) -> None:
        """Another turn follows."""
        self._before, self._usage = self.used, Usage()
        self._thought += self._reader.reasoning_tokens
        self._reader, self._tokens, self._held = reader, 0, []

    def finish(self, finish: str) -> list[dict[str, Any]]:
        """The events that end the response."""
        self.response["usage"] = usage_object(self.used, self._thought + self._reader.reasoning_tokens)
        if finish == "stop":
            self._end("completed", completed_at=int(time.time()))
            return [self.whole("response.completed")]
        events = self.output.close("incomplete")
        if finish in ("length", "repetition"):
            self._end("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            self._end("cancelled")
        return [*events, self.whole("response.incomplete")]

    def _logprobs(self, event: Event, pieces: list[Piece]) -> list[Any]:
        """What the text among ``pieces`` is shown with. Tokens of reasoning and of calls are left out."""
        if self._show_logprobs is None:
            return []
        thought = max(0, self._reader.reasoning_tokens - self._tokens)
        self._tokens += len(event.tokens)
        self._held += (event.logprobs or [])[thought:]
        if not pieces:
            return []
        held, self._held = self._held, []
        return self._show_logprobs(held) if any(piece.kind == CONTENT for piece in pieces) else []

    def fail(self, error: SglaError | Rejected) -> dict[str, Any]:
        if not self.ended:
            self.output.close("incomplete")
            self._end("failed", error={"code": error_code(error), "message": error.message})
        return self.whole("response.failed")

    def cancel(self) -> None:
        """Nobody waits for the rest; no effect on a response that has ended."""
        if not self.ended:
            self.output.close("incomplete")
            self._end("cancelled")

    def whole(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "response": self.response}

    def _end(self, status: str, **fields: Any) -> None:
        self.response.update(status=status, output=self.output.items, **fields)
        if self._entry is not None and self._store is not None:
            self._store.end(self._entry, self.output.items)
        if self._turn is not None:
            ended = status in ("completed", "incomplete")
            self._turn.end([kept(in_conversation(item)) for item in self.output.items] if ended else None)


def logprobs_of(server: Server, chat: ChatRequest) -> Callable[[list[TokenLogprob]], list[Any]] | None:
    """How to show logprobs; None where nobody asks. As JSON, since they are shown more than once."""
    if not chat.logprobs:
        return None
    tokenizer = server.ingress.tokenizer
    return lambda entries: [msgspec.Raw(encode(entry)) for entry in chat_logprobs(tokenizer, entries)]


def response_object(fields: ResponsesRequest, may_store: bool) -> dict[str, Any]:
    """The response before its first item."""
    text, reasoning = fields.text, fields.reasoning
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if fields.background else "in_progress",
        "background": bool(fields.background),
        "conversation": None if (uid := conversation_id(fields)) is None else {"id": uid},
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
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
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
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
        whole, status = self._answer.whole, self._answer.response["status"]
        return self.blocks([whole("response.created"), whole(f"response.{status}")])

    def encode(self, event: Event) -> bytes:
        started = [self._answer.whole("response.in_progress")] if self._answer.start() else []
        return self.blocks([*started, *self._answer.take(event)])

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: Rejected | SglaError) -> bytes:
        return self.blocks([self._answer.fail(error)])

    def blocks(self, events: list[dict[str, Any]]) -> bytes:
        data = b""
        for event in events:
            data += event_block(event, self._number)
            self._number += 1
        return data


def event_block(event: dict[str, Any], number: int) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode({**event, "sequence_number": number}))

"""POST /v1/responses, and what can be asked about the responses that are stored."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import (
    BadRequest,
    InvalidField,
    NotFound,
    SglaError,
    StorageFailed,
)
from sgla.http import answer_types as to
from sgla.http.answer import sse
from sgla.http.answer.collect import Collector
from sgla.http.answer.encoder import HEADERS
from sgla.http.answer.reading import Reading
from sgla.http.bodies import SHARE, Share
from sgla.http.clients import CLIENT
from sgla.http.openai.chat import chat_work
from sgla.http.operation import EVENTS, operation
from sgla.http.request.intake import intake
from sgla.http.request.paging import page, page_of
from sgla.http.request.schema import MAX_REPEATED, ChatRequest
from sgla.http.request.work import limit_logprobs
from sgla.http.responses import mcp
from sgla.http.responses.agent import Agent
from sgla.http.responses.answer import Answer, ResponseStream, check_repeated, event_block
from sgla.http.responses.background import Recorder
from sgla.http.responses.conversation import (
    Context,
    Slices,
    decoded,
    gather,
    to_keep,
)
from sgla.http.responses.input import (
    RESPONSES,
    ResponsesRequest,
    chat_request,
    check_fields,
)
from sgla.http.responses.items import listed
from sgla.http.responses.store import END, Found, Place, Stored
from sgla.http.server import ASKED, PATH_ID, Server, Work
from sgla.http.state.shelf import UNREAD
from sgla.http.wire import encode, json_response
from sgla.messages import Event, TokenLogprob
from sgla.text.logprobs import chat_logprobs

PREFIX = "/v1/responses"
SHOWN = 75  # bytes of a logprob as JSON


class ResponseNotFound(NotFound):
    code = "response_not_found"


@operation("OpenAI: answer items, and keep the response", ResponsesRequest, to.Response, stream=EVENTS)
async def create(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
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
    server, store, share = request[ASKED], request[ASKED].responses, request[SHARE]
    items = [*context.past, *context.own]
    offers = await mcp.offers(fields, server.tools)
    approved = mcp.approved(items, offers)
    remote = {label: offer.functions() for label, offer in offers.items()}
    chat = chat_request(fields, items, remote)
    reading = Reading(server, chat)
    work = await chat_work(request, server, chat, reading)
    limit_logprobs(work.jobs, server.ingress.facts, MAX_REPEATED)
    work.jobs[0].drop_turns = fields.truncation == "auto"
    answer = Answer(fields, reading.reader(), stored, logprobs_of(server, chat), context.turn, remote)
    check_repeated(answer.response, facts.context_len if (facts := server.ingress.facts) is not None else 0)
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
        sink = make_agent(request, fields, chat, work, answer, entry, offers)
        sink.start(approved, mcp.untold(offers, items))
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
    return await send(request, fields, work, answer, entry, sink)


def make_agent(
    request: web.Request,
    fields: ResponsesRequest,
    chat: ChatRequest,
    work: Work,
    answer: Answer,
    entry: Stored,
    offers: Mapping[str, mcp.Offer],
) -> Agent:
    """The sink of a response whose tools this server calls. Its events are recorded if they are streamed."""
    server = request[ASKED]
    agent = Agent(server, work, request[SHARE], fields, chat, answer, offers)
    if fields.stream:
        encoder = ResponseStream(answer)
        agent.recorder = Recorder(encoder, partial(server.responses.grown, entry))
        agent.blocks = encoder.blocks
        entry.recorder = agent.recorder if fields.background else None
    return agent


async def send(
    request: web.Request,
    fields: ResponsesRequest,
    work: Work,
    answer: Answer,
    entry: Stored,
    sink: Taker | Recorder | Agent | None,
) -> web.StreamResponse:
    """Answer with the response as it comes, with the queued one, or with the whole of it.
    None as ``sink``: it is streamed unrecorded."""
    if sink is None:
        return await stream(request, work, answer, entry)
    if fields.background:
        return await in_background(request, work, answer, entry, sink)
    if fields.stream:
        assert isinstance(sink, Agent)
        return await stream_turns(request, work, answer, entry, sink)
    server = request[ASKED]
    if (error := await finish(server, work, sink, answer)) and not answer.called:
        answer.forget()
        raise error
    await server.responses.settled(request[CLIENT])
    return shown(entry)


async def stream(request: web.Request, work: Work, answer: Answer, entry: Stored) -> web.StreamResponse:
    server = request[ASKED]
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
    server = request[ASKED]
    assert agent.recorder is not None
    running = asyncio.ensure_future(agent.run())
    try:
        if answer.response["store"]:
            server.responses.begin(entry)
        await sse.first_message(server, work, agent.wake)
        if agent.rejected is not None and not answer.called:
            raise SglaError.from_rejected(agent.rejected)
        response = await agent.recorder.play(request, server.config.sse_keepalive)
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
    server, share = request[ASKED], request[SHARE]
    entry.stop = partial(server.end, work.uid)
    queued = shown(entry) if entry.recorder is None else None
    # The memory is held until the response has ended and nobody reads it, not as long as its request.
    request[SHARE] = Share(server.memory, request[CLIENT].name)
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
        if recorder is not None:
            return await recorder.play(request, server.config.sse_keepalive)
        assert queued is not None
        return queued


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


# stored responses


def not_found(uid: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no stored response {uid[:200]!r}")


async def find(request: web.Request) -> Stored | Found:
    uid, client = request[PATH_ID], request[CLIENT]
    store = request[ASKED].responses
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


@operation(
    "OpenAI: a response that is kept", answer=to.Response, stream=EVENTS, query=("stream", "starting_after")
)
async def retrieve(request: web.Request) -> web.StreamResponse:
    """The response; with ``stream=true`` its events,
    those after number ``starting_after`` if that is given."""
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
    keepalive = request[ASKED].config.sse_keepalive
    return await entry.recorder.play(request, keepalive, int(after) + 1)


async def play_again(request: web.Request, entry: Found, start: int) -> web.StreamResponse:
    """Stream the events from number ``start`` on of a response that has ended.
    If it was lost, the last one says so."""
    request[SHARE].take(len(entry.row.json) + UNREAD)
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    async for data in request[ASKED].responses.events(request[CLIENT], entry, start):
        start += data.count(END)
        await response.write(data)
    if entry.lost:
        failed = {"type": "response.failed", "response": msgspec.Raw(entry.row.json)}
        await response.write(event_block(failed, start))
    return response


@operation("OpenAI: forget a response", answer=to.DeletedResponse)
async def delete(request: web.Request) -> web.Response:
    uid = request[PATH_ID]
    if not await request[ASKED].responses.delete(uid, request[CLIENT]):
        raise not_found(uid)
    return json_response({"id": uid, "object": "response", "deleted": True})


@operation("OpenAI: end a response in progress", answer=to.Response)
async def cancel(request: web.Request) -> web.Response:
    """End a response that is still in progress; one that has ended stays as it is."""
    entry = await find(request)
    if isinstance(entry, Stored) and entry.uid is not None:
        request[ASKED].end(entry.uid)
        for _ in range(100):  # whoever runs it sees the end in the loop's next turns
            if entry.uid is None:
                break
            await asyncio.sleep(0)
        await request[ASKED].responses.settled(entry.client)
    return shown_again(request, entry)


@operation("OpenAI: what a response was asked", answer=to.Items, query=("limit", "after", "order"))
async def input_list(request: web.Request) -> web.Response:
    """A page of what the request sent:
    newest first as OpenAI lists it, or oldest first with ``order=asc``."""
    limit, ascending = page_of(request)
    uid, client, share = request[PATH_ID], request[CLIENT], request[SHARE]
    store, after = request[ASKED].responses, request.query.get("after")
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


def logprobs_of(server: Server, chat: ChatRequest) -> Callable[[list[TokenLogprob]], list[Any]] | None:
    """How to show logprobs; None where nobody asks. As JSON, since they are shown more than once."""
    if not chat.logprobs:
        return None
    tokenizer = server.ingress.tokenizer
    return lambda entries: [msgspec.Raw(encode(entry)) for entry in chat_logprobs(tokenizer, entries)]

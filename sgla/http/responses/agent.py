"""Responses whose tools this server calls:
turn after turn of the model, and between them the calls to MCP servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from sgla import clock
from sgla.errors import BadRequest, DeadlineExceeded, SglaError
from sgla.http.answer.collect import weight
from sgla.http.answer.reading import Reading
from sgla.http.bodies import Share
from sgla.http.mcp.protocol import TOO_LARGE, TRANSPORT, Failure
from sgla.http.mcp.servers import ToolError
from sgla.http.openai.chat import chat_sampling
from sgla.http.request.chat import check_messages, text_messages
from sgla.http.request.schema import ChatRequest
from sgla.http.request.work import sampled
from sgla.http.responses.answer import Answer
from sgla.http.responses.background import Recorder
from sgla.http.responses.input import Item, ResponsesRequest, chat_messages
from sgla.http.responses.mcp import MAX_CALLS, Offer, error_object
from sgla.http.server import Server, Work, unique
from sgla.messages import Event, Rejected

log = logging.getLogger(__name__)

MAX_OUTPUTS = 4 << 20  # characters that they bring in all


class Agent:
    """The sink of all turns of one response. ``wake`` is set by the first message of the engine.

    ``recorder``, if the response is streamed: gets what ``blocks`` makes of its events.
    """

    def __init__(
        self,
        server: Server,
        work: Work,
        share: Share,
        fields: ResponsesRequest,
        chat: ChatRequest,
        answer: Answer,
        offers: Mapping[str, Offer],
    ) -> None:
        self.recorder: Recorder | None = None
        self.blocks: Callable[[list[Item]], bytes] | None = None
        self.wake = asyncio.Event()
        self.rejected: Rejected | None = None
        self._server = server
        self.work = work
        self._share = share
        self._chat = chat
        self._answer = answer
        self._offers = offers
        self._left = min(MAX_CALLS, MAX_CALLS if fields.max_tool_calls is None else fields.max_tool_calls)
        self._room = MAX_OUTPUTS
        self._shown = 0  # items of the answer that the model has read
        self._over: asyncio.Future[Event | Rejected] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._aborted = False

    def start(self, approved: list[Item], listed: list[Offer]) -> None:
        """Admit the first turn, before which the ``approved`` calls are made; ``listed``: whose tools the
        client is told of. Raises the SglaError that refuses it."""
        if approved:
            self._server.register(self.work, self)
        else:
            self._server.open(self.work, self)
        self._task = asyncio.ensure_future(self._turns(approved, listed))

    async def run(self) -> SglaError | None:
        """To the end of the last turn; returns the error that the response ended with."""
        assert self._task is not None
        try:
            await self._task
        except SglaError as error:
            return self._fail(error)
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            self._show(self._answer.finish("abort"))
        except Exception:
            log.exception("response %s failed", self._answer.response["id"])
            return self._fail(SglaError("internal error; the server's log has the details"))
        finally:
            self._server.close(self.work)
            self._answer.cancel()
            self.wake.set()
            if self.recorder is not None:
                self.recorder.add(b"", over=True)
        return None

    def _fail(self, error: SglaError) -> SglaError:
        event = self._answer.fail(error)
        with suppress(SglaError):  # without memory for it, the stream ends like this
            self._show([event])
        return error

    # from the engine, and from outside

    def push(self, message: Event | Rejected) -> None:
        if self._over.done():
            return
        self.wake.set()
        if isinstance(message, Rejected):
            self.rejected = message
            self._over.set_result(message)
            return
        try:
            self._share.take(weight(message))
            self._show(self._answer.read(message))
            if message.finish is not None:
                self._over.set_result(message)
        except SglaError as error:
            self._over.set_result(error.rejected(message.rid))
        except Exception as error:  # a bug here must not reach the actor that serves all requests
            self._over.set_exception(error)

    def abort(self) -> None:
        self._aborted = True
        if self._task is not None:
            self._task.cancel()

    def _show(self, events: list[Item]) -> None:
        if self._answer.start():
            events = [self._answer.whole("response.in_progress"), *events]
        if events and self.recorder is not None and self.blocks is not None:
            data = self.blocks(events)
            self._share.take(len(data))
            self.recorder.add(data)

    # turns

    async def _turns(self, approved: list[Item], listed: list[Offer]) -> None:
        output = self._answer.output
        for offer in listed:
            self._show(output.listed(offer.item()))
        self._shown = len(output.items)
        for request in approved:
            self._show(output.approved(request))
            await self._make_calls()
        if approved:
            await self._next_turn()
        while True:
            event = await self._over
            if isinstance(event, Rejected):
                raise SglaError.from_rejected(event)
            again = event.finish == "stop" and bool(output.due)
            if again:
                await self._make_calls()
            if not again or output.handed:
                break
            if not await self._next_turn():
                event.finish = "length"
                break
        assert event.finish is not None
        self._show(self._answer.finish(event.finish))

    async def _next_turn(self) -> bool:
        """Have the model go on with what the last turn and its calls brought;
        False if it may write no more."""
        answer, work = self._answer, self.work
        items = answer.output.items[self._shown :]
        self._shown = len(answer.output.items)
        longest = self._chat.max_completion_tokens
        if longest is not None:
            longest -= answer.used.completion_tokens
            if longest <= 0:
                return False
        said = chat_messages(None, items)
        messages = [*self._chat.messages, *(text_messages(said) if said else ())]
        check_messages(messages)
        self._chat.messages = messages
        chat = msgspec.structs.replace(self._chat, max_completion_tokens=longest)
        reading = self._reading(chat)
        (job,) = work.jobs
        rid = unique(work.uid)
        sampling = sampled(reading.sampling(chat_sampling(chat, self._server)))
        work.jobs = [msgspec.structs.replace(job, rid=rid, messages=messages, sampling=sampling)]
        answer.again(reading.reader())
        self._over = asyncio.get_running_loop().create_future()
        await self._in_time(self._server.ingress.room(work.jobs[0]))
        self._server.open(work, self)
        return True

    def _reading(self, chat: ChatRequest) -> Reading:
        """A call that had to be made has been made, so the model may answer now;
        it must once there are no calls left."""
        if chat.tools and chat.tool_choice != "none":
            chat.tool_choice = "auto" if self._left else "none"
        try:
            return Reading(self._server, chat)
        except BadRequest:  # a model whose calls are read only where it must make one
            chat.tool_choice = "none"
            return Reading(self._server, chat)

    async def _in_time(self, waiting: Any) -> None:
        """Raises DeadlineExceeded at the end of the request's own time."""
        try:
            async with asyncio.timeout(self._seconds()):
                await waiting
        except TimeoutError as error:
            raise DeadlineExceeded("the request's timeout has passed", param="timeout") from error

    def _seconds(self) -> float | None:
        deadline = self.work.jobs[0].deadline
        return None if deadline is None else max(0.0, deadline - clock.now())

    # calls

    async def _make_calls(self) -> None:
        """Those that are due, one after the other."""
        output = self._answer.output
        for place in list(output.due):
            try:
                text = await self._call(output.items[place])
            except ToolError as error:
                self._show(output.made(place, None, error_object(error.failure)))
            else:
                self._show(output.made(place, text, None))
            if self._seconds() == 0:
                raise DeadlineExceeded("the request's timeout has passed", param="timeout")
            await asyncio.sleep(0)  # a call that may not be made has not waited

    async def _call(self, item: Item) -> str:
        """Raises ToolError."""
        if not self._left:
            raise ToolError(Failure(TRANSPORT, 429, "no more calls may be made for this response"))
        self._left -= 1
        offer = self._offers[item["server_label"]]
        text = await offer.server.call(
            item["name"], item["arguments"], self.work.client.runs_as, self._seconds()
        )
        self._room -= len(text)
        if self._room < 0:
            self._room += len(text)
            told = (
                f"its output has {len(text)} characters, {self._room} are left for the calls of this response"
            )
            raise ToolError(Failure(TRANSPORT, TOO_LARGE, told))
        self._share.take(4 * len(text))
        return text

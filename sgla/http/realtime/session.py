"""GET /v1/realtime: a conversation over a WebSocket in OpenAI's events, in text."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from sgla.errors import BadRequest, InvalidField, SglaError, TooLarge
from sgla.http.answer.reading import Reading
from sgla.http.bodies import Share
from sgla.http.clients import CLIENT
from sgla.http.connections import set_resting
from sgla.http.errors import Busy, error_body
from sgla.http.openai.chat import chat_work
from sgla.http.operation import TEXT, operation
from sgla.http.realtime.events import (
    EVENTS,
    KINDS,
    ClientEvent,
    Item,
    ResponseWishes,
    SessionWishes,
    check_event,
    check_known,
    check_text,
    most_tokens,
    name_setting,
)
from sgla.http.request.intake import decoded
from sgla.http.responses.input import ResponsesRequest, chat_request, check_item
from sgla.http.responses.output import OutputItems, new_id
from sgla.http.server import ASKED, Server, Work
from sgla.http.wire import encode
from sgla.messages import Event, Rejected, Usage
from sgla.text.tools.cursor import REASONING

log = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 20  # bytes of an event
MAX_ITEMS = 1024  # of a conversation
IDLE_SECONDS = 900  # that a client may send nothing while nothing is made for it
PING_SECONDS = 30.0
CLOSE_SECONDS = 0.5  # that a client may take to answer the end of a session

SOCKETS: web.AppKey[set[web.WebSocketResponse]] = web.AppKey("sockets", set)


@operation("OpenAI: a conversation in text over a WebSocket", media=TEXT, query=("model",))
async def realtime(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    server.ingress.require_ready()
    model = server.model(request.query.get("model"))
    socket = web.WebSocketResponse(
        max_msg_size=MAX_MESSAGE,
        heartbeat=PING_SECONDS,
        protocols=("realtime",),
        compress=False,
        timeout=CLOSE_SECONDS,
        autoping=False,  # aiohttp would answer a flood of pings in one turn of the loop
    )
    if not socket.can_prepare(request).ok:
        raise BadRequest("this route is a WebSocket; connect with the header Upgrade: websocket")
    await socket.prepare(request)
    session = Session(request, socket, model)
    request.app[SOCKETS].add(socket)
    try:
        await session.run()
    except ConnectionError:
        pass  # the client has gone
    finally:
        request.app[SOCKETS].discard(socket)
        await session.close()
    return socket


async def close_all(app: web.Application) -> None:
    """For ``on_shutdown``: the server goes away."""
    sockets = app[SOCKETS].copy()
    await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in sockets))


class Inbox:
    """A sink that keeps what has come since it was last emptied, as one event."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._event: Event | None = None
        self._usage = Usage()
        self._rejected: Rejected | None = None

    def push(self, message: Event | Rejected) -> None:
        if isinstance(message, Event):
            self._usage = message.usage
        if isinstance(message, Rejected):
            self._rejected = message
        elif self._event is None:
            self._event = message
        else:
            self._event.merge(message)
        self._news.set()

    def abort(self) -> None:
        self.push(Event(rid="", index=0, finish="abort", usage=self._usage))

    async def next(self) -> Event:
        """Raises what refused or ended the request."""
        while self._event is None:
            if self._rejected is not None:
                raise SglaError.from_rejected(self._rejected)
            self._news.clear()
            await self._news.wait()
        event, self._event = self._event, None
        return event


class Session:
    """One connection: its settings and the items of its conversation in order,
    with the memory they take, and at most one response."""

    def __init__(self, request: web.Request, socket: web.WebSocketResponse, model: str) -> None:
        self._request = request
        self._server: Server = request[ASKED]
        self._socket = socket
        self._model = model
        self._uid = new_id("sess")
        self._conversation = new_id("conv")
        self._wishes = SessionWishes()
        self._held: dict[str, Share] = {}  # by setting
        self._items: dict[str, tuple[Item, Share]] = {}
        self._response: asyncio.Task[None] | None = None
        self._answering = ""  # the id of the response
        self._work: Work | None = None
        self._using: Share | None = None  # by the event that asked for the response

    async def run(self) -> None:
        """Answer events until the client goes away or says nothing for long."""
        set_resting(self._request, True)
        await self._send("session.created", session=self._settings())
        while True:
            await asyncio.sleep(0)  # what has arrived is received at once
            try:
                message = await self._socket.receive(timeout=IDLE_SECONDS)
            except TimeoutError:
                if self._busy():
                    continue
                return
            if message.type == WSMsgType.PING:
                await self._socket.pong(message.data)
            if message.type in (WSMsgType.PING, WSMsgType.PONG):
                continue
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            data = message.data.encode() if message.type == WSMsgType.TEXT else message.data
            event: ClientEvent | None = None
            share = self._share()
            try:
                share.take(len(data))
                share.body = len(data)
                event = await decoded(self._request, EVENTS, data, share)
                check_event(event)
                check_known(data)
                await self._handle(event, share)
            except SglaError as error:
                share.close()
                error.message = error.message.replace("the request body", "the event")
                name_setting(error, event)
                event_id = event and event.event_id
                await self._send("error", error={**error_body(error)["error"], "event_id": event_id})
            if all(kept is not share for kept in self._shares()):
                share.close()

    async def close(self) -> None:
        """End what is still made for the client."""
        if self._response is not None:
            self._response.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._response
        for share in self._shares():
            share.close()
        await self._socket.close()

    def _shares(self) -> list[Share]:
        """What stays when an event has been handled."""
        used = [] if self._using is None else [self._using]
        return [*self._held.values(), *used, *(share for _, share in self._items.values())]

    def _share(self) -> Share:
        return Share(self._server.memory, self._request[CLIENT].name)

    # events

    async def _handle(self, event: ClientEvent, share: Share) -> None:
        """``share`` has the event's memory; settings, items and a response that are kept keep it."""
        match event.type:
            case "session.update":
                await self._update(event, share)
            case "conversation.item.create":
                await self._add(wanted(event.item, "item"), event.previous_item_id, share)
            case "conversation.item.delete":
                uid = self._known(wanted(event.item_id, "item_id"))
                self._items.pop(uid)[1].close()
                await self._send("conversation.item.deleted", item_id=uid)
            case "conversation.item.retrieve":
                uid = self._known(wanted(event.item_id, "item_id"))
                await self._send("conversation.item.retrieved", item=self._items[uid][0])
            case "response.create":
                await self._respond(event.response or ResponseWishes(), share)
            case "response.cancel":
                self._cancel(event.response_id)
            case _:
                raise InvalidField(
                    f"there is no event {event.type[:100]!r}, but {', '.join(KINDS)}", param="type"
                )

    async def _update(self, event: ClientEvent, share: Share) -> None:
        """What the session's settings do not name stays as it is."""
        new = wanted(event.session, "session")
        check_text(new)
        most_tokens([new])
        given = {name: value for name, value in msgspec.structs.asdict(new).items() if value is not None}
        model = self._server.model(given.pop("model")) if "model" in given else self._model
        wishes = msgspec.structs.replace(self._wishes, **given)
        self._check_tools(wishes)
        self._model, self._wishes = model, wishes
        before = list(self._held.values())
        self._held |= dict.fromkeys(given, share)
        kept = self._shares()
        for old in before:
            if all(old is not each for each in kept):
                old.close()
        await self._send("session.updated", session=self._settings())

    def _check_tools(self, wishes: SessionWishes) -> None:
        """Raise BadRequest kinds for tools, or a choice of them, that no response could have. What must be
        called may come before the tools it is one of."""
        choice = wishes.tool_choice
        if wishes.tools or isinstance(choice, str):
            known = None if choice == "required" and not wishes.tools else choice
            fields = ResponsesRequest(tools=wishes.tools, tool_choice=known)
            Reading(self._server, chat_request(fields, [{"role": "user", "content": ""}], place="session"))

    async def _add(self, item: Item, behind: str | None, share: Share) -> None:
        """Put ``item`` behind the item with the id ``behind``: None: the last one; root: none."""
        check_item(item, "item")
        if len(self._items) >= MAX_ITEMS:
            raise InvalidField(f"the conversation has {MAX_ITEMS} items, which is the limit", param="item")
        uid = item.get("id") or new_id("item")
        if not isinstance(uid, str) or uid in self._items:
            raise InvalidField("item.id must be a string that no other item has", param="item")
        shown = {"status": "completed", **item, "id": uid, "object": "realtime.item"}
        names = list(self._items)
        place = (
            len(names)
            if behind is None
            else 0
            if behind == "root"
            else names.index(self._known(behind, "previous_item_id")) + 1
        )
        later = {name: self._items.pop(name) for name in names[place:]}
        self._items[uid] = (shown, share)
        self._items |= later
        before = names[place - 1] if place else None
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self._send(kind, item=shown, previous_item_id=before)

    def _known(self, uid: str, name: str = "item_id") -> str:
        if uid not in self._items:
            raise InvalidField(f"{name}: there is no item {uid[:100]!r}", param=name)
        return uid

    # responses

    def _busy(self) -> bool:
        return self._response is not None and not self._response.done()

    def _cancel(self, uid: str | None) -> None:
        if not self._busy() or uid not in (None, self._answering):
            raise InvalidField("there is no such response in progress", param="response_id")
        if self._work is not None:
            self._server.end(self._work.uid)

    async def _respond(self, wishes: ResponseWishes, share: Share) -> None:
        if self._busy():
            raise Busy(f"response {self._answering} is still in progress; cancel it or wait for its end")
        check_text(wishes)
        answer = Answer(self, wishes)
        items = self._asked_of(wishes)
        size = sum(kept.body for _, kept in items) + share.body
        limit = self._server.config.max_body_bytes
        if size > limit:
            raise TooLarge(
                f"the items of this response have {size} bytes, the limit is {limit}; delete old items, or "
                "start the server with a larger --max-body-bytes"
            )
        chat = answer.chat(self._wishes, [item for item, _ in items])
        chat.rid = answer.uid
        reading = Reading(self._server, chat)
        work = await chat_work(self._request, self._server, chat, reading)
        work.jobs[0].size = size
        self._answering = answer.uid
        inbox = Inbox()
        self._server.open(work, inbox)
        self._work, self._using = work, share
        set_resting(self._request, False)
        self._response = asyncio.ensure_future(self._answer(answer, work, reading, inbox))

    def _asked_of(self, wishes: ResponseWishes) -> list[tuple[Item, Share]]:
        """The items that a response is about, stored ones in place of their ids.
        Those of the event itself come with a share that is empty."""
        if wishes.input is None:
            return list(self._items.values())
        return [self._items.get(str(item.get("id")), (item, self._share())) for item in wishes.input]

    async def _answer(self, answer: Answer, work: Work, reading: Reading, inbox: Inbox) -> None:
        reader = reading.reader()
        try:
            await self._send("response.created", response=answer.shown())
            finish = None
            while finish is None:
                event = await inbox.next()
                finish = event.finish
                pieces = [piece for piece in reader.read(event) if piece.kind != REASONING]
                for fields in answer.output.take(pieces):
                    await self._progress(answer, fields)
                answer.usage = event.usage
            await self._end(answer, *ENDS[finish])
        except SglaError as error:
            await self._end(answer, "failed", {"type": "failed", "error": error_body(error)["error"]})
        except ConnectionError:
            pass
        except Exception:
            log.exception("response %s failed", answer.uid)
            await self._socket.close()
        finally:
            self._server.close(work)
            set_resting(self._request, True)
            if self._using is not None:
                self._using.close()
                self._using = None

    async def _end(self, answer: Answer, status: str, details: dict[str, Any] | None) -> None:
        for fields in answer.output.close("completed" if status == "completed" else "incomplete"):
            await self._progress(answer, fields)
        answer.status, answer.details = status, details
        await self._send("response.done", response=answer.shown())

    async def _progress(self, answer: Answer, fields: dict[str, Any]) -> None:
        """An event of the answer's items, and those of the conversation that come with it."""
        kind = fields.pop("type")
        if "part" in fields:
            fields["part"] = {"type": "text", "text": fields["part"]["text"]}
        if kind.startswith("response.function_call_arguments."):
            fields["call_id"] = answer.output.items[-1]["call_id"]
        if "item" in fields:
            fields["item"]["object"] = "realtime.item"
        await self._send(kind, response_id=answer.uid, **fields)
        if not answer.kept or "item" not in fields:
            return
        item, names = fields["item"], [name for name in self._items if name != fields["item"]["id"]]
        if kind == "response.output_item.done":
            share = self._share()
            share.body = len(encode(item))
            share.take(share.body)
            self._items[item["id"]] = (item, share)
        added = kind == "response.output_item.added"
        await self._send(
            f"conversation.item.{'added' if added else 'done'}",
            item=item,
            previous_item_id=names[-1] if names else None,
        )

    # the wire

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send_str(encode({"type": kind, "event_id": new_id("event"), **fields}).decode())

    def _settings(self) -> dict[str, Any]:
        wishes = self._wishes
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self._uid,
            "model": self._model,
            "output_modalities": ["text"],
            "instructions": wishes.instructions or "",
            "tools": wishes.tools or [],
            "tool_choice": wishes.tool_choice or "auto",
            "max_output_tokens": most_tokens([wishes]) or "inf",
            "temperature": wishes.temperature,
        }

    @property
    def model(self) -> str:
        return self._model

    @property
    def conversation(self) -> str:
        return self._conversation


CUT = ("incomplete", {"type": "incomplete", "reason": "max_output_tokens"})
# finish -> the status of a response, and its details
ENDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "stop": ("completed", None),
    "length": CUT,
    "repetition": CUT,
    "abort": ("cancelled", {"type": "cancelled", "reason": "client_cancelled"}),
}


class Answer:
    """One response in the making. ``kept``: its items become part of the conversation."""

    def __init__(self, session: Session, wishes: ResponseWishes) -> None:
        self.uid = new_id("resp")
        self.output = OutputItems()
        self.usage = Usage()
        self.status = "in_progress"
        self.details: dict[str, Any] | None = None
        self.kept = wishes.conversation != "none"
        self._session = session
        self._wishes = wishes

    def chat(self, settings: SessionWishes, items: list[Item]) -> Any:
        """The request as a chat. Raises BadRequest kinds."""
        wishes = self._wishes
        own = {
            name: getattr(wishes, name) for name in ("instructions", "tools", "tool_choice", "temperature")
        }
        own["parallel_tool_calls"] = wishes.parallel_tool_calls
        chosen = {name: getattr(settings, name) if value is None else value for name, value in own.items()}
        if not items and not chosen["instructions"]:
            raise InvalidField(
                "there is nothing to answer: create an item of the conversation, or send response.input",
                param="response.input",
            )
        most = most_tokens([wishes, settings])
        fields = ResponsesRequest(
            input=items, model=self._session.model, stream=True, max_output_tokens=most, **chosen
        )
        return chat_request(fields, items, place="conversation" if wishes.input is None else "response.input")

    def shown(self) -> dict[str, Any]:
        usage, ended = self.usage, self.status != "in_progress"
        return {
            "object": "realtime.response",
            "id": self.uid,
            "status": self.status,
            "status_details": self.details,
            "output": list(self.output.items) if ended else [],
            "conversation_id": self._session.conversation if self.kept else None,
            "output_modalities": ["text"],
            "max_output_tokens": most_tokens([self._wishes]) or "inf",
            "metadata": self._wishes.metadata,
            "usage": realtime_usage(usage) if ended else None,
        }


def realtime_usage(usage: Usage) -> dict[str, Any]:
    read, made = usage.prompt_tokens, usage.completion_tokens
    return {
        "total_tokens": read + made,
        "input_tokens": read,
        "output_tokens": made,
        "input_token_details": {"text_tokens": read, "audio_tokens": 0, "cached_tokens": usage.cached_tokens},
        "output_token_details": {"text_tokens": made, "audio_tokens": 0},
    }


def wanted(value: Any, name: str) -> Any:
    if value is None:
        raise InvalidField(f"{name} is required", param=name)
    return value

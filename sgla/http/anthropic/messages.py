"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, translated to chats and back."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from aiohttp import web

from sgla.errors import SglaError
from sgla.http import answer_types as to
from sgla.http.answer import sse
from sgla.http.answer.collect import Choice
from sgla.http.answer.encoder import Encoder
from sgla.http.answer.parts import Reader
from sgla.http.answer.reading import Reading
from sgla.http.answer.whole import answered
from sgla.http.anthropic.input import (
    COUNT_TOKENS,
    MESSAGES,
    CountTokensRequest,
    MessagesRequest,
    chat_request,
)
from sgla.http.errors import Aborted, error_headers
from sgla.http.ids import random_id
from sgla.http.lanes import beside
from sgla.http.media.parts import has_pictures
from sgla.http.native.tokens import MAX_CHARS, check_size, render
from sgla.http.openai.chat import chat_work
from sgla.http.openai.common import answer_size
from sgla.http.openai.render import prompt_length
from sgla.http.operation import EVENTS, operation
from sgla.http.request.intake import intake
from sgla.http.server import ABORTED, ASKED, Server, raise_aborted
from sgla.http.wire import encode, json_response
from sgla.messages import Event, Rejected, Usage
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece

PREFIX = "/v1/messages"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    408: "timeout_error",
    529: "overloaded_error",
}
STARTS = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


@operation("Anthropic: answer messages", MessagesRequest, to.Message, stream=EVENTS, any_model=True)
async def messages(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, MESSAGES)
    model = served_model(server, fields.model)
    chat = chat_request(fields)
    chat.model = model
    reading = Reading(server, chat, thinking_budget(fields))
    work = await chat_work(request, server, chat, reading, clip=True)
    answer = Answer(f"msg_{work.uid}", model, fields, reading.reader())
    if fields.stream:
        return await sse.stream(request, server, work, MessageStream(answer))
    choices = await server.collect(work)
    raise_aborted(choices)
    size = answer_size(choices, work)
    return await answered(request, size, lambda: answer.whole(choices[0]))


def thinking_budget(fields: CountTokensRequest) -> int | None:
    thinking = fields.thinking
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


@operation("Anthropic: the size of a prompt", CountTokensRequest, to.TokenCount, any_model=True)
async def count_tokens(request: web.Request) -> web.Response:
    """What the request would have as its prompt, in tokens; nothing is computed."""
    server = request[ASKED]
    fields = await intake(request, COUNT_TOKENS)
    served_model(server, fields.model)
    chat = chat_request(fields)
    if has_pictures(chat.messages):
        return json_response({"input_tokens": await prompt_length(request, chat)})
    tokenizer = server.ingress.tokenizer
    text = await render(request, server, chat)
    check_size("messages", [text], MAX_CHARS, "characters with the chat template")
    count = await beside(request, len(text), lambda: len(tokenizer.encoding(text, add_special_tokens=False)))
    return json_response({"input_tokens": count})


def served_model(server: Server, asked: str | None) -> str:
    """Claude's own names mean the first model: Anthropic's clients ask for some of them on their own."""
    if asked is not None and asked.startswith("claude") and asked not in server.ingress.model_names:
        asked = None
    return server.model(asked)


def error_object(error: SglaError | Rejected, rid: str) -> dict[str, Any]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_TYPES.get(wire_status(error), default)
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": rid}


def wire_status(error: SglaError | Rejected) -> int:
    """Anthropic's number for a server that cannot take requests now is 529."""
    return 529 if error.status == 503 else error.status


def error_response(error: SglaError, rid: str) -> web.Response:
    return json_response(error_object(error, rid), wire_status(error), error_headers(error))


def usage_object(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class Blocks:
    """Pieces -> content blocks, and the events that build them up at the client. At most one block is open.

    ``silent``: thinking blocks come without their text.
    """

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self.content: list[dict[str, Any]] = []
        self.called = False
        self._kind: str | None = None  # of the open block
        self._texts: list[str] = []

    def take(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for kind, text, call_id in pieces:
            if kind == CONTENT:
                events += self._text("text", {"type": "text_delta", "text": text})
            elif kind == REASONING and self._silent:
                events += self._text("thinking", None)
            elif kind == REASONING:
                events += self._text("thinking", {"type": "thinking_delta", "thinking": text})
            elif kind == CALL:
                self.called = True
                block = {"type": "tool_use", "id": tool_use_id(call_id), "name": text, "input": {}}
                events += [*self.close(), self._open("tool_use", block)]
            elif kind == ARGUMENTS:
                events.append(self._delta({"type": "input_json_delta", "partial_json": text}, text))
        return events

    def close(self) -> list[dict[str, Any]]:
        """End the open block, if there is one."""
        if self._kind is None:
            return []
        kind, text = self._kind, "".join(self._texts)
        self._kind, self._texts = None, []
        block = self.content[-1]
        events = []
        if kind == "text":
            block["text"] = text
        elif kind == "thinking":
            block |= {"thinking": text, "signature": signature(text)}
            events.append(self._event({"type": "signature_delta", "signature": block["signature"]}))
        else:
            block["input"] = call_input(text)
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _text(self, kind: str, delta: dict[str, str] | None) -> list[dict[str, Any]]:
        """A piece of a block of text, without an event of its own for None."""
        opened = [] if self._kind == kind else [*self.close(), self._open(kind, STARTS[kind])]
        return opened if delta is None else [*opened, self._delta(delta, delta[kind])]

    def _open(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._kind = kind
        self.content.append(dict(block))
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, str], text: str) -> dict[str, Any]:
        self._texts.append(text)
        return self._event(delta)

    def _event(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def tool_use_id(call_id: str | None) -> str:
    """An id that the model wrote stays as it is; others begin as Anthropic's do."""
    if call_id is None:
        return f"toolu_{random_id()}"
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def signature(thinking: str) -> str:
    """Clients send thinking back only with a signature; this server does not check it."""
    return hashlib.blake2s(thinking.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def call_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object;
    those that were cut off, as Anthropic's documentation says to send them back."""
    try:
        value = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


class Answer:
    """One message in the making: its blocks, and why and how it ends."""

    def __init__(self, uid: str, model: str, fields: CountTokensRequest, reader: Reader) -> None:
        self.uid = uid
        self._model = model
        self._max_tokens = fields.max_tokens
        self._reader = reader
        self._blocks = Blocks(silent=fields.thinking is not None and fields.thinking.display == "omitted")

    def head(self, usage: Usage) -> dict[str, Any]:
        """The message before its first block."""
        return {
            "id": self.uid,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
        }

    def take(self, event: Event | Choice) -> list[dict[str, Any]]:
        """The events of the blocks for the next piece of text."""
        events = self._blocks.take(self._reader.read(event))
        return events if event.finish is None else events + self._blocks.close()

    def stop(self, event: Event | Choice) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if event.finish == "length":
            full = self._max_tokens is None or event.usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif event.finish == "repetition":
            reason = "max_tokens"  # of what the API has, what says that the answer was cut
        elif self._blocks.called:
            reason = "tool_use"
        elif isinstance(event.matched, str):
            reason, sequence = "stop_sequence", event.matched
        return {"stop_reason": reason, "stop_sequence": sequence}

    def whole(self, choice: Choice) -> dict[str, Any]:
        self.take(choice)
        return {**self.head(choice.usage), "content": self._blocks.content, **self.stop(choice)}


class MessageStream(Encoder):
    """Events -> message_start, the blocks, message_delta, message_stop."""

    done = b""
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._started = False

    def encode(self, event: Event) -> bytes:
        data = b"" if self._started else self._start(event.usage)
        if event.finish == "abort":
            return data + self.error(Aborted(ABORTED))
        data += b"".join(map(block, self._answer.take(event)))
        if event.finish is None:
            return data
        end = {"type": "message_delta", "delta": self._answer.stop(event), "usage": usage_object(event.usage)}
        return data + block(end) + block({"type": "message_stop"})

    def _start(self, usage: Usage) -> bytes:
        self._started = True
        usage = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return block({"type": "message_start", "message": self._answer.head(usage)}) + self.ping

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: Rejected | SglaError) -> bytes:
        return block(error_object(error, self._answer.uid))


def block(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))

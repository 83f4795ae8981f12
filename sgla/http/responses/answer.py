"""One response in the making: the object that clients see, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from sgla.errors import ContextTooLong, Overloaded, SglaError, TooLarge
from sgla.http.answer.encoder import Encoder
from sgla.http.answer.parts import Reader
from sgla.http.conversations.store import Turn
from sgla.http.responses.conversation import conversation_id, in_conversation
from sgla.http.responses.input import NONE, Remote, ResponsesRequest, tool_names
from sgla.http.responses.items import kept
from sgla.http.responses.output import OutputItems, new_id
from sgla.http.responses.store import ResponseStore, Stored
from sgla.http.wire import encode, encode_into
from sgla.messages import Event, Rejected, TokenLogprob, Usage
from sgla.text.tools.cursor import CONTENT, Piece

# Bytes of a request that each event with the whole response repeats: ~1 ms, several times.
MAX_ECHOED = 1 << 20
BYTES_A_TOKEN = 8


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
        """``logprobs`` shows those of tokens, if they are asked for. ``turn``: the response's in a
        conversation. ``remote``: functions of MCP servers."""
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
        """The events of the next piece of text;
        the last one ends the turn of the model, which others may follow."""
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
        "instructions": once(fields.instructions),
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": once(fields.metadata or {}),
        "model": fields.model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "store": may_store and fields.store is not False,
        "temperature": fields.temperature,
        "text": {"format": once((text and text.format) or {"type": "text"})},
        "tool_choice": once(fields.tool_choice or "auto"),
        "tools": once(fields.tools or []),
        "top_p": fields.top_p,
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "usage": None,
    }


def check_repeated(response: dict[str, Any], context_len: int) -> None:
    """Raise TooLarge if each event with the response would repeat more than ``MAX_ECHOED`` bytes
    of the request, and more than instructions that fill the context."""
    named = [response[name] for name in ("instructions", "metadata", "tools", "tool_choice")]
    size = sum(memoryview(value).nbytes for value in (*named, response["text"]["format"]))
    most = max(MAX_ECHOED, BYTES_A_TOKEN * context_len)
    if size > most:
        raise TooLarge(
            "instructions, tools, tool_choice, text.format and metadata, which the response repeats, have "
            f"{size} bytes; {most} is the limit; send less"
        )


def once(value: Any) -> msgspec.Raw:
    """What the client may have made large: a response is written many times."""
    return msgspec.Raw(encode(value))


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


class ResponseStream(Encoder):
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
        data = bytearray()
        for event in events:
            add_block(data, event, self._number)
            self._number += 1
        return bytes(data)


def event_block(event: dict[str, Any], number: int) -> bytes:
    data = bytearray()
    add_block(data, event, number)
    return bytes(data)


def add_block(data: bytearray, event: dict[str, Any], number: int) -> None:
    """Large events are written once, where they are kept."""
    data += b"event: %b\ndata: " % event["type"].encode()
    encode_into({**event, "sequence_number": number}, data, -1)
    data += b"\n\n"

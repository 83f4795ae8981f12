"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer import sse
from sgla.http.answer.collect import Choice, total_usage
from sgla.http.answer.parts import Reader
from sgla.http.answer.reading import Reading
from sgla.http.answer.whole import answered, few, in_parts
from sgla.http.bodies import SHARE
from sgla.http.errors import Aborted
from sgla.http.openai import beams
from sgla.http.openai.common import (
    ChunkStream,
    LastStates,
    answer_size,
    check_logprob_ids,
    check_prompt_logprobs,
    check_stream_options,
    response_head,
    shown_prompt,
    stop_fields,
    truncation,
    usage_object,
    width,
)
from sgla.http.openai.functions import as_tools, old_delta, old_message
from sgla.http.operation import EVENTS, operation
from sgla.http.request.chat import checked_messages, prompt_flags, template_kwargs
from sgla.http.request.intake import intake
from sgla.http.request.sampling import first, sampling_params
from sgla.http.request.schema import ChatRequest, Schema, unsupported
from sgla.http.request.work import make_work
from sgla.http.server import ABORTED, ASKED, IGNORED_FIELDS, Server, Work, raise_aborted
from sgla.http.turns import MANY, pause
from sgla.http.wire import encode
from sgla.messages import Event, SamplingParams, TokenLogprob, Usage
from sgla.text.logprobs import chat_logprobs
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece

SCHEMA = Schema(ChatRequest)
ROLE = {"role": "assistant", "content": ""}


@operation("OpenAI: answer a chat", ChatRequest, to.ChatCompletion, stream=EVENTS)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    functions = as_tools(fields)
    reading = Reading(server, fields)
    work = await chat_work(request, server, fields, reading)
    search = beams.is_beam_search(fields)
    form = AnswerFormat(fields, work, server, functions)
    if fields.stream and not search:
        head = response_head("chatcmpl", work.uid, "chat.completion.chunk", model, server.fingerprint)
        return await sse.stream(request, server, work, ChatStream(head, fields, form, reading))
    if search and work.jobs[0].pictures:
        raise unsupported("use_beam_search", " beside pictures")
    if search:
        work, choices = await beams.collect(request, work, fields)
    else:
        choices = await server.collect(work)
        raise_aborted(choices)
    head = response_head("chatcmpl", work.uid, "chat.completion", model, server.fingerprint)
    size = answer_size(choices, work)
    return await answered(request, size, lambda: response(head, choices, work, form, reading), choices)


async def chat_work(
    request: web.Request, server: Server, fields: ChatRequest, reading: Reading, clip: bool = False
) -> Work:
    """The Work of a chat; other APIs translate their requests to a ChatRequest.
    Raises BadRequest kinds.

    ``clip``: an answer that the context has no room for ends there, instead of being refused.
    """
    check_fields(fields, server)
    generate, continues = prompt_flags(fields)
    if len(fields.messages) > MANY:
        await pause()
    fields.messages, sources = checked_messages(fields.messages)
    if len(fields.messages) > MANY:
        await pause()
    server.media.check(sources, server.ingress)
    request.setdefault(IGNORED_FIELDS, []).extend(name for source in sources for name in source.ignored)
    sizes = server.media.sizes(fields.mm_processor_kwargs, server.ingress)
    (pictures,) = await server.media.pictures([sources], server.ingress, request[SHARE], sizes)
    prompt = {
        "messages": fields.messages,
        "pictures": pictures,
        "media_kwargs": sizes,
        "tools": fields.tools or None,
        "template_kwargs": template_kwargs(fields, server.config.trust_request_chat_template),
        "add_generation_prompt": generate,
        "continue_final_message": continues,
        "clip": clip or first(fields.max_completion_tokens, fields.max_tokens) is None,
        **truncation(fields),
    }
    rid = first(fields.rid, fields.request_id)
    return await make_work(request, fields, [prompt], reading.sampling(chat_sampling(fields, server)), rid)


def check_fields(fields: ChatRequest, server: Server) -> None:
    check_stream_options(fields)
    check_prompt_logprobs(fields, server)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidField("top_logprobs needs logprobs: true", param="top_logprobs")
    check_logprob_ids(fields)
    if fields.add_special_tokens:
        raise unsupported("add_special_tokens", ": the chat template writes them")


def chat_sampling(fields: ChatRequest, server: Server) -> SamplingParams:
    return sampling_params(
        fields,
        server.sampling_defaults,
        max_tokens=first(fields.max_completion_tokens, fields.max_tokens),
        words=not fields.tools,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        logprob_token_ids=fields.logprob_token_ids,
        hidden_states=fields.return_hidden_states,
    )


def response(
    head: dict[str, Any], choices: list[Choice], work: Work, form: AnswerFormat, reading: Reading
) -> dict[str, Any]:
    readers = [reading.reader() for _ in choices]
    shown = [form.choice(choice, reader) for choice, reader in zip(choices, readers)]
    usage = total_usage(((choice.index, choice.usage) for choice in choices), work.n)
    whole = {**head, "choices": shown, "usage": usage_object(usage, thoughts(reading, readers))}
    return {**whole, "prompt_logprobs": None, "prompt_token_ids": None, **form.prompt(choices[0])}


def echoed(fields: ChatRequest) -> str:
    """With ``echo`` an answer begins with the last message, if that is the assistant's own (as vLLM)."""
    last = fields.messages[-1]
    if not fields.echo or last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def thoughts(reading: Reading, readers: Iterable[Reader]) -> int | None:
    return sum(reader.reasoning_tokens for reader in readers) if reading.dialect.reasoning else None


def message(pieces: list[Piece]) -> dict[str, Any]:
    """The assistant's message. Reasoning goes by both names that clients know."""
    content = "".join(piece.text for piece in pieces if piece.kind == CONTENT)
    reasoning = "".join(piece.text for piece in pieces if piece.kind == REASONING)
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind == CALL:
            function = {"name": piece.text, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        elif piece.kind == ARGUMENTS:
            calls[-1]["function"]["arguments"] += piece.text
    result: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if calls or reasoning else ""),
        "reasoning": None,
    }
    if reasoning:
        result |= reasoning_fields(reasoning)
    if calls:
        result["tool_calls"] = calls
    return result | {"refusal": None}


def reasoning_fields(text: str) -> dict[str, str]:
    """SGLang's name and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def finish_reason(finish: str | None, called: bool, functions: bool = False) -> str | None:
    if called and finish == "stop":
        return "function_call" if functions else "tool_calls"
    return finish


class AnswerFormat:
    """How the answer to one request shows calls, finish reasons, logprobs and token ids, by its fields."""

    def __init__(self, fields: ChatRequest, work: Work, server: Server, functions: bool) -> None:
        self.functions = functions  # calls go by their old name
        self.echo = echoed(fields)
        self.states = LastStates(work, server)
        self._sampling = work.jobs[0].sampling
        self.plain = self._sampling.logprobs is None and not self.states.wanted
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._token_ids = bool(fields.return_token_ids)
        self._tokenizer = server.ingress.tokenizer

    def choice(self, choice: Choice, reader: Reader) -> dict[str, Any]:
        shown = message(reader.read(choice))
        called = "tool_calls" in shown
        if self.echo:
            shown["content"] = self.echo + (shown["content"] or "")
        result = {
            "index": choice.index,
            "message": old_message(shown) if self.functions else shown,
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": finish_reason(choice.finish, called, self.functions),
            **self.stops(choice),
            **self.states.shown(choice),
        }
        return {**result, "token_ids": None, **self.token_ids(choice.tokens)}

    def stops(self, event: Event | Choice) -> dict[str, Any]:
        return stop_fields(event.finish, event.matched, self._sampling.stop_token_ids)

    def logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if self._sampling.logprobs is None or entries is None:
            return None
        content = in_parts(
            len(entries),
            lambda part: chat_logprobs(self._tokenizer, entries[part], self._as_ids),
            few(width(self._sampling)),
        )
        return {"content": content, "refusal": None}

    def prompt(self, choice: Choice | Event) -> dict[str, Any]:
        """vLLM's logprobs and ids of the prompt, if they are asked for; they stand beside the choices."""
        shown: dict[str, Any] = {}
        if self._sampling.prompt_logprobs is not None:
            shown["prompt_logprobs"] = shown_prompt(self._tokenizer, choice, self._sampling.prompt_logprobs)
        if self._token_ids and choice.prompt_tokens is not None:
            shown["prompt_token_ids"] = choice.prompt_tokens
        return shown

    def token_ids(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self._token_ids else {}


class ChoiceStream:
    """What is known of one choice while it streams."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.calls = 0
        self.tokens: list[int] = []  # that came with no piece yet
        self.logprobs: list[TokenLogprob] | None = None

    def deltas(self, event: Event) -> list[dict[str, Any]]:
        """What the next event adds to the message."""
        return [self._delta(piece) for piece in self.reader.read(event)]

    def hold(self, event: Event) -> None:
        """Tokens and logprobs go out together with the text that they belong to."""
        self.tokens += event.tokens
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs

    def release(self) -> tuple[list[int], list[TokenLogprob] | None]:
        tokens, self.tokens = self.tokens, []
        logprobs, self.logprobs = self.logprobs, None
        return tokens, logprobs

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind == CONTENT:
            return {"content": piece.text}
        if piece.kind == REASONING:
            return reasoning_fields(piece.text)
        if piece.kind == ARGUMENTS:
            return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece.text}}]}
        self.calls += 1
        call = {"id": piece.id, "type": "function", "function": {"name": piece.text, "arguments": ""}}
        return {"tool_calls": [{"index": self.calls - 1, **call}]}


class ChatStream(ChunkStream):
    """Events -> chat.completion.chunk. A choice's role chunk goes out together with its first content."""

    def __init__(
        self, head: dict[str, Any], fields: ChatRequest, form: AnswerFormat, reading: Reading
    ) -> None:
        super().__init__(head, fields, plain=form.plain and not reading.active)
        self._form = form
        self._reading = reading
        self._choices: dict[int, ChoiceStream] = {}  # of those that have sent their role
        self._text_heads: dict[int, bytes] = {}
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def usage(self, usage: Usage, index: int | None = None) -> dict[str, Any]:
        readers = [choice.reader for i, choice in self._choices.items() if index in (i, None)]
        return usage_object(usage, thoughts(self._reading, readers))

    def encode(self, event: Event) -> bytes:
        if self.plain and event.finish is None:
            if not event.text:
                return b""
            head = self._text_heads.get(event.index)
            if head is not None:
                return b"%b%b%b" % (head, encode(event.text), self._text_tail)
        data = b""
        self._form.states.keep(event)
        choice = self._choices.get(event.index)
        if choice is None:
            choice = self._choices[event.index] = ChoiceStream(self._reading.reader())
            data = self._role(event)
        choice.hold(event)
        deltas = choice.deltas(event)
        if not deltas and (event.finish is not None or not self._reading.active):
            deltas = [{"content": ""}] if choice.logprobs or (self._token_ids and choice.tokens) else []
        for delta in deltas:
            data += self._delta(event, choice, delta)
        return data if event.finish is None else data + self._finish(event, choice)

    def _role(self, event: Event) -> bytes:
        self._text_heads[event.index] = b'%b{"index":%d,"delta":{"content":' % (self._head, event.index)
        beside = self._form.prompt(event) if len(self._choices) == 1 else None
        role = self._chunk(event, ROLE, None, beside=beside)
        echo = self._form.echo
        return role + self._chunk(event, {"content": echo}, None) if echo else role

    def _delta(self, event: Event, choice: ChoiceStream, delta: dict[str, Any]) -> bytes:
        tokens, logprobs = choice.release()
        if self._form.functions:
            delta = old_delta(delta)
        extra = self._form.token_ids(tokens)
        return self._chunk(event, delta, self._form.logprobs(logprobs), extra=extra)

    def _finish(self, event: Event, choice: ChoiceStream) -> bytes:
        if event.finish == "abort":
            return self.error(Aborted(ABORTED))
        reason = finish_reason(event.finish, choice.calls > 0, self._form.functions)
        delta = self._form.states.shown(event)
        return self._chunk(event, delta, None, reason, self._form.stops(event))

    def _chunk(
        self,
        event: Event,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None = None,
        extra: dict[str, Any] | None = None,
        beside: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": event.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.chunk(choice | (extra or {}), event.usage, beside)

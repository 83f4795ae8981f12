"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import sse
from sgla.http.chat_input import checked_messages, prompt_flags, template_kwargs
from sgla.http.collect import Choice, total_usage
from sgla.http.errors import Aborted
from sgla.http.intake import intake
from sgla.http.openai_common import (
    ChunkStream,
    check_stream_options,
    response_head,
    stop_fields,
    usage_object,
)
from sgla.http.sampling import check_max_tokens, first, sampling_params
from sgla.http.schema import UNSUPPORTED, ChatRequest, Schema, unsupported
from sgla.http.server import ABORTED, SERVER, Server, Work, make_work, raise_aborted
from sgla.http.wire import encode, json_response
from sgla.messages import Event, SamplingParams, TokenLogprob
from sgla.text.logprobs import chat_logprobs

SCHEMA = Schema(ChatRequest)
ROLE = {"role": "assistant", "content": ""}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    work = chat_work(request, server, fields)
    tokenizer = server.ingress.tokenizer
    if fields.stream:
        head = response_head("chatcmpl", work.uid, "chat.completion.chunk", model, server.fingerprint)
        return await sse.stream(
            request, server, work, ChatStream(head, fields, work.jobs[0].sampling, tokenizer)
        )
    choices = await server.collect(work)
    raise_aborted(choices)
    head = response_head("chatcmpl", work.uid, "chat.completion", model, server.fingerprint)
    return json_response(response(head, choices, fields, work, tokenizer))


def chat_work(request: web.Request, server: Server, fields: ChatRequest, clip: bool = False) -> Work:
    """The engine's share of a chat; other APIs translate their requests to a ChatRequest. Raises BadRequest kinds.

    ``clip``: an answer that the context has no room for ends there, instead of being refused.
    """
    check_fields(fields)
    generate, continues = prompt_flags(fields)
    prompt = {
        "messages": checked_messages(fields.messages),
        "tools": fields.tools or None,
        "template_kwargs": template_kwargs(fields),
        "add_generation_prompt": generate,
        "continue_final_message": continues,
        "clip": clip,
    }
    rid = first(fields.rid, fields.request_id)
    return make_work(request, fields, [prompt], chat_sampling(fields, server), rid)


def check_fields(fields: ChatRequest) -> None:
    check_stream_options(fields)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidField("top_logprobs needs logprobs: true", param="top_logprobs")
    if fields.tool_choice not in UNSUPPORTED["tool_choice"]:
        raise unsupported("tool_choice", " other than 'none'")
    if fields.tools and fields.tool_choice != "none":  # shown to the model, but calls are not parsed
        raise unsupported("tools", " unless tool_choice is 'none'")
    if fields.add_special_tokens:
        raise unsupported("add_special_tokens", ": the chat template writes them")
    check_max_tokens("max_tokens", fields.max_tokens)


def chat_sampling(fields: ChatRequest, server: Server) -> SamplingParams:
    return sampling_params(
        fields,
        server.sampling_defaults,
        max_tokens=first(fields.max_completion_tokens, fields.max_tokens),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )


def response(
    head: dict[str, Any], choices: list[Choice], fields: ChatRequest, work: Work, tokenizer: Any
) -> dict[str, Any]:
    shapes = Shapes(fields, work.jobs[0].sampling, tokenizer)
    usage = total_usage(((choice.index, choice.usage) for choice in choices), work.n)
    return {**head, "choices": [shapes.choice(choice) for choice in choices], "usage": usage_object(usage)}


class Shapes:
    """What the fields of one request make of finish reasons, logprobs and token ids."""

    def __init__(self, fields: ChatRequest, sampling: SamplingParams, tokenizer: Any) -> None:
        self._as_ids = bool(fields.return_tokens_as_token_ids)
        self._token_ids = bool(fields.return_token_ids)
        self._sampling = sampling
        self._tokenizer = tokenizer

    def choice(self, choice: Choice) -> dict[str, Any]:
        result = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": choice.finish,
            **stop_fields(choice.finish, choice.matched, self._sampling.stop_token_ids),
        }
        return result | self.token_ids(choice.prompt_tokens, choice.tokens)

    def logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if self._sampling.logprobs is None or entries is None:
            return None
        return {"content": chat_logprobs(self._tokenizer, entries, self._as_ids), "refusal": None}

    def token_ids(self, prompt: list[int] | None, tokens: list[int]) -> dict[str, Any]:
        if not self._token_ids:
            return {}
        return {"token_ids": tokens} | ({"prompt_token_ids": prompt} if prompt is not None else {})


class ChatStream(ChunkStream):
    """Events -> chat.completion.chunk. A choice's role chunk goes out together with its first content."""

    def __init__(
        self, head: dict[str, Any], fields: ChatRequest, sampling: SamplingParams, tokenizer: Any
    ) -> None:
        super().__init__(head, fields, plain=sampling.logprobs is None)
        self._shapes = Shapes(fields, sampling, tokenizer)
        self._sampling = sampling
        self._text_heads: dict[int, bytes] = {}  # of the choices that have sent their role
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def encode(self, event: Event) -> bytes:
        head = self._text_heads.get(event.index)
        if self.plain and event.finish is None:
            if not event.text:
                return b""
            if head is not None:
                return b"%b%b%b" % (head, encode(event.text), self._text_tail)
        data = b"" if head is not None else self._role(event)
        logprobs = self._shapes.logprobs(event.logprobs)
        if event.text or (logprobs and logprobs["content"]) or (self._token_ids and event.tokens):
            extra = self._shapes.token_ids(None, event.tokens)
            data += self._chunk(event, {"content": event.text}, logprobs, extra=extra)
        return data if event.finish is None else data + self._finish(event)

    def _role(self, event: Event) -> bytes:
        self._text_heads[event.index] = b'%b{"index":%d,"delta":{"content":' % (self._head, event.index)
        extra = self._shapes.token_ids(event.prompt_tokens, []) if event.prompt_tokens is not None else {}
        return self._chunk(event, ROLE, None, None, extra)

    def _finish(self, event: Event) -> bytes:
        if event.finish == "abort":
            return self.error(Aborted(ABORTED))
        stops = stop_fields(event.finish, event.matched, self._sampling.stop_token_ids)
        return self._chunk(event, {}, None, event.finish, stops)

    def _chunk(
        self,
        event: Event,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": event.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.chunk(choice | (extra or {}), event.usage)

"""POST /tokenize and /detokenize, in vLLM's shape with SGLang's names beside it; and what they make of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http.request.chat import checked_messages, prompt_flags, template_kwargs
from sgla.http.request.intake import intake
from sgla.http.request.schema import ChatRequest, DetokenizeRequest, Schema, TokenizeRequest
from sgla.http.server import SERVER, Server
from sgla.http.wire import json_response
from sgla.text.logprobs import token_text

TOKENIZE = Schema(TokenizeRequest)
DETOKENIZE = Schema(DetokenizeRequest)
INLINE_SIZE = 4096

T = TypeVar("T")


async def tokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    fields = await intake(request, TOKENIZE)
    server.model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidField("give either prompt or messages", param="prompt")
    prompt, special = fields.prompt, fields.add_special_tokens is not False
    if prompt is None:
        prompt, special = render(server, fields), bool(fields.add_special_tokens)
    texts = prompt if isinstance(prompt, list) else [prompt]
    tokenizer = server.ingress.tokenizer
    encoded = await maybe_threaded(
        sum(map(len, texts)), lambda: [tokenizer.encode(text, add_special_tokens=special) for text in texts]
    )
    lists = isinstance(prompt, list)
    facts = server.ingress.facts
    counts = [len(ids) for ids in encoded]
    result: dict[str, Any] = {
        "count": counts if lists else counts[0],
        "max_model_len": facts.context_len if facts is not None else None,
        "tokens": encoded if lists else encoded[0],
    }
    if fields.return_token_strs:
        strings = [[token_text(tokenizer, token) for token in ids] for ids in encoded]
        result["token_strs"] = strings if lists else strings[0]
    return json_response(result)


async def apply_template(request: web.Request) -> web.Response:
    """The text that messages become; llama.cpp's shape."""
    server = request.app[SERVER]
    fields = await intake(request, TOKENIZE)
    server.model(fields.model)
    if fields.messages is None:
        raise InvalidField("messages is required", param="messages")
    return json_response({"prompt": render(server, fields)})


def render(server: Server, fields: ChatRequest | TokenizeRequest) -> str:
    """The chat template's text for ``messages``. Raises BadRequest for what the template refuses."""
    if server.ingress.template is None:
        raise InvalidField(
            "the model has no chat template; send prompt instead of messages", param="messages"
        )
    generate, continues = prompt_flags(fields)
    return server.ingress.template.render(
        checked_messages(fields.messages or []),
        tools=fields.tools or None,
        add_generation_prompt=generate,
        continue_final_message=continues,
        **template_kwargs(fields, server.config.trust_request_chat_template),
    )


async def maybe_threaded(size: int, work: Callable[[], T]) -> T:
    """``work()``, in a thread if ``size`` (characters or tokens) makes it slow enough to delay a step."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)


async def detokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    fields = await intake(request, DETOKENIZE)
    server.model(fields.model)
    facts, tokenizer = server.ingress.facts, server.ingress.tokenizer
    lists = bool(fields.tokens) and isinstance(fields.tokens[0], list)
    batch: list[Any] = fields.tokens if lists else [fields.tokens]
    limit = facts.vocab_size if facts is not None else 2**31
    for ids in batch:
        if not isinstance(ids, list) or any(
            not isinstance(token, int) or not 0 <= token < limit for token in ids
        ):
            raise InvalidField(f"tokens must be ids between 0 and {limit - 1}", param="tokens")
    skip = bool(fields.skip_special_tokens)
    texts = await maybe_threaded(
        sum(map(len, batch)), lambda: [tokenizer.decode(ids, skip_special_tokens=skip) for ids in batch]
    )
    text = texts if lists else texts[0]
    return json_response({"prompt": text, "text": text})

"""POST /tokenize and /detokenize, in vLLM's shape with SGLang's names beside it;
and what they make of messages."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.bodies import SHARE
from sgla.http.lanes import beside, sliced, sliced_lists, total
from sgla.http.operation import operation
from sgla.http.request.chat import prompt_flags, template_kwargs, text_messages
from sgla.http.request.intake import intake
from sgla.http.request.schema import ChatRequest, DetokenizeRequest, Schema, TokenizeRequest
from sgla.http.server import ASKED, Server
from sgla.http.wire import json_response
from sgla.text.detokenize import make_detokenizer

TOKENIZE = Schema(TokenizeRequest)
DETOKENIZE = Schema(DetokenizeRequest)
MAX_CHARS = 1 << 20  # that one request may have tokenized
MAX_IDS = 1 << 18  # that one request may have detokenized
MAX_TOKENS = 1 << 19  # that one request may get: few texts have more than one for two characters
MAX_TEXTS = 8192  # of either, in one request
IDS_SLICE = 4096  # ids that are made text without a pause for other threads


@operation("vLLM: text or messages to token ids", TokenizeRequest, to.Tokens)
async def tokenize(request: web.Request) -> web.Response:
    server = request[ASKED]
    fields = await intake(request, TOKENIZE)
    server.model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidField("give either prompt or messages", param="prompt")
    prompt, special = fields.prompt, fields.add_special_tokens is not False
    if prompt is None:
        prompt, special = await render(request, server, fields), bool(fields.add_special_tokens)
    texts = prompt if isinstance(prompt, list) else [prompt]
    check_size("prompt", texts, MAX_CHARS, "characters")
    tokenizer = server.ingress.tokenizer
    encoded = await beside(request, total(texts), lambda: tokenized(tokenizer, "prompt", texts, special))
    lists = isinstance(prompt, list)
    facts = server.ingress.facts
    counts = [len(ids) for ids in encoded]
    tokens = await (sliced_lists(encoded) if lists else sliced(encoded[0]))
    result: dict[str, Any] = {
        "count": counts if lists else counts[0],
        "max_model_len": facts.context_len if facts is not None else None,
        "tokens": tokens,
    }
    if fields.return_token_strs:
        shape = tokenizer.token_string
        result["token_strs"] = await (sliced_lists(encoded, shape) if lists else sliced(encoded[0], shape))
    return json_response(result)


@operation("llama.cpp: messages to the prompt's text", TokenizeRequest, to.Prompt)
async def apply_template(request: web.Request) -> web.Response:
    """The text that messages become; llama.cpp's shape."""
    server = request[ASKED]
    fields = await intake(request, TOKENIZE)
    server.model(fields.model)
    if fields.messages is None:
        raise InvalidField("messages is required", param="messages")
    return json_response({"prompt": await render(request, server, fields)})


def tokenized(tokenizer: Any, param: str, texts: list[str], special: bool) -> list[list[int]]:
    """The ids of each text. Raises InvalidField for too many, with those of the texts up to there."""
    found, size = [], 0
    for text in texts:
        encoding = tokenizer.encoding(text, add_special_tokens=special)
        size += len(encoding)
        if size > MAX_TOKENS:
            raise InvalidField(
                f"{param} has {size} tokens or more; {MAX_TOKENS} is the limit of one request", param=param
            )
        found.append(encoding.ids)
    return found


def check_size(name: str, lists: list[Any], most: int, unit: str) -> None:
    """Raise InvalidField for too many texts or lists of ids, or too long ones."""
    if len(lists) > MAX_TEXTS:
        raise InvalidField(f"{name} has {len(lists)} items; {MAX_TEXTS} is the limit", param=name)
    size = sum(map(len, lists))
    if size > most:
        raise InvalidField(f"{name} has {size} {unit}; {most} is the limit of one request", param=name)


async def render(request: web.Request, server: Server, fields: ChatRequest | TokenizeRequest) -> str:
    """The chat template's text for ``messages``.
    Raises BadRequest for what the template refuses, and Overloaded."""
    if server.ingress.template is None:
        raise InvalidField(
            "the model has no chat template; send prompt instead of messages", param="messages"
        )
    generate, continues = prompt_flags(fields)
    template, messages = server.ingress.template, text_messages(fields.messages or [])
    more = template_kwargs(fields, server.config.trust_request_chat_template)

    def rendered() -> str:
        text: str = template.render(
            messages,
            tools=fields.tools or None,
            add_generation_prompt=generate,
            continue_final_message=continues,
            **more,
        )
        return text

    return await beside(request, request[SHARE].body, rendered, inline=-1)


@operation("vLLM: token ids to text", DetokenizeRequest, to.Text)
async def detokenize(request: web.Request) -> web.Response:
    server = request[ASKED]
    fields = await intake(request, DETOKENIZE)
    server.model(fields.model)
    facts, tokenizer = server.ingress.facts, server.ingress.tokenizer
    lists = bool(fields.tokens) and isinstance(fields.tokens[0], list)
    batch: list[Any] = fields.tokens if lists else [fields.tokens]
    if not all(isinstance(ids, list) for ids in batch):
        raise InvalidField("tokens must be a list of ids or a list of id lists", param="tokens")
    check_size("tokens", batch, MAX_IDS, "ids")
    limit = facts.vocab_size if facts is not None else 2**31
    skip = bool(fields.skip_special_tokens)
    texts = await beside(
        request, total(batch), lambda: [decoded(tokenizer, ids, limit, skip) for ids in batch]
    )
    text = texts if lists else texts[0]
    return json_response({"prompt": text, "text": text})


def decoded(tokenizer: Any, ids: list[Any], limit: int, skip: bool) -> str:
    """The text of ``ids``, made in slices, since the library's call for all of them stops other threads.
    Raises InvalidField."""
    detokenizer = make_detokenizer(tokenizer, skip)
    texts = []
    for at in range(0, len(ids), IDS_SLICE):
        part = ids[at : at + IDS_SLICE]
        if any(not isinstance(token, int) or not 0 <= token < limit for token in part):
            raise InvalidField(f"tokens must be ids between 0 and {limit - 1}", param="tokens")
        texts.append(detokenizer.feed(part))
    return "".join([*texts, detokenizer.flush()])

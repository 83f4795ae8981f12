"""POST /v1/embeddings (OpenAI) and /encode (SGLang)."""

from __future__ import annotations

import base64
from typing import Any, Literal

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer.whole import answered, each
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, PooledFields, inputs, pooling_of, run, usage, vector
from sgla.http.pooling.shown import prompts
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import ASKED, RID
from sgla.http.wire import json_response
from sgla.text.vectors import check_dimensions, embedding, raw


class ShownFields(PooledFields, kw_only=True):
    """vLLM's ``messages`` in place of ``input``: one conversation, through the chat template."""

    input: str | list[int | str | list[int] | dict[str, Any]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(ShownFields, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class EncodeRequest(PooledFields, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    dimensions: int | None = None


ROWS = 16  # vectors that are encoded in one go

EMBEDDINGS = Schema(EmbeddingRequest)
ENCODE = Schema(EncodeRequest)


@operation("OpenAI: vectors of texts and pictures", EmbeddingRequest, to.Embeddings)
async def embeddings(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, EMBEDDINGS)
    model = server.model(fields.model)
    pooling = pooling_of(server, "embed")
    check_dimensions(pooling, fields.dimensions)
    choices = await run(request, server, fields, await prompts_of(request, fields))

    def shown(i: int) -> dict[str, Any]:
        row = embedding(vector(choices[i]), pooling, fields.dimensions, fields.normalize)
        if fields.encoding_format == "base64":
            value: Any = base64.b64encode(row.astype("<f4").tobytes()).decode()
        else:
            value = row.tolist()
        return {"object": "embedding", "index": i, "embedding": value}

    def whole() -> dict[str, Any]:
        data = each(len(choices), shown, ROWS)
        return {"object": "list", "data": data, "model": model, "usage": usage(choices)}

    return await answered(request, len(choices) * (ENTRY + pooling.size), whole)


async def prompts_of(request: web.Request, fields: ShownFields) -> list[dict[str, Any]]:
    """Job fields of ``input``, or of one conversation."""
    continues = fields.continue_final_message is True
    if continues and fields.add_generation_prompt:
        raise InvalidField(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    flags = {"add_generation_prompt": fields.add_generation_prompt is True}
    flags["continue_final_message"] = continues
    return await prompts(request, fields.input, fields.messages, fields.mm_processor_kwargs, **flags)


@operation("SGLang: vectors of texts or token ids", EncodeRequest, to.Encoded | list[to.Encoded])
async def encode(request: web.Request) -> web.StreamResponse:
    """Embeddings, or the logits of a classification or reward model."""
    server = request[ASKED]
    fields = await intake(request, ENCODE)
    server.model(fields.model)
    pooling = pooling_of(server, "embed", "classify")
    check_dimensions(pooling, fields.dimensions)
    if (fields.text is None) == (fields.input_ids is None):
        raise InvalidField("give either text or input_ids", param="text")
    given: Any = fields.text if fields.input_ids is None else fields.input_ids
    version = server.ingress.weight_version
    choices = await run(
        request, server, fields, inputs(given, "text" if fields.input_ids is None else "input_ids")
    )

    def shown(i: int) -> dict[str, Any]:
        embeds, data = pooling.task == "embed", vector(choices[i])
        rid = f"{request[RID]}-{i}" if len(choices) > 1 else request[RID]
        values = embedding(data, pooling, fields.dimensions) if embeds else raw(data)
        return native_result(rid, version, values, choices[i].usage.prompt_tokens)

    many = isinstance(given, list) and not isinstance(given[0], int)
    if not many:
        return json_response(shown(0))
    size = len(choices) * (ENTRY + pooling.size)
    return await answered(request, size, lambda: each(len(choices), shown, ROWS))


def native_result(rid: str, version: str, values: Any, prompt_tokens: int) -> dict[str, Any]:
    """SGLang's result object."""
    return {
        "embedding": values.tolist(),
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": prompt_tokens,
            "weight_version": version,
        },
    }

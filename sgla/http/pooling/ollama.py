"""POST /api/embed and /api/embeddings: Ollama's."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from sgla import clock
from sgla.http import answer_types as to
from sgla.http.answer.collect import Choice
from sgla.http.answer.whole import answered, each
from sgla.http.ollama import Options, known
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, PooledFields, inputs, pooling_of, run, vector
from sgla.http.pooling.embeddings import ROWS
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import ASKED
from sgla.http.wire import json_response
from sgla.text.vectors import check_dimensions, embedding


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """``truncate`` (the default): a longer text loses its end."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    model: str
    prompt: str
    options: Options | None = None
    keep_alive: str | float | None = None


EMBED = Schema(OllamaEmbedRequest, nested={"options": Options})
EMBEDDINGS = Schema(OllamaEmbeddingsRequest, nested={"options": Options})


@operation("Ollama: vectors of texts", OllamaEmbedRequest, to.OllamaEmbeddings, any_model=True)
async def embed(request: web.Request) -> web.StreamResponse:
    """Embeddings of length 1."""
    began = clock.now()
    fields = await intake(request, EMBED)
    choices = await vectors(
        request, fields.model, fields.input, fields.truncate is not False, fields.dimensions
    )
    pooling = pooling_of(request[ASKED], "embed")

    def row(i: int) -> list[float]:
        values: list[float] = embedding(vector(choices[i]), pooling, fields.dimensions, True).tolist()
        return values

    def whole() -> dict[str, Any]:
        return {
            "model": fields.model,
            "embeddings": each(len(choices), row, ROWS),
            "total_duration": round((clock.now() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(choice.usage.prompt_tokens for choice in choices),
        }

    return await answered(request, len(choices) * (ENTRY + pooling.size), whole)


@operation("Ollama: the vector of a text", OllamaEmbeddingsRequest, to.OllamaEmbedding, any_model=True)
async def embeddings(request: web.Request) -> web.Response:
    """The older route: one embedding as the model makes it."""
    fields = await intake(request, EMBEDDINGS)
    (choice,) = await vectors(request, fields.model, fields.prompt, True, None)
    pooling = pooling_of(request[ASKED], "embed")
    row = embedding(vector(choice), pooling, None, False)
    return json_response({"embedding": row.tolist()})


async def vectors(
    request: web.Request, model: str, given: str | list[str], cut: bool, dimensions: int | None
) -> list[Choice]:
    server = request[ASKED]
    known(server, model)
    check_dimensions(pooling_of(server, "embed"), dimensions)
    fields = PooledFields(truncate_prompt_tokens=-1 if cut else None)
    return await run(request, server, fields, inputs(given, "input"))

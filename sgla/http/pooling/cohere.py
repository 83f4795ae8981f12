"""POST /v2/embed: Cohere's embeddings, each in all the forms that are asked for."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Literal

import numpy as np
from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer.whole import answered, each
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, PooledFields, inputs, pooling_of, run, vector
from sgla.http.pooling.embeddings import ROWS
from sgla.http.pooling.score import text_of
from sgla.http.request.intake import intake
from sgla.http.request.schema import MAX_CHOICES, Schema, check_count, unsupported
from sgla.http.server import ASKED, IGNORED_FIELDS, UID
from sgla.text.vectors import Floats, check_dimensions, embedding

Form = Literal["float", "binary", "ubinary", "base64"]


class CohereEmbedRequest(PooledFields, kw_only=True):
    """``inputs``: objects whose ``content`` has parts of text. ``truncate``: END (the default) cuts longer
    texts, to ``max_tokens`` if that is given; NONE refuses them."""

    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    images: list[str] | None = None
    input_type: str | None = None
    output_dimension: int | None = None
    embedding_types: list[Form] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = None


SCHEMA = Schema(CohereEmbedRequest)


@operation("Cohere: vectors of texts in several forms", CohereEmbedRequest, to.CohereEmbeddings)
async def embed(request: web.Request) -> web.StreamResponse:
    """``input_type`` has no effect, and the response's headers say so: models here know no prompts for it."""
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    server.model(fields.model)
    texts = given(fields)
    if fields.input_type is not None:
        request[IGNORED_FIELDS].append("input_type")
    pooling = pooling_of(server, "embed")
    size = fields.output_dimension or pooling.size
    check_dimensions(pooling, size)
    forms = list(dict.fromkeys(fields.embedding_types or ["float"]))
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(forms):
        raise InvalidField(
            f"embedding_types: binary ones need a multiple of 8 values, not {size}", param="embedding_types"
        )
    if fields.truncate != "NONE":
        fields.truncate_prompt_tokens = fields.max_tokens or -1
    choices = await run(request, server, fields, inputs(texts, "texts"))

    def row(form: str, i: int) -> Any:
        return shown(embedding(vector(choices[i]), pooling, size), form)

    def whole() -> dict[str, Any]:
        embeddings = {form: each(len(choices), partial(row, form), ROWS) for form in forms}
        count = sum(choice.usage.prompt_tokens for choice in choices)
        return {
            "id": request[UID],
            "response_type": "embeddings_by_type",
            "embeddings": embeddings,
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": count}},
        }

    return await answered(request, len(choices) * (ENTRY + size * len(forms)), whole)


def given(fields: CohereEmbedRequest) -> list[str]:
    if fields.images:
        raise unsupported("images", ": the model takes text only")
    if fields.truncate == "START":
        raise unsupported("truncate", " as START; send END or NONE")
    if fields.max_tokens is not None and (fields.truncate == "NONE" or not fields.max_tokens):
        raise InvalidField("max_tokens must be at least 1, and needs truncate: END", param="max_tokens")
    if (fields.texts is None) == (fields.inputs is None):
        raise InvalidField("give either texts or inputs", param="texts")
    if fields.inputs is None:
        return fields.texts or []
    check_count("inputs", fields.inputs, MAX_CHOICES)
    return [text_of(item, "inputs") for item in fields.inputs]


def shown(row: Floats, form: str) -> Any:
    """An embedding as numbers, as the base64 of its float32, or as bits:
    eight to a byte, the first one highest, 1 for what is not negative."""
    if form == "float":
        return row.tolist()
    if form == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    packed = np.packbits(row >= 0)
    return (packed if form == "ubinary" else packed.astype(np.int16) - 128).tolist()

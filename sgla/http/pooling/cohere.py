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
from sgla.http.media.parts import Source, may_be, source_of
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, PooledFields, inputs, pooling_of, run, text_prompt, vector
from sgla.http.pooling.embeddings import ROWS
from sgla.http.pooling.score import text_of
from sgla.http.pooling.shown import Input, loaded, one
from sgla.http.request.intake import intake
from sgla.http.request.schema import MAX_CHOICES, Schema, as_list, check_count, unsupported
from sgla.http.server import ASKED, IGNORED_FIELDS, UID, Server
from sgla.text.vectors import Floats, check_dimensions, embedding

Form = Literal["float", "binary", "ubinary", "base64"]


class CohereEmbedRequest(PooledFields, kw_only=True):
    """``inputs``: objects whose ``content`` has parts of text and of pictures. ``truncate``: END (usual) cuts
    longer texts, to ``max_tokens`` if that is given, but none beside pictures; NONE refuses them."""

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
    found = given(server, fields)
    pooling = pooling_of(server, "embed")
    if fields.input_type is not None:
        request[IGNORED_FIELDS].append("input_type")
    size = fields.output_dimension or pooling.size
    check_dimensions(pooling, size)
    forms = list(dict.fromkeys(fields.embedding_types or ["float"]))
    if size % 8 and not {"binary", "ubinary"}.isdisjoint(forms):
        raise InvalidField(
            f"embedding_types: binary ones need a multiple of 8 values, not {size}", param="embedding_types"
        )
    pictured = any(entry.sources for entry in found)
    if fields.truncate != "NONE" and (fields.max_tokens is not None or not pictured):
        fields.truncate_prompt_tokens = fields.max_tokens or -1
    choices = await run(request, server, fields, await loaded(request, found))

    def row(form: str, i: int) -> Any:
        return shown(embedding(vector(choices[i]), pooling, size), form)

    def whole() -> dict[str, Any]:
        embeddings = {form: each(len(choices), partial(row, form), ROWS) for form in forms}
        count = sum(choice.usage.prompt_tokens for choice in choices)
        return {
            "id": request[UID],
            "response_type": "embeddings_by_type",
            "embeddings": embeddings,
            "texts": [entry.fields.get("text", "") for entry in found if not entry.sources],
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": count}},
        }

    return await answered(request, len(choices) * (ENTRY + size * len(forms)), whole)


def given(server: Server, fields: CohereEmbedRequest) -> list[Input]:
    """Raises InvalidField, UnsupportedField."""
    if fields.truncate == "START":
        raise unsupported("truncate", " as START; send END or NONE")
    if fields.max_tokens is not None and (fields.truncate == "NONE" or not fields.max_tokens):
        raise InvalidField("max_tokens must be at least 1, and needs truncate: END", param="max_tokens")
    lists = {"texts": fields.texts, "images": fields.images, "inputs": fields.inputs}
    there = [name for name, values in lists.items() if values is not None]
    if len(there) != 1:
        raise InvalidField(
            "give one of texts, images and inputs", param="images" if fields.images is not None else "texts"
        )
    (name,) = there
    if fields.inputs is not None:
        check_count(name, fields.inputs, MAX_CHOICES)
        return [_input(server, item, f"{name}[{i}]") for i, item in enumerate(fields.inputs)]
    if fields.images is not None:
        check_count(name, fields.images, MAX_CHOICES)
        sources = [Source(url, f"{name}[{i}]") for i, url in enumerate(fields.images)]
        return [one(server, "", [source], source.place) for source in sources]
    return [Input(prompt) for prompt in inputs(fields.texts, name)]


def _input(server: Server, item: dict[str, Any], place: str) -> Input:
    parts = as_list(item.get("content", item))
    found = [source_of(part, place) for part in parts if may_be(part)]
    sources = [source for source in found if source is not None]
    if not sources:
        return Input(text_prompt(text_of(item, "inputs"), "inputs"))
    texts = [part for part in parts if not may_be(part)]
    return one(server, text_of({"content": texts}, place) if texts else "", sources, place)


def shown(row: Floats, form: str) -> Any:
    """An embedding as numbers, as the base64 of its float32, or as bits:
    eight to a byte, the first one highest, 1 for what is not negative."""
    if form == "float":
        return row.tolist()
    if form == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    packed = np.packbits(row >= 0)
    return (packed if form == "ubinary" else packed.astype(np.int16) - 128).tolist()

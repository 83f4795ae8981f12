"""POST /pooling: what the model makes of inputs, embeddings or scores of classes, in vLLM's shape."""

from __future__ import annotations

import base64
from typing import Any, Literal

from aiohttp import web

from sgla.errors import UnsupportedTask
from sgla.http import answer_types as to
from sgla.http.answer.whole import answered, each
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, head, pooling_of, run, usage, vector
from sgla.http.pooling.embeddings import ROWS, ShownFields, prompts_of
from sgla.http.request.intake import intake
from sgla.http.request.sampling import first
from sgla.http.request.schema import Schema
from sgla.http.server import ASKED, UID
from sgla.text.vectors import check_dimensions, embedding, scores

ALIASES = {"score": "classify"}


class PoolingRequest(ShownFields, kw_only=True):
    """``use_activation: false``: embeddings are not normalized, and classes have logits instead of
    probabilities. ``task``: by default what the model is for."""

    task: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    normalize: bool | None = None


SCHEMA = Schema(PoolingRequest)


@operation("vLLM: vectors of texts, or their classes", PoolingRequest, to.Classes)
async def pooling(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    made = pooling_of(server, "embed", "classify")
    if fields.task is not None and ALIASES.get(fields.task, fields.task) != made.task:
        raise UnsupportedTask(
            f"task {fields.task[:40]!r} is not possible with this server's model: its task is {made.task}",
            param="task",
        )
    check_dimensions(made, fields.dimensions)
    choices = await run(request, server, fields, await prompts_of(request, fields))
    activate = first(fields.use_activation, fields.activation, fields.normalize)

    def shown(i: int) -> dict[str, Any]:
        if made.task == "embed":
            row = embedding(vector(choices[i]), made, fields.dimensions, activate)
        else:
            row = scores(vector(choices[i]), made, activate is not False)
        data: Any = row.tolist()
        if fields.encoding_format == "base64":
            data = base64.b64encode(row.astype("<f4").tobytes()).decode()
        return {"index": i, "object": "pooling", "data": data}

    def whole() -> dict[str, Any]:
        data = each(len(choices), shown, ROWS)
        return {**head("pool", request[UID], model), "data": data, "usage": usage(choices)}

    return await answered(request, len(choices) * (ENTRY + made.size), whole)

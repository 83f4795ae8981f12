"""POST /classify: vLLM's classes of inputs, and SGLang's raw scores for ``text``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http.pooling.common import PooledFields, head, inputs, pooling_of, run, usage, vector
from sgla.http.pooling.embeddings import native_result, prompts
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import RID, SERVER, UID
from sgla.http.wire import json_response
from sgla.text.vectors import raw, scores


class ClassifyRequest(PooledFields, kw_only=True):
    """``use_activation: false`` gives logits instead of probabilities: the reward of a reward model."""

    input: str | list[int | str | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    text: str | list[str] | None = None
    use_activation: bool | None = None
    activation: bool | None = None


SCHEMA = Schema(ClassifyRequest)


async def classify(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    pooling = pooling_of(server, "classify")
    if fields.text is not None:
        if fields.input is not None or fields.messages is not None:
            raise InvalidField("give either input or text", param="text")
        choices = await run(request, server, fields, inputs(fields.text, "text"))
        results = [
            native_result(request[RID], raw(vector(choice)), choice.usage.prompt_tokens) for choice in choices
        ]
        return json_response(results if isinstance(fields.text, list) else results[0])
    choices = await run(request, server, fields, prompts(fields.input, fields.messages))
    activate = fields.use_activation is not False and fields.activation is not False
    data = []
    for i, choice in enumerate(choices):
        probs = scores(vector(choice), pooling, activate).tolist()
        label = pooling.labels[probs.index(max(probs))]
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return json_response({**head("classify", request[UID], model), "data": data, "usage": usage(choices)})

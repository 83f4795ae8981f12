"""POST /classify: vLLM's classes of inputs, and SGLang's raw scores for ``text``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer.whole import answered, each
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, PooledFields, head, inputs, pooling_of, run, usage, vector
from sgla.http.pooling.embeddings import ROWS, native_result
from sgla.http.pooling.shown import prompts
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import ASKED, RID, UID
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


@operation("vLLM, SGLang: classes of texts", ClassifyRequest, (to.Classes, to.Encoded, list[to.Encoded]))
async def classify(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    pooling = pooling_of(server, "classify")
    if fields.text is not None:
        if fields.input is not None or fields.messages is not None:
            raise InvalidField("give either input or text", param="text")
        version = server.ingress.weight_version
        choices = await run(request, server, fields, inputs(fields.text, "text"))
        size = len(choices) * (ENTRY + pooling.size)

        def result(i: int) -> dict[str, Any]:
            values = raw(vector(choices[i]))
            return native_result(request[RID], version, values, choices[i].usage.prompt_tokens)

        if not isinstance(fields.text, list):
            return json_response(result(0))
        return await answered(request, size, lambda: each(len(choices), result, ROWS))
    choices = await run(request, server, fields, await prompts(request, fields.input, fields.messages))
    activate = fields.use_activation is not False and fields.activation is not False

    def shown(i: int) -> dict[str, Any]:
        probs = scores(vector(choices[i]), pooling, activate).tolist()
        label = pooling.labels[probs.index(max(probs))]
        return {"index": i, "label": label, "probs": probs, "num_classes": len(probs)}

    def whole() -> dict[str, Any]:
        data = each(len(choices), shown, ROWS)
        return {**head("classify", request[UID], model), "data": data, "usage": usage(choices)}

    return await answered(request, len(choices) * (ENTRY + pooling.size), whole)

"""POST /v1/rerank, in the shape that Cohere, Jina and vLLM have in common."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http.pooling.common import text_prompt, usage
from sgla.http.pooling.score import PairFields, similarities
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import SERVER, UID
from sgla.http.wire import json_response


class RerankRequest(PairFields, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None


SCHEMA = Schema(RerankRequest)


async def rerank(request: web.Request) -> web.Response:
    """The documents, the most relevant first."""
    server = request.app[SERVER]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    text_prompt(fields.query, "query")
    documents = [document_text(document) for document in fields.documents]
    if not documents:
        raise InvalidField("documents: the list is empty", param="documents")
    values, choices = await similarities(request, server, fields, [fields.query], documents)
    order = sorted(range(len(documents)), key=lambda i: -values[i])[: fields.top_n]
    results: list[dict[str, Any]] = []
    for i in order:
        shown = {} if fields.return_documents is False else {"document": {"text": documents[i]}}
        results.append({"index": i, "relevance_score": values[i], **shown})
    return json_response(
        {"id": f"rerank-{request[UID]}", "model": model, "usage": usage(choices), "results": results}
    )


def document_text(document: str | dict[str, Any]) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str) or not text:
        raise InvalidField(
            "documents must be texts, or objects with a text, and none may be empty", param="documents"
        )
    return text

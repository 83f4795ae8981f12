"""POST /v1/rerank, in the shape that Cohere, Jina and vLLM have in common."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http import answer_types as to
from sgla.http.answer.whole import answered
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, text_prompt, usage
from sgla.http.pooling.score import PairFields, similarities
from sgla.http.request.intake import intake
from sgla.http.request.schema import MAX_CHOICES, Schema, check_count
from sgla.http.server import ASKED, UID


class RerankRequest(PairFields, kw_only=True):
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None


SCHEMA = Schema(RerankRequest)
CHARACTERS = 16  # of a document that cost as much as a value


@operation("Cohere, Jina: documents by relevance", RerankRequest, to.Ranking)
async def rerank(request: web.Request) -> web.StreamResponse:
    """The documents, the most relevant first."""
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    text_prompt(fields.query, "query")
    check_count("documents", fields.documents, MAX_CHOICES)
    documents = [document_text(document) for document in fields.documents]
    if not documents:
        raise InvalidField("documents: the list is empty", param="documents")
    value, choices = await similarities(request, server, fields, [fields.query], documents)

    def whole() -> dict[str, Any]:
        values = [value(i) for i in range(len(documents))]
        order = sorted(range(len(documents)), key=lambda i: -values[i])[: fields.top_n]

        def result(i: int) -> dict[str, Any]:
            shown = {} if fields.return_documents is False else {"document": {"text": documents[i]}}
            return {"index": i, "relevance_score": values[i], **shown}

        results = list(map(result, order))
        return {"id": f"rerank-{request[UID]}", "model": model, "usage": usage(choices), "results": results}

    size = ENTRY * len(documents) + sum(map(len, documents)) // CHARACTERS
    return await answered(request, size, whole)


def document_text(document: str | dict[str, Any]) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str) or not text:
        raise InvalidField(
            "documents must be texts, or objects with a text, and none may be empty", param="documents"
        )
    return text

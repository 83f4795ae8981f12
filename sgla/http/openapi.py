"""GET /openapi.json: the API's description, made of the table of routes, of what stands above each handler
(``operation.py``), and of the structs that bodies are decoded into."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from sgla.http import ollama
from sgla.http.anthropic import messages as anthropic
from sgla.http.media.parts import AUDIO_FORMATS, DETAILS
from sgla.http.middleware import OPEN
from sgla.http.operation import JSON, OPERATIONS, Operation, operation
from sgla.http.request.chat import ROLES
from sgla.http.request.schema import range_of
from sgla.http.responses.input import ResponsesRequest
from sgla.http.server import ASKED
from sgla.http.wire import encode
from sgla.text.parts import PICTURES, SOUNDS, TEXTS, VIDEOS
from sgla.validation import Range
from sgla.version import __version__

REF = "#/components/schemas/{name}"
TABLE: web.AppKey[Any] = web.AppKey("routes", dict)


@operation("The description of the API")
async def openapi_json(request: web.Request) -> web.Response:
    """Made once, beside the loop, since that takes 0.2 s; nothing in it changes."""
    server = request[ASKED]
    if server.openapi is None:
        table, names = request.app[TABLE], server.ingress.model_names
        server.openapi = asyncio.ensure_future(asyncio.to_thread(lambda: encode(document(table, names))))
    return web.Response(body=await asyncio.shield(server.openapi), content_type="application/json")


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """OpenAI's shape, on every route but Anthropic's and Ollama's."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: str
    error: AnthropicErrorDetail
    request_id: str


class OllamaError(msgspec.Struct):
    error: str


DETAIL = {"anyOf": [{"enum": [*DETAILS]}, {"type": "null"}]}
URL = {"type": "string", "minLength": 1}
PICTURE_URL = {
    "anyOf": [URL, {"type": "object", "properties": {"url": URL, "detail": DETAIL}, "required": ["url"]}]
}
VIDEO_URL = {"anyOf": [URL, {"type": "object", "properties": {"url": URL}, "required": ["url"]}]}
SOUND = {
    "anyOf": [
        URL,
        {
            "type": "object",
            "properties": {"data": URL, "url": URL, "format": {"enum": [*AUDIO_FORMATS, None]}},
        },
    ]
}
PART = {
    "anyOf": [
        *(
            {
                "type": "object",
                "properties": {"type": {"const": kind}, name: {"type": "string"}},
                "required": ["type", name],
            }
            for kind, name in TEXTS.items()
        ),
        *(
            {
                "type": "object",
                "properties": {"type": {"const": kind}, names[0]: PICTURE_URL, "detail": DETAIL},
                "required": ["type", names[0]],
            }
            for kind, names in PICTURES.items()
        ),
        *(
            {
                "type": "object",
                "properties": {"type": {"const": kind}, names[0]: SOUND},
                "required": ["type", names[0]],
            }
            for kind, names in SOUNDS.items()
        ),
        *(
            {
                "type": "object",
                "properties": {"type": {"const": kind}, names[0]: VIDEO_URL},
                "required": ["type", names[0]],
            }
            for kind, names in VIDEOS.items()
        ),
    ]
}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": PART}]}
# What the lists of plain objects hold, where their struct does not say it.
ITEMS: dict[str, dict[str, Any]] = {
    "messages": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "role": {"enum": [role for role in ROLES if role != "assistant"]},
                    "content": CONTENT,
                },
                "required": ["role", "content"],
            },
            {
                "type": "object",
                "properties": {
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [CONTENT, {"type": "null"}]},
                },
                "required": ["role"],
            },
        ]
    },
    "tools": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
                "required": ["name"],
            },
        },
        "required": ["function"],
    },
}


def document(routes: Mapping[str, Mapping[str, Any]], models: Sequence[str] = ()) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server of ``models``.
    A handler of ``routes`` that nothing describes raises KeyError."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sgla",
            "version": __version__,
            "description": "Unknown fields of a body are ignored and listed in the x-ignored-fields header.",
        },
        "paths": {
            route: {
                method.lower(): described(route, method, OPERATIONS[handler])
                for method, handler in methods.items()
            }
            for route, methods in routes.items()
        },
        "components": {
            "schemas": schemas(OPERATIONS.values(), models),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def tags(summary: str) -> list[str]:
    """Whose API it is."""
    whose, colon, _ = summary.partition(": ")
    return whose.split(", ") if colon else ["Server"]


def described(route: str, method: str, entry: Operation) -> dict[str, Any]:
    names = [("id", "path"), ("item", "path"), *((name, "query") for name in entry.query)]
    result: dict[str, Any] = {
        "operationId": f"{method.lower()}{route}".replace("/", "_").replace("{", "").replace("}", ""),
        "summary": entry.summary,
        "tags": tags(entry.summary),
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in names
            if place == "query" or f"{{{name}}}" in route
        ],
        "responses": answers(route, entry),
        "security": security(route),
    }
    if entry.body is not None:
        content = {entry.accepts: {"schema": reference(entry.body)}}
        result["requestBody"] = {"required": not entry.optional, "content": content}
    return result


def answers(route: str, entry: Operation) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "string"}
    if entry.media == JSON:
        first, *others = shapes(kinds(entry))[0]
        shape = {"anyOf": [first, *others]} if others else first
    content: dict[str, Any] = {entry.media: {"schema": shape}}
    if entry.stream:
        content[entry.stream] = {"schema": {}}
    errors: dict[str, type[msgspec.Struct]] = {
        anthropic.PREFIX: AnthropicError,
        f"{ollama.PREFIX}/": OllamaError,
    }
    error = reference(next((kind for prefix, kind in errors.items() if route.startswith(prefix)), Error))
    failed = {"description": "not accepting requests", "content": {JSON: {"schema": {}}}}
    return {
        "200": {"description": "done", "content": content},
        **({"503": failed} if entry.health else {}),
        "default": {"description": "an error", "content": {JSON: {"schema": error}}},
    }


def security(route: str) -> list[dict[str, list[str]]]:
    """Keys are needed only where the server was given some, hence the empty alternative."""
    first = route.split("/")[1]
    keyed: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]
    if first in OPEN:
        return []
    return [*keyed, {}]


def reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=struct.__name__)}


def kinds(entry: Operation) -> tuple[Any, ...]:
    return entry.answer if isinstance(entry.answer, tuple) else (entry.answer,)


def shapes(types: Iterable[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """The JSON schema of each type, and the components that they refer to."""
    return msgspec.json.schema_components(types, ref_template=REF)


def schemas(entries: Iterable[Operation], models: Sequence[str]) -> dict[str, Any]:
    """What all operations refer to."""
    entries = list(entries)
    _, components = shapes(
        [*(kind for entry in entries for kind in kinds(entry)), Error, AnthropicError, OllamaError]
    )
    _, bodies = shapes(entry.body for entry in entries if entry.body is not None)
    free = {entry.body.__name__ for entry in entries if entry.body is not None and entry.any_model}
    for owner, component in bodies.items():
        for name, shape in component.get("properties", {}).items():
            for branch in shape.get("anyOf", [shape]):
                narrow(branch, owner, name, () if owner in free else models)
    return components | bodies


def narrow(shape: dict[str, Any], owner: str, name: str, models: Sequence[str]) -> None:
    """Write what is checked beside its type into the schema of the field ``name`` of the struct ``owner``."""
    if allowed := range_of(owner, name):
        limit(shape, allowed)
    if name in ITEMS and shape.get("items") == {"type": "object"} and owner != ResponsesRequest.__name__:
        shape["items"] = ITEMS[name]
    if name == "model" and models and shape.get("type") == "string":
        shape["enum"] = [*models, ""]


def limit(shape: dict[str, Any], allowed: Range) -> None:
    """Write the range of a number, or of a list's numbers, into its schema."""
    if shape.get("type") == "array":
        limit(shape["items"], allowed)
    elif shape.get("type") in ("integer", "number"):
        shape["exclusiveMinimum" if allowed.open_low else "minimum"] = allowed.low
        if allowed.high is not None:
            shape["maximum"] = allowed.high

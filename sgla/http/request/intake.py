"""The first lines of every POST handler: ready, read, decode."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from sgla.http.request.schema import Schema
from sgla.http.server import RID, SERVER
from sgla.http.wire import read_body

IGNORED_FIELDS = web.RequestKey("ignored_fields", list[str])  # for the x-ignored-fields header

R = TypeVar("R", bound=msgspec.Struct)


async def intake(request: web.Request, schema: Schema[R]) -> R:
    """The typed body. Raises NotReady while the model loads, TooLarge, or a BadRequest that names the field."""
    request.app[SERVER].ingress.require_ready()
    return _decoded(request, schema, await read_body(request))


async def optional_intake(request: web.Request, schema: Schema[R]) -> R:
    """``intake`` of a body that may be missing."""
    request.app[SERVER].ingress.require_ready()
    return _decoded(request, schema, await read_body(request) or b"{}")


def _decoded(request: web.Request, schema: Schema[R], body: bytes) -> R:
    fields, request[IGNORED_FIELDS] = schema.decode(body)
    dump = request.app[SERVER].dump
    if dump is not None:
        dump.add(request[RID], request.method, request.path, body)
    return fields

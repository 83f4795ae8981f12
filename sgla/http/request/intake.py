"""The first lines of every POST handler: ready, read, count, decode."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from sgla import census
from sgla.http.bodies import SHARE, Share
from sgla.http.request.schema import Schema, fields_of
from sgla.http.server import ASKED, IGNORED_FIELDS, RID, Server
from sgla.http.turns import pause, stepped

BODY = web.RequestKey("body", bytes)  # of a request that somebody has read already

R = TypeVar("R", bound=msgspec.Struct)


async def intake(request: web.Request, schema: Schema[R], resting: bool = False) -> R:
    """The typed body. Raises NotReady while the model loads, and where it rests but for ``resting``;
    TooLarge, Overloaded, or a BadRequest that names the field."""
    request[ASKED].ingress.require_ready(resting)
    return await decoded(request, schema, await _body(request), request[SHARE])


async def optional_intake(request: web.Request, schema: Schema[R], resting: bool = False) -> R:
    """``intake`` of a body that may be missing."""
    request[ASKED].ingress.require_ready(resting)
    return await decoded(request, schema, await _body(request) or b"{}", request[SHARE])


async def looked_at(request: web.Request) -> dict[str, msgspec.Raw]:
    """The fields of the body, unread, before an ``intake`` of it. Raises as ``intake`` does."""
    request[ASKED].ingress.require_ready()
    return await peeked(request)


async def peeked(request: web.Request) -> dict[str, msgspec.Raw]:
    """``looked_at`` of a body that may be missing, whether or not a model is loaded."""
    server, share = request[ASKED], request[SHARE]
    request[BODY] = body = await _body(request)
    async with _turn(server, share, body):
        await counted(server, body)
        fields = fields_of(body or b"{}")
    await others(body)
    return fields


async def _body(request: web.Request) -> bytes:
    return request[BODY] if BODY in request else await request[SHARE].read(request)


async def decoded(request: web.Request, schema: Schema[R], body: bytes, share: Share) -> R:
    """What is decoded stays in ``share`` until that is closed; the body leaves it.
    Large bodies take turns."""
    server = request[ASKED]
    async with _turn(server, share, body):
        share.take((await counted(server, body)).memory(body))
        await others(body)
        fields, request[IGNORED_FIELDS] = await stepped(schema.steps(body))
        await others(body)
        if server.dump is not None:
            server.dump.add(request[RID], request.method, request.path, body)
        share.give(len(body))
        return fields


def _turn(server: Server, share: Share, body: bytes) -> AbstractAsyncContextManager[Any]:
    return nullcontext() if len(body) <= census.SMALL else server.memory.decoding.turn(share.client)


async def counted(server: Server, body: bytes) -> census.Census:
    """Raises TooComplex for what takes too long to decode."""
    facts = server.ingress.facts
    counted = census.Census(facts.context_len if facts is not None else 0)
    for _ in census.counting(body, counted):
        await asyncio.sleep(0)
    return counted


async def others(body: bytes) -> None:
    """Let others be answered between two looks at a large body."""
    if len(body) > census.SMALL:
        await pause()

"""The first lines of every POST handler: ready, read, count, decode."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from sgla import census
from sgla.http.bodies import SHARE, Share
from sgla.http.request.schema import Schema
from sgla.http.server import IGNORED_FIELDS, RID, SERVER
from sgla.http.turns import pause, stepped

BODY = web.RequestKey("body", bytes)  # of a request that somebody has read already

R = TypeVar("R", bound=msgspec.Struct)


async def intake(request: web.Request, schema: Schema[R]) -> R:
    """The typed body. Raises NotReady while the model loads,
    TooLarge, Overloaded, or a BadRequest that names the field."""
    request.app[SERVER].ingress.require_ready()
    share = request[SHARE]
    return await decoded(
        request, schema, request[BODY] if BODY in request else await share.read(request), share
    )


async def optional_intake(request: web.Request, schema: Schema[R]) -> R:
    """``intake`` of a body that may be missing."""
    request.app[SERVER].ingress.require_ready()
    share = request[SHARE]
    return await decoded(request, schema, await share.read(request) or b"{}", share)


async def decoded(request: web.Request, schema: Schema[R], body: bytes, share: Share) -> R:
    """What is decoded stays in ``share`` until that is closed; the body leaves it.
    Large bodies take turns."""
    if len(body) <= census.SMALL:
        return await _counted(request, schema, body, share)
    async with request.app[SERVER].memory.decoding:
        return await _counted(request, schema, body, share)


async def _counted(request: web.Request, schema: Schema[R], body: bytes, share: Share) -> R:
    ingress = request.app[SERVER].ingress
    counted = census.Census(ingress.facts.context_len if ingress.facts is not None else 0)
    for _ in census.counting(body, counted):
        await asyncio.sleep(0)
    share.take(counted.memory(body))
    await others(body)
    fields, request[IGNORED_FIELDS] = await stepped(schema.steps(body))
    await others(body)
    dump = request.app[SERVER].dump
    if dump is not None:
        dump.add(request[RID], request.method, request.path, body)
    share.give(len(body))
    return fields


async def others(body: bytes) -> None:
    """Let others be answered between two looks at a large body."""
    if len(body) > census.SMALL:
        await pause()

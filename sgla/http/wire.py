"""JSON in and out of aiohttp: bounded bodies, msgspec responses."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from sgla.errors import BadRequest, TooLarge

encode = msgspec.json.Encoder().encode


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """The whole request body. Raises TooLarge, without reading the rest, as soon as it exceeds ``client_max_size``."""
    limit = request.client_max_size
    message = f"the request body is larger than {limit} bytes; send less, or start the server with a larger --max-body-bytes"
    if (request.content_length or 0) > limit:
        raise TooLarge(message)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(message) from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise BadRequest(f"the request body could not be read: {error}") from error

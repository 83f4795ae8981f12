"""JSON in and out of aiohttp: bounded bodies, msgspec responses."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from sgla.errors import BadRequest, TooLarge

encode = msgspec.json.Encoder().encode

BODY_SECONDS = 120  # a client that sends its body more slowly is not waited for


class BodyTimeout(BadRequest):
    status = 408
    code = "request_timeout"


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """The whole request body. Raises BodyTimeout, and TooLarge without reading the rest, as soon as it exceeds ``client_max_size``."""
    limit = request.client_max_size
    message = f"the request body is larger than {limit} bytes; send less, or start the server with a larger --max-body-bytes"
    if (request.content_length or 0) > limit:
        raise TooLarge(message)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise BodyTimeout(f"the request body did not arrive within {BODY_SECONDS} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(message) from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise BadRequest(f"the request body could not be read: {error}") from error

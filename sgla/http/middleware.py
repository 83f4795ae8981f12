"""Around every handler: request ids, CORS, authorization."""

from __future__ import annotations

import hmac
import re
import uuid

from aiohttp import web

from sgla.errors import Unauthorized
from sgla.http.intake import IGNORED_FIELDS
from sgla.http.schema import header_value
from sgla.http.server import RID, UID, unique

OPEN = frozenset(
    {"health", "health_generate", "metrics", "ready", "readyz", "ping"}
)  # first part of the path
CLIENT_GONE = 499  # nginx's number, for metrics and logs only
EXPOSED = "x-request-id, request-id, x-ignored-fields, x-should-retry, Retry-After"
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,200}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,1000}")


def identify(request: web.Request) -> None:
    """Take the client's X-Request-Id if it can be echoed, else make an id."""
    asked = request.headers.get("X-Request-Id", "")
    if _SAFE_ID.fullmatch(asked):
        request[RID], request[UID] = asked, unique(asked)
    else:
        request[RID] = request[UID] = uuid.uuid4().hex


def authorize(request: web.Request, path: str, api_key: str | None) -> None:
    """Raise Unauthorized unless the path is open or the key is right: a bearer token, or Anthropic's x-api-key."""
    if api_key is None or path.split("/")[1] in OPEN:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("no API key was given; send the header 'Authorization: Bearer KEY'")
    if not hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), api_key.encode()):
        raise Unauthorized("the API key is wrong")


def preflight(request: web.Request) -> web.Response:
    """The answer to OPTIONS. The asked headers are listed by name: ``*`` does not cover Authorization."""
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, HEAD, OPTIONS",
        "Access-Control-Allow-Headers": asked
        if _PRINTABLE.fullmatch(asked)
        else "Authorization, Content-Type",
        "Access-Control-Max-Age": "86400",
    }
    return web.Response(status=204, headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every response carries, streams included."""
    headers = response.headers
    headers["x-request-id"] = headers["request-id"] = request.get(RID) or uuid.uuid4().hex
    headers["Access-Control-Allow-Origin"] = "*"
    headers["Access-Control-Expose-Headers"] = EXPOSED
    if ignored := header_value(request.get(IGNORED_FIELDS, [])):
        headers["x-ignored-fields"] = ignored

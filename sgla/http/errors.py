"""Errors on the wire: OpenAI's body for every status, with the headers that steer the clients' retries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from sgla.errors import BadRequest, DeadlineExceeded, SglaError
from sgla.http.wire import json_response
from sgla.messages import Rejected

# A retry can cure these; every other 4xx tells the client to give up at once.
RETRYABLE = frozenset({408, 409, 429})


class Busy(BadRequest):
    """The request conflicts with what the server is doing now."""

    status = 409
    code = "busy"


class Aborted(BadRequest):
    """The request was ended from outside: by ``/abort_request`` or by the scheduler."""

    code = "request_aborted"


class MethodNotAllowed(BadRequest):
    """``allowed``: the methods that the route takes."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.allowed = ", ".join(allowed)


def error_body(error: SglaError | Rejected) -> dict[str, Any]:
    """``{"error": {message, type, param, code}}``; ``code`` is always a string."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: SglaError) -> web.Response:
    return json_response(error_body(error), status=error.status, headers=error_headers(error))


def error_headers(error: SglaError) -> dict[str, str]:
    headers = {}
    hopeless = error.status not in RETRYABLE or error.code == DeadlineExceeded.code  # its time is up
    if 400 <= error.status < 500 and hopeless:
        headers["x-should-retry"] = "false"
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1.0)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    return headers

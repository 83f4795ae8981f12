"""Errors of the router in the bodies of the servers behind it."""

from __future__ import annotations

import math

import msgspec

from sgla.errors import Draining, SglaError
from sgla.route.reply import Reply

ENDS = Draining("the router is shutting down; retry later", retry_after=1.0)


def body_of(error: SglaError, path: str = "") -> bytes:
    """OpenAI's, or for its paths Anthropic's."""
    what = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    if path.startswith("/v1/messages"):
        return msgspec.json.encode({"type": "error", "error": {"type": error.type, "message": error.message}})
    return msgspec.json.encode({"error": what})


def event_of(error: SglaError, path: str) -> bytes:
    """That ends a stream."""
    name = b"event: error\n" if path.startswith("/v1/messages") else b""
    return name + b"data: " + body_of(error, path) + b"\n\n"


def error_reply(error: SglaError, path: str = "") -> Reply:
    wait = max(1, math.ceil(error.retry_after or 1.0)) if error.status in (429, 503) else 0
    return Reply(error.status, "application/json", body_of(error, path), wait)

"""What the API's description says of a handler. It stands above the handler; ``openapi.py`` reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
LINES = "application/x-ndjson"
BINARY = "application/octet-stream"
FORM = "multipart/form-data"
H = TypeVar("H", bound=Callable[..., Any])


class Operation(msgspec.Struct, frozen=True):
    """What one handler does. ``answer``: the type of what it answers with, or a tuple of types. ``stream``:
    the media type that it answers in instead where the body has ``stream: true``. ``query``: names of
    parameters. ``media``: of the answer; of the body ``accepts``. ``optional``: the body may be left out.
    ``any_model``: its ``model`` may be any name, or one in another form. ``health``: 503 is an answer."""

    summary: str
    body: type[msgspec.Struct] | None = None
    answer: Any = Any
    stream: str = ""
    query: tuple[str, ...] = ()
    media: str = JSON
    accepts: str = JSON
    optional: bool = False
    any_model: bool = False
    health: bool = False


OPERATIONS: dict[Callable[..., Any], Operation] = {}


def operation(
    summary: str, body: type[msgspec.Struct] | None = None, answer: Any = Any, **more: Any
) -> Callable[[H], H]:
    """Describes the handler below; see ``Operation``."""

    def note(handler: H) -> H:
        OPERATIONS[handler] = Operation(summary, body, answer, **more)
        return handler

    return note

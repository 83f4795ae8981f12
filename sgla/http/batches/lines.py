"""The lines of a batch's input: checked, and answered with lines in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from sgla.errors import BadRequest, SglaError
from sgla.http.ids import random_id
from sgla.http.request.schema import invalid
from sgla.http.wire import encode

MAX_LINES = 50_000  # requests of one batch
MAX_NUMBER = 1_000_000  # lines of its file, empty ones included
MAX_ID = 512  # characters of a custom_id

Value = msgspec.Raw | msgspec.UnsetType
YES = msgspec.Raw(b"true")


class BadLine(BadRequest):
    """What is wrong with one line; ``custom_id`` if it is known."""

    def __init__(
        self, code: str, message: str, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.code = code
        self.custom_id = custom_id


class Line(msgspec.Struct, kw_only=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Named(msgspec.Struct):
    """What can be told of a line that is no request."""

    custom_id: str | None = None


class Body(msgspec.Struct, kw_only=True):
    """The fields of a request that decide whether it is run at all."""

    model: str | None = None
    stream: Value = msgspec.UNSET
    background: Value = msgspec.UNSET


_LINE, _NAMED, _BODY = msgspec.json.Decoder(Line), msgspec.json.Decoder(Named), msgspec.json.Decoder(Body)


def parsed(text: bytes | None, longest: int) -> Line:
    """Raises BadLine, without a custom_id. ``text`` is None for a line of more than ``longest`` bytes."""
    if text is None:
        raise BadLine(
            "line_too_long",
            f"the line is longer than {longest} bytes; send less, or start "
            "the server with a larger --max-body-bytes",
        )
    try:
        line = _LINE.decode(text)
    except msgspec.ValidationError as error:
        found = invalid(error, Line)
        raise BadLine(
            found.code, found.message.replace("the request body", "the line"), found.param
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"the line is not valid JSON: {error}") from error
    if not 1 <= len(line.custom_id) <= MAX_ID:
        raise BadLine("invalid_value", f"custom_id must have 1 to {MAX_ID} characters", "custom_id")
    return line


def check_request(line: Line, urls: Collection[str], model: Callable[[str | None], str]) -> None:
    """Whether it is for one of the routes ``urls``.
    ``model`` raises for a name that is not served. Raises BadLine."""
    try:
        check_fields(line, urls, model)
    except SglaError as error:
        raise BadLine(error.code, error.message, error.param, line.custom_id) from error


def check_fields(line: Line, urls: Collection[str], model: Callable[[str | None], str]) -> None:
    if line.method != "POST":
        raise BadLine("invalid_method", f"method is {line.method[:40]!r}; it must be POST", "method")
    if line.url not in urls:
        raise BadLine(
            "invalid_url", f"url is {line.url[:100]!r}; the batch is for {' or '.join(urls)}", "url"
        )
    try:
        body = _BODY.decode(line.body)
    except msgspec.ValidationError as error:
        found = invalid(error, Body)
        raise BadLine(
            found.code, found.message.replace("the request body", "body"), found.param or "body"
        ) from error
    model(body.model)
    for name in ("stream", "background"):
        if getattr(body, name) == YES:
            raise BadLine(
                "unsupported_parameter", f"{name}: true is not possible in a batch; leave it out", name
            )


def name_of(text: bytes) -> str | None:
    """The custom_id of a line that is no request, if it has one."""
    try:
        name = _NAMED.decode(text).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return name if name and len(name) <= MAX_ID else None


# what is written


def answer_line(uid: str, custom_id: str, status: int, body: bytes, ignored: list[str]) -> bytes:
    """``body``: JSON. ``ignored``: names of fields, as in the header x-ignored-fields."""
    told = b',"ignored_fields":%b' % encode(ignored) if ignored else b""
    return (
        b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b%b,"body":%b},"error":null}\n'
        % (
            encode(uid),
            encode(custom_id),
            status,
            encode(uid),
            told,
            body,
        )
    )


def error_line(
    number: int, custom_id: str | None, code: str, message: str, param: str | None = None
) -> bytes:
    """Of a request that was not run."""
    error = {"code": code, "message": message, "param": param, "line": number}
    line = {"id": line_id(), "custom_id": custom_id, "response": None, "error": error}
    return encode(line) + b"\n"


def line_id() -> str:
    return f"batch_req_{random_id()}"


def told(number: int, error: BadLine) -> dict[str, Any]:
    """Of the batch's list of errors."""
    return {"code": error.code, "line": number, "message": error.message, "param": error.param}

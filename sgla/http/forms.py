"""Forms (multipart/form-data), read part by part as they come."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam

from sgla.errors import BadRequest
from sgla.http.bodies import BodyTimeout, UnsupportedEncoding

SILENT = 60  # seconds after which the next piece must have come
MAX_FIELDS = 16  # of a form
MAX_LINES = 4096  # of a form outside of its fields: headers, boundaries, and what stands before these
MAX_VALUE = 4096  # bytes of a field that is no file


def ignore_warnings() -> None:
    """Of headers of parts that are wrong:
    their text is the client's, and Python keeps each one that it has shown."""
    for category in (BadContentDispositionHeader, BadContentDispositionParam):
        warnings.filterwarnings("ignore", category=category)


class Content:
    """What a form is read from.
    A line takes microseconds of the loop, however short it is: too many raise BadRequest."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._lines = 0

    async def readline(self, **options: Any) -> bytes:
        self._lines += 1
        if self._lines > MAX_LINES:
            raise BadRequest(f"the form has more than {MAX_LINES} lines outside of its fields")
        return await self._content.readline(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


@asynccontextmanager
async def reading(request: web.Request, fields: str, seconds: float) -> AsyncIterator[None]:
    """Around whatever reads the form of a ``request``, which may take so long. ``fields``: what belongs into
    it, in words. Raises BadRequest for what is no form, UnsupportedEncoding and BodyTimeout."""
    # aiohttp's ``content_type`` is parsed by Python's e-mail package, which takes 0.1 s for a long one.
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise BadRequest(f"a file comes as multipart/form-data with the fields {fields}")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise UnsupportedEncoding("files are taken as they are; leave out Content-Encoding")
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise BodyTimeout(
            f"the file did not arrive within {seconds:g} s, or nothing of it for {SILENT} s"
        ) from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise BadRequest(f"the request body could not be read: {error}") from error
    except (ValueError, AssertionError, RuntimeError) as error:  # aiohttp's, of what is no form
        raise BadRequest(f"the request body is no form: {error}") from error


async def parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    """Of the form, each to be read before the next one. Raises BadRequest for too many."""
    reader = MultipartReader(request.headers, Content(request.content))  # type: ignore[arg-type]
    for _ in range(MAX_FIELDS):
        async with asyncio.timeout(SILENT):
            part = await reader.next()
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise BadRequest("a field of the form is a form itself; send the file as one field")
        yield part
    raise BadRequest(f"the form has more than {MAX_FIELDS} fields")


async def pieces(part: BodyPartReader, size: int) -> AsyncIterator[bytes]:
    """Of a file, of at most so many bytes."""
    while not part.at_eof():
        async with asyncio.timeout(SILENT):
            yield await part.read_chunk(size)


async def text_of(part: BodyPartReader) -> str:
    """The value of a field that is no file. Raises BadRequest for a long one."""
    value = bytearray()
    async for piece in pieces(part, MAX_VALUE):
        value += piece
        if len(value) > MAX_VALUE:
            raise BadRequest(
                f"the field {(part.name or '')[:40]!r} of the form has more than {MAX_VALUE} bytes"
            )
    return value.decode()

"""POST /v1/files: the fields of a form, of which the file goes to the database as it comes."""

from __future__ import annotations

import asyncio
import time
import warnings
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam

from sgla.errors import BadRequest, InvalidField, TooLarge, UnsupportedField
from sgla.http import answer_types as to
from sgla.http.batches.files import PIECE, PURPOSE, TTL, Files, file_object
from sgla.http.bodies import SHARE, BodyTimeout, UnsupportedEncoding
from sgla.http.clients import CLIENT, Client
from sgla.http.operation import FORM, operation
from sgla.http.server import ASKED

PURPOSES = ("assistants", "batch_output", "evals", "fine-tune", "user_data", "vision")  # OpenAI's others
SECONDS = 3600  # that an upload may take
SILENT = 60  # seconds after which the next piece must have come
MAX_FIELDS = 16  # of the form
MAX_LINES = 4096  # of the form outside of its fields: headers, boundaries, and what stands before these
MAX_VALUE = 4096  # bytes of a field that is no file
MAX_FILENAME = 255  # characters
HELD = 4 * PIECE  # bytes of memory that an upload takes
MIN_KEPT = 3600  # seconds


class FileForm(
    msgspec.Struct,
    kw_only=True,
    rename={"anchor": "expires_after[anchor]", "seconds": "expires_after[seconds]"},
):
    """The fields of the form, for its description."""

    purpose: Literal["batch"]
    file: str
    anchor: Literal["created_at"] | None = None
    seconds: int | None = None


def ignore_warnings() -> None:
    """Of headers of parts that are wrong:
    their text is the client's, and Python keeps each one that it has shown."""
    for category in (BadContentDispositionHeader, BadContentDispositionParam):
        warnings.filterwarnings("ignore", category=category)


@operation("OpenAI: upload the input of a batch", FileForm, to.File, accepts=FORM)
async def create(request: web.Request) -> web.Response:
    files = request[ASKED].files
    # aiohttp's ``content_type`` is parsed by Python's e-mail package, which takes 0.1 s for a long one.
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise BadRequest("a file comes as multipart/form-data with the fields purpose and file")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise UnsupportedEncoding("files are taken as they are; leave out Content-Encoding")
    check_size((request.content_length or 0) - MAX_FIELDS * MAX_VALUE, files.longest)
    request[SHARE].take(HELD)
    upload = Upload(files, request[CLIENT])
    try:
        async with asyncio.timeout(SECONDS):
            await upload.read(request)
        return web.Response(body=await upload.finish(), content_type="application/json")
    except TimeoutError as error:
        raise BodyTimeout(
            f"the file did not arrive within {SECONDS} s, or nothing of it for {SILENT} s"
        ) from error
    except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
        raise BadRequest(f"the request body could not be read: {error}") from error
    except (ValueError, AssertionError, RuntimeError) as error:  # aiohttp's, of what is no form
        raise BadRequest(f"the request body is no form: {error}") from error
    finally:
        upload.close()


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


class Upload:
    """A form on its way."""

    def __init__(self, files: Files, client: Client) -> None:
        self._files = files
        self._client = client
        self._fields: dict[str, str] = {}
        self._name = ""
        self._number: int | None = None  # of the file, until it is found
        self._size = 0

    async def read(self, request: web.Request) -> None:
        reader = MultipartReader(request.headers, Content(request.content))  # type: ignore[arg-type]
        for _ in range(MAX_FIELDS):
            async with asyncio.timeout(SILENT):
                part = await reader.next()
            if part is None:
                return
            if not isinstance(part, BodyPartReader):
                raise BadRequest("a field of the form is a form itself; send the file as one field")
            if part.name == "file":
                await self._store(part)
            else:
                self._fields[part.name or ""] = (await value_of(part)).decode()
        raise BadRequest(f"the form has more than {MAX_FIELDS} fields")

    async def _store(self, part: BodyPartReader) -> None:
        if self._number is not None:
            raise BadRequest("the form has more than one file; upload them one by one")
        files, client, name = self._files, self._client, self._client.name
        self._name = (part.filename or "upload")[:MAX_FILENAME]
        number = self._number = await files.open(client)
        count, piece = 0, bytearray()
        while not part.at_eof():
            async with asyncio.timeout(SILENT):
                piece += await part.read_chunk(PIECE)
            if len(piece) < PIECE and not part.at_eof():
                continue
            if piece:
                self._size += len(piece)
                check_size(self._size, files.longest)
                await files.database.run(
                    client, partial(files.put, number=number, piece=count, data=bytes(piece), client=name)
                )
                count += 1
                piece.clear()

    async def finish(self) -> bytes:
        """Have the file found; returns its JSON. Raises for what is missing or wrong in the form."""
        purpose = self._fields.get("purpose")
        if purpose in PURPOSES:
            raise UnsupportedField(
                f"purpose {purpose!r} is not supported by this server; it takes {PURPOSE!r}", param="purpose"
            )
        if purpose != PURPOSE:
            raise InvalidField(f"purpose must be {PURPOSE!r}", param="purpose")
        if self._number is None:
            raise InvalidField("file is required", param="file")
        kept = expiry({name: self._fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")})
        now, number = int(time.time()), self._number
        seen = file_object(self._size, self._name, PURPOSE, now, now + kept)
        json = await self._files.database.run(
            self._client, lambda tx: self._files.show(tx, number, self._client.owner, seen)
        )
        self._number = None
        return json

    def close(self) -> None:
        """Remove what has come, unless it is found."""
        if self._number is not None:
            self._files.drop(self._number, self._client)


async def value_of(part: BodyPartReader) -> bytes:
    value = bytearray()
    while not part.at_eof():
        async with asyncio.timeout(SILENT):
            value += await part.read_chunk(MAX_VALUE)
        if len(value) > MAX_VALUE:
            raise BadRequest(
                f"the field {(part.name or '')[:40]!r} of the form has more than {MAX_VALUE} bytes"
            )
    return bytes(value)


def expiry(asked: dict[str, Any], param: str = "expires_after") -> int:
    """Seconds that a file is kept, of OpenAI's ``{"anchor": "created_at", "seconds": ...}``.
    Raises InvalidField."""
    anchor, seconds = asked["anchor"], asked["seconds"]
    if anchor is None and seconds is None:
        return TTL
    if anchor != "created_at":
        raise InvalidField(f"{param}.anchor must be created_at", param=param)
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and len(text) < 9 and MIN_KEPT <= int(text) <= TTL):
        raise InvalidField(f"{param}.seconds must be from {MIN_KEPT} to {TTL}", param=param)
    return int(text)


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(f"the file is larger than {limit} bytes, which is the limit; send several")

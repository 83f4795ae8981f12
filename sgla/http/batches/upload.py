"""POST /v1/files: the fields of a form, of which the file goes to the database as it comes."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import BodyPartReader, web

from sgla.errors import BadRequest, InvalidField, TooLarge, UnsupportedField
from sgla.http import answer_types as to
from sgla.http.batches.files import PIECE, PURPOSE, TTL, Files, file_object
from sgla.http.bodies import SHARE
from sgla.http.clients import CLIENT, Client
from sgla.http.forms import MAX_FIELDS, MAX_VALUE, parts, pieces, reading, text_of
from sgla.http.operation import FORM, operation
from sgla.http.server import ASKED

PURPOSES = ("assistants", "batch_output", "evals", "fine-tune", "user_data", "vision")  # OpenAI's others
SECONDS = 3600  # that an upload may take
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


@operation("OpenAI: upload the input of a batch", FileForm, to.File, accepts=FORM)
async def create(request: web.Request) -> web.Response:
    files = request[ASKED].files
    upload = Upload(files, request[CLIENT])
    try:
        async with reading(request, "purpose and file", SECONDS):
            check_size((request.content_length or 0) - MAX_FIELDS * MAX_VALUE, files.longest)
            request[SHARE].take(HELD)
            await upload.read(request)
            return web.Response(body=await upload.finish(), content_type="application/json")
    finally:
        upload.close()


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
        async for part in parts(request):
            if part.name == "file":
                await self._store(part)
            else:
                self._fields[part.name or ""] = await text_of(part)

    async def _store(self, part: BodyPartReader) -> None:
        if self._number is not None:
            raise BadRequest("the form has more than one file; upload them one by one")
        files, client, name = self._files, self._client, self._client.name
        self._name = (part.filename or "upload")[:MAX_FILENAME]
        number = self._number = await files.open(client)
        count, piece = 0, bytearray()
        async for read in pieces(part, PIECE):
            piece += read
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

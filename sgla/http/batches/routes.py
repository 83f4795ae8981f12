"""/v1/files and /v1/batches: what OpenAI's API has, for files that are the input and output of batches."""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from sgla.errors import InvalidField, NotFound
from sgla.http import answer_types as to
from sgla.http.batches.files import Files
from sgla.http.batches.runner import ROUTES, RUNNER
from sgla.http.batches.store import FileNotFound
from sgla.http.batches.upload import expiry
from sgla.http.batches.usage import no_usage
from sgla.http.bodies import SHARE
from sgla.http.clients import CLIENT
from sgla.http.conversations.routes import check_metadata
from sgla.http.errors import Busy
from sgla.http.operation import BINARY, operation
from sgla.http.request.intake import intake
from sgla.http.request.paging import page, page_of
from sgla.http.request.schema import Schema
from sgla.http.responses.output import new_id
from sgla.http.server import ASKED, PATH_ID
from sgla.http.state.shelf import UNREAD, Row
from sgla.http.wire import encode, json_response

FILES, BATCHES = "/v1/files", "/v1/batches"
MAX_FILES, MAX_BATCHES = 10_000, 100  # of a page
WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
LONGEST_WINDOW = 168  # hours


class FileInUse(Busy):
    code = "file_in_use"


class BatchNotFound(NotFound):
    code = "batch_not_found"


class ExpiresAfter(msgspec.Struct, kw_only=True):
    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """``completion_window``: hours, as in ``24h``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


CREATE = Schema(BatchRequest)


# files


@operation("OpenAI: files", answer=to.FileList, query=("purpose", "limit", "order", "after"))
async def file_list(request: web.Request) -> web.Response:
    """A page of the client's files, newest first, or oldest first with ``order=asc``;
    with ``purpose`` those alone."""
    files, client, query = request[ASKED].files, request[CLIENT], request.query
    limit, ascending = page_of(request, default=MAX_FILES, most=MAX_FILES)
    after = None
    if "after" in query:
        row = await files.find(query["after"], client)
        if row is None:
            raise InvalidField("after must be the id of a file", param="after")
        after = row.number
    ids, found, more = await files.page(
        client, query.get("purpose"), limit, after, not ascending, request[SHARE]
    )
    return page(list(map(msgspec.Raw, found)), ids, more)


@operation("OpenAI: a file", answer=to.File)
async def file(request: web.Request) -> web.Response:
    _, row = await found(request)
    return web.Response(body=row.json, content_type="application/json")


@operation("OpenAI: forget a file", answer=to.DeletedFile)
async def file_delete(request: web.Request) -> web.Response:
    files, row = await found(request)

    def work(tx: Any) -> None:
        if files.pinned(tx, row.number):
            raise FileInUse("a batch that has not ended reads the file; cancel the batch first")
        files.shelf.remove(tx, row.number)

    await files.database.run(request[CLIENT], work)
    files.tidy()
    return json_response({"id": row.id, "object": "file", "deleted": True})


@operation("OpenAI: what a file has", media=BINARY)
async def file_content(request: web.Request) -> web.StreamResponse:
    files, row = await found(request)
    seen = msgspec.json.decode(row.json)
    left = seen["bytes"]
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(left),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(seen['filename'], safe='')}",
    }
    request[SHARE].take(UNREAD)
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    if request.method != "HEAD":
        async for piece in files.content(request[CLIENT], row.number):
            await response.write(piece)
            left -= len(piece)
        if left and request.transport is not None:
            # It was deleted meanwhile: nobody takes what is cut off for whole.
            request.transport.abort()
    return response


async def found(request: web.Request) -> tuple[Files, Row]:
    """The store, and the file in the path. Raises FileNotFound."""
    files, uid = request[ASKED].files, request[PATH_ID]
    row = await files.find(uid, request[CLIENT])
    if row is None:
        raise FileNotFound(f"there is no file {uid[:100]!r}")
    return files, row


# batches


@operation("OpenAI: run the requests of a file, behind all others", BatchRequest, to.Batch)
async def create(request: web.Request) -> web.Response:
    fields = await intake(request, CREATE)
    if fields.endpoint not in ROUTES:
        raise InvalidField(f"endpoint must be one of {', '.join(ROUTES)}", param="endpoint")
    window = WINDOW.fullmatch(fields.completion_window)
    if window is None or int(window[1]) > LONGEST_WINDOW:
        raise InvalidField(
            f"completion_window must be hours from 1h to {LONGEST_WINDOW}h, such as 24h",
            param="completion_window",
        )
    check_metadata(fields.metadata or {})
    after = fields.output_expires_after
    kept = expiry(
        {"anchor": after and after.anchor, "seconds": after and after.seconds}, "output_expires_after"
    )
    runner, now = request.app[RUNNER], int(time.time())
    seen = batch_object(fields, request[ASKED].model(None), now, now + 3600 * int(window[1]))
    batch = await runner.store.create(request[CLIENT], seen, kept)
    runner.add(batch)
    return json_response(batch.shown())


@operation("OpenAI: batches", answer=to.BatchList, query=("limit", "after"))
async def batch_list(request: web.Request) -> web.Response:
    """A page of the client's batches, newest first."""
    runner = request.app[RUNNER]
    limit, _ = page_of(request, most=MAX_BATCHES)
    rows = await runner.store.page(request[CLIENT], limit + 1, request.query.get("after"))
    data = [msgspec.Raw(now(request, row.id) or row.json) for row in rows[:limit]]
    return page(data, [row.id for row in rows[:limit]], len(rows) > limit)


@operation("OpenAI: a batch", answer=to.Batch)
async def batch(request: web.Request) -> web.Response:
    return web.Response(body=await shown(request), content_type="application/json")


@operation("OpenAI: end a batch with what is done", answer=to.Batch)
async def cancel(request: web.Request) -> web.Response:
    """Have it end with what is done; one that has ended, or is about to, stays as it is."""
    runner = request.app[RUNNER]
    before = await shown(request)
    batch = runner.batches.get(request[PATH_ID])
    if batch is None or batch.wanted:
        return web.Response(body=before, content_type="application/json")
    batch.become("cancelling")
    json = encode(batch.shown())
    try:
        await runner.store.save(batch)
    finally:  # also when the client has gone meanwhile
        runner.end(batch, "cancelled")
    return web.Response(body=json, content_type="application/json")


async def shown(request: web.Request) -> bytes:
    """The batch in the path. Raises BatchNotFound."""
    uid = request[PATH_ID]
    row = await request.app[RUNNER].store.find(uid, request[CLIENT])
    if row is None:
        raise BatchNotFound(f"there is no batch {uid[:100]!r}")
    return now(request, uid) or row.json


def now(request: web.Request, uid: str) -> bytes:
    """A batch that has not ended, as it is now; b"" for one that has."""
    batch = request.app[RUNNER].batches.get(uid)
    return b"" if batch is None else encode(batch.shown())


def batch_object(fields: BatchRequest, model: str, created: int, expires: int) -> dict[str, Any]:
    return {
        "id": new_id("batch"),
        "object": "batch",
        "endpoint": fields.endpoint,
        "model": model,
        "errors": None,
        "input_file_id": fields.input_file_id,
        "completion_window": fields.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": created,
        "in_progress_at": None,
        "expires_at": expires,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": no_usage(),
        "metadata": fields.metadata,
    }

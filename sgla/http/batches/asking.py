"""Asking a route from inside:
the handler that answers over HTTP gets a request that came over no connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from sgla.errors import NotReady, Overloaded, SglaError, TooLarge
from sgla.http.bodies import SHARE, Share
from sgla.http.clients import ADDRESS, CLIENT, Client
from sgla.http.errors import Busy, error_response
from sgla.http.models import chosen
from sgla.http.request.intake import BODY
from sgla.http.server import ASKED, IGNORED_FIELDS, RID, SERVER, TRACE, UID, YIELDS

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_ANSWER = 32 << 20  # bytes of an answer that is kept as one line
HEADERS = CIMultiDictProxy(CIMultiDict({"Content-Type": "application/json"}))


class Answer(NamedTuple):
    """``body``: JSON. ``ignored``: the fields that the route ignored.
    ``later``: the server may have room for the request later."""

    status: int
    body: bytes
    ignored: list[str]
    later: bool = False


class Nowhere:
    """In place of a connection."""

    ssl_context = peername = sockname = transport = None


class Kept(AbstractStreamWriter):
    """In place of what writes to a connection: keeps what it gets, in ``share``. Raises TooLarge."""

    def __init__(self, share: Share) -> None:
        self.pieces: list[bytes] = []
        self.output_size = 0
        self._share = share

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.output_size += len(chunk)
        check_length(self.output_size)
        self._share.take(len(chunk))
        self.pieces.append(bytes(chunk))

    async def write_eof(self, chunk: bytes = b"") -> None:
        if chunk:
            await self.write(chunk)

    async def drain(self) -> None:
        pass

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        pass

    def enable_chunking(self) -> None:
        pass

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        pass


class Inside(web.Request):
    """A request to the handler of ``path``."""

    def __init__(self, app: web.Application, path: str, writer: Kept) -> None:
        task = asyncio.current_task()
        assert task is not None
        super().__init__(
            RawRequestMessage("POST", path, HttpVersion11, HEADERS, (), False, None, False, False, URL(path)),
            EMPTY_PAYLOAD,
            Nowhere(),  # type: ignore[arg-type]
            writer,
            task,
            asyncio.get_running_loop(),
        )
        self._inside = app

    @property
    def app(self) -> web.Application:
        return self._inside


async def ask(
    app: web.Application,
    handler: Handler,
    path: str,
    body: bytes,
    client: Client,
    rid: str,
    choices: Callable[[int], None],
) -> Answer:
    """What ``handler`` answers ``client``'s ``body``, errors included. The request yields to all that come
    over connections. ``choices`` is told how many it opens at once."""
    server = app[SERVER]
    share = Share(server.memory, client.runs_as)
    writer = Kept(share)
    request = Inside(app, path, writer)
    request[CLIENT], request[ADDRESS], request[SHARE], request[BODY], request[YIELDS] = (
        client,
        "",
        share,
        body,
        choices,
    )
    request[RID] = request[UID] = rid
    request[ASKED] = server
    share.body = len(body)
    try:
        status, answer, later = await answered(handler, request, writer)
        if TRACE in request and (tracing := request[ASKED].metrics.tracing) is not None:
            tracing.end(request[TRACE], status)
        return Answer(status, answer, list(dict.fromkeys(request.get(IGNORED_FIELDS, []))), later)
    finally:
        share.close()


async def answered(handler: Handler, request: web.Request, writer: Kept) -> tuple[int, bytes, bool]:
    """Status, body, and whether a later try may fare better:
    what can never be admitted is another kind of error."""
    later = False
    try:
        request[SHARE].take(request[SHARE].body)
        async with chosen(request, handler):
            response = await handler(request)
        if not isinstance(response, web.Response):
            return response.status, b"".join(writer.pieces), later
        assert isinstance(response.body, bytes)
        check_length(len(response.body))
    except SglaError as error:
        later = isinstance(error, Busy) or error.status in (Overloaded.status, NotReady.status)
        response = error_response(error)
    except Exception:
        log.exception("a line of a batch failed (%s)", request[RID])
        response = error_response(SglaError("internal error; the server's log has the details"))
    assert isinstance(response.body, bytes)
    return response.status, response.body, later


def check_length(size: int) -> None:
    if size > MAX_ANSWER:
        raise TooLarge(
            f"the answer has more than {MAX_ANSWER} bytes, which is the limit of a line; ask for less"
        )

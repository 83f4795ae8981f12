"""POST /open_session and /close_session; the turns between them are requests to /generate."""

from __future__ import annotations

from aiohttp import web

from sgla.http import answer_types as to
from sgla.http.clients import CLIENT
from sgla.http.native.session_store import CloseSessionRequest, OpenSessionRequest
from sgla.http.operation import operation
from sgla.http.request.intake import intake
from sgla.http.request.schema import Schema
from sgla.http.server import ASKED
from sgla.http.wire import json_response

OPEN = Schema(OpenSessionRequest)
CLOSE = Schema(CloseSessionRequest)


@operation("SGLang: begin a session of turns", OpenSessionRequest, str)
async def open_session(request: web.Request) -> web.Response:
    fields = await intake(request, OPEN)
    return json_response(request[ASKED].sessions.open(fields, request[CLIENT]))


@operation("SGLang: end a session", CloseSessionRequest, to.Done)
async def close_session(request: web.Request) -> web.Response:
    fields = await intake(request, CLOSE, resting=True)
    request[ASKED].sessions.close(fields.session_id, request[CLIENT].owner)
    return json_response({"success": True})

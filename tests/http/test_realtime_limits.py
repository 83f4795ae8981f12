"""/v1/realtime: what one client can do to others with events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import WSMsgType
from http_fake import FakeIngress, ScriptedIngress
from http_site import Serve

from sgla.http import connections
from sgla.http.realtime import session
from sgla.http.server import SERVER

ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a" * 4000}]}


@pytest.mark.parametrize("kind", [WSMsgType.TEXT, WSMsgType.PING])
async def test_a_flood_of_events_lets_others_run(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, kind: WSMsgType
) -> None:
    """A turn of the loop handles one event, however many have arrived."""
    site = await serve(FakeIngress())
    turns: list[int] = []
    turn = 0
    sent = session.Session._send
    pong = session.web.WebSocketResponse.pong

    async def counted(self: session.Session, kind: str, **fields: Any) -> None:
        turns.append(turn)
        await sent(self, kind, **fields)

    async def counted_pong(self: Any, message: bytes = b"") -> None:
        turns.append(turn)
        await pong(self, message)

    monkeypatch.setattr(session.Session, "_send", counted)
    monkeypatch.setattr(session.web.WebSocketResponse, "pong", counted_pong)
    async with site.http.ws_connect("/v1/realtime", autoping=False) as socket:
        await socket.receive()
        writer = socket._writer
        for _ in range(200):
            await writer.send_frame(b"{}" if kind == WSMsgType.TEXT else b"", kind)
        while len(turns) < 201:
            turn += 1
            await asyncio.sleep(0)
    assert len(set(turns[1:])) == 200


async def test_settings_keep_their_memory(serve: Serve) -> None:
    site = await serve(ScriptedIngress([], "<tool_call>"))
    budget = site.app[SERVER].memory
    async with site.http.ws_connect("/v1/realtime") as socket:
        await socket.receive()
        used = []
        for settings in (
            {"instructions": "a" * 5000},
            {"tools": [{"type": "function", "name": "b", "description": "b" * 5000}]},
            {"instructions": ""},
        ):
            await socket.send_json({"type": "session.update", "session": settings})
            assert (await socket.receive_json())["type"] == "session.updated"
            await asyncio.sleep(0.01)
            used.append(budget.used)
        assert used[0] > 5000
        assert used[1] > used[0] + 5000
        assert 5000 < used[2] < used[1] - 4000
    for _ in range(100):
        if not budget.used:
            return
        await asyncio.sleep(0.01)
    assert budget.used == 0


async def test_items_of_a_response_count_as_if_they_were_sent(serve: Serve) -> None:
    """An item that is named many times counts as often."""
    site = await serve(FakeIngress(), max_body_bytes=20_000)
    async with site.http.ws_connect("/v1/realtime") as socket:
        await socket.receive()
        await socket.send_json({"type": "conversation.item.create", "item": {**ITEM, "id": "a"}})
        for _ in range(2):
            await socket.receive()
        for count, answer in ((6, "error"), (3, "response.created")):
            response = {"input": [{"id": "a"}] * count, "max_output_tokens": 1}
            await socket.send_json({"type": "response.create", "response": response})
            event = await socket.receive_json()
            assert event["type"] == answer
            if answer == "error":
                assert "limit is 20000" in event["error"]["message"]
                assert not site.ingress.jobs
        assert site.ingress.jobs[0].size > 12_000


async def test_a_session_gives_its_place_to_another_client(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.0)
    site = await serve(FakeIngress(), api_key=["a", "b"], max_connections=2)
    first = [
        await site.http.ws_connect("/v1/realtime", headers={"Authorization": "Bearer a"}) for _ in range(2)
    ]
    answer = await site.http.get("/v1/models", headers={"Authorization": "Bearer b"})
    assert answer.status == 200
    assert json.loads(await answer.read())["data"]
    for socket in first:
        await socket.close()


async def test_sessions_end_with_the_server(serve: Serve) -> None:
    """Also that of a client that does not answer."""
    site = await serve(FakeIngress())
    async with site.http.ws_connect("/v1/realtime") as socket:
        await socket.receive()
        await asyncio.wait_for(session.close_all(site.app), 5)
        message = await socket.receive()
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1001)
    for _ in range(100):
        if not site.app[session.SOCKETS]:
            return
        await asyncio.sleep(0.01)
    assert not site.app[session.SOCKETS]

"""/v1/realtime: conversations in text over a WebSocket, in events that the openai client knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_fake import FakeIngress, ScriptedIngress
from http_site import Serve, Site
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from sgla.http.server import SERVER

KNOWN: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
HELLO = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
HI = {"instructions": "hi"}
WAYS, TOKENS, MOST = "output_modalities", "max_output_tokens", "session.max_response_output_tokens"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


class Talk:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_json({"type": kind, **fields})

    async def next(self) -> dict[str, Any]:
        event: dict[str, Any] = await self.socket.receive_json(timeout=10)
        KNOWN.validate_python(event)
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events

    async def ask(self, text: str = "hello", **response: Any) -> list[dict[str, Any]]:
        """Add a message, ask for a response; the response's events."""
        item = {**HELLO, "content": [{"type": "input_text", "text": text}]}
        await self.send("conversation.item.create", item=item)
        await self.until("conversation.item.done")
        await self.send("response.create", response={"max_output_tokens": 5, **response})
        return await self.until("response.done")


@pytest.fixture
async def talk(serve: Serve) -> AsyncIterator[tuple[Site, Talk]]:
    site = await serve(FakeIngress(pace=0.001))
    async with site.http.ws_connect("/v1/realtime?model=fake") as socket:
        talk = Talk(socket)
        assert (await talk.next())["session"]["model"] == "fake"
        yield site, talk
    for _ in range(100):
        if not site.ingress.open_jobs and not site.app[SERVER].memory.used:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something is still held")


async def test_a_conversation(talk: tuple[Site, Talk]) -> None:
    site, line = talk
    await line.send("session.update", session={"type": "realtime", "instructions": "be kind"})
    updated = await line.next()
    assert (updated["type"], updated["session"]["instructions"]) == ("session.updated", "be kind")
    events = await line.ask()
    assert [event["type"] for event in events if "delta" not in event["type"]] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = events[-1]["response"]
    assert done["output"][0]["content"][0]["text"] == text
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert done["usage"]["output_tokens"] == 5
    await line.ask("and?")
    assert [(m["role"], m["content"]) for m in site.ingress.jobs[-1].messages or []] == [
        ("system", "be kind"),
        ("user", "hello"),
        ("assistant", text),
        ("user", "and?"),
    ]


async def test_a_response_beside_the_conversation(talk: tuple[Site, Talk]) -> None:
    site, line = talk
    events = await line.ask(conversation="none", instructions="own", input=[HELLO], metadata={"a": "b"})
    assert not any(event["type"].startswith("conversation") for event in events)
    assert events[-1]["response"]["metadata"] == {"a": "b"}
    assert events[-1]["response"]["conversation_id"] is None
    assert [m["content"] for m in site.ingress.jobs[-1].messages or []] == ["own", "hello"]
    await line.send("response.create", response={"max_output_tokens": 1})
    await line.until("response.done")
    assert [m["content"] for m in site.ingress.jobs[-1].messages or []] == ["hello"]


async def test_items_are_placed_found_and_deleted(talk: tuple[Site, Talk]) -> None:
    site, line = talk
    for uid, behind in (("a", None), ("c", None), ("b", "a"), ("first", "root")):
        await line.send(
            "conversation.item.create",
            item={**HELLO, "id": uid, "content": [{"type": "input_text", "text": uid}]},
            previous_item_id=behind,
        )
        added = await line.next()
        assert added["previous_item_id"] == {"c": "a", "b": "a"}.get(uid)
        await line.next()
    await line.send("conversation.item.retrieve", item_id="b")
    assert (await line.next())["item"]["content"][0]["text"] == "b"
    await line.send("conversation.item.delete", item_id="b")
    assert (await line.next())["item_id"] == "b"
    await line.send("response.create", response={"max_output_tokens": 1})
    await line.until("response.done")
    assert [m["content"] for m in site.ingress.jobs[-1].messages or []] == ["first", "a", "c"]


async def test_a_response_is_cancelled(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.005))
    async with site.http.ws_connect("/v1/realtime") as socket:
        line = Talk(socket)
        await line.next()
        await line.send("conversation.item.create", item=HELLO)
        await line.until("conversation.item.done")
        await line.send("response.create")
        await line.until("response.output_text.delta")
        await line.send("response.create")
        assert (await line.until("error"))[-1]["error"]["code"] == "busy"
        await line.send("response.cancel")
        done = (await line.until("response.done"))[-1]["response"]
        assert (done["status"], done["output"][0]["status"]) == ("cancelled", "incomplete")
        assert done["usage"]["output_tokens"] > 0
        await line.send("response.cancel")
        assert (await line.next())["error"]["param"] == "response_id"
        assert not site.ingress.open_jobs
        await line.send("response.create")
        await line.until("response.output_text.delta")
    for _ in range(100):
        if not site.ingress.open_jobs:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the response goes on without its client")


async def test_functions_are_called(serve: Serve) -> None:
    script = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    site = await serve(ScriptedIngress(script, "<tool_call>"))
    async with site.http.ws_connect("/v1/realtime") as socket:
        line = Talk(socket)
        await line.next()
        await line.send("session.update", session={"tools": [TOOL]})
        await line.next()
        events = await line.ask()
        (call,) = events[-1]["response"]["output"]
        assert (call["type"], call["name"], call["arguments"]) == (
            "function_call",
            "weather",
            '{"city": "Rome"}',
        )
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        await line.send("conversation.item.create", item=result)
        await line.until("conversation.item.done")
        await line.send("response.create")
        await line.until("response.done")
        messages = site.ingress.jobs[-1].messages or []
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == call["call_id"]


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "input_audio_buffer.commit"}, "type"),
        ({"type": "conversation.item.truncate", "item_id": "x"}, "type"),
        ({"type": "session.update", "session": {WAYS: ["audio"]}}, f"session.{WAYS}"),
        ({"type": "session.update", "session": {"audio": {"output": {"voice": "x"}}}}, "session.audio"),
        ({"type": "session.update", "session": {"turn_detection": {"type": "x"}}}, "session.turn_detection"),
        ({"type": "session.update", "session": {"max_output_tokens": 0}}, f"session.{TOKENS}"),
        ({"type": "session.update", "session": {"model": "none"}}, "session.model"),
        ({"type": "session.update", "session": {"temperature": "x"}}, "session.temperature"),
        ({"type": "session.update", "session": {"tools": [{"type": "function"}]}}, "session.tools[0].name"),
        ({"type": "session.update", "session": {"tools": [{"type": "web_search"}]}}, "session.tools[0]"),
        ({"type": "session.update", "session": {"tool_choice": "sometimes"}}, "session.tool_choice"),
        ({"type": "session.update", "session": {"max_response_output_tokens": 0}}, MOST),
        ({"type": "response.create", "response": {**HI, "max_output_tokens": 0}}, f"response.{TOKENS}"),
        ({"type": "response.create", "response": {**HI, "tools": [{"name": 1}]}}, "response.tools[0]"),
        ({"type": "response.create", "response": {**HI, "tool_choice": "required"}}, "response.tool_choice"),
        ({"type": "session.update"}, "session"),
        ({"type": "response.create", "response": {"modalities": ["audio", "text"]}}, "response.modalities"),
        ({"type": "response.create"}, "response.input"),
        ({"type": "response.create", "response": {"input": [{"role": "x"}]}}, "response.input[0].role"),
        ({"type": "conversation.item.delete", "item_id": "x"}, "item_id"),
        ({"type": "conversation.item.create", "item": HELLO, "previous_item_id": "x"}, "previous_item_id"),
        ({"type": "conversation.item.create", "item": {"type": "martian"}}, "item"),
        (
            {
                "type": "conversation.item.create",
                "item": {**HELLO, "content": [{"type": "input_audio", "audio": "x"}]},
            },
            "item.content[0]",
        ),
        ({"type": "hello"}, "type"),
        ({}, "type"),
    ],
)
async def test_wrong_events_are_refused_and_the_session_goes_on(
    talk: tuple[Site, Talk], event: dict[str, Any], param: str
) -> None:
    _, line = talk
    await line.socket.send_json({**event, "event_id": "mine"})
    error = await line.next()
    assert (error["type"], error["error"]["param"]) == ("error", param), error
    assert (await line.ask())[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" ", "the event is empty; a JSON object is expected"),
        ('{"type": "conversation.item.delete", "item_id": null}', "item_id is required"),
        (
            '{"type": "conversation.item.create", "item": {"role": "x"}}',
            "item.role must be one of user, assistant, system, developer",
        ),
        (
            '{"type": "response.create", "response": {"conversation": "x"}}',
            "response.conversation must be auto or none, got 'x'",
        ),
        (
            '{"type": "session.update", "session": {"max_output_tokens": 0}}',
            "session.max_output_tokens must be between 1 and 2147483647, got 0",
        ),
        (
            '{"type": "session.update", "session": {"tools": [{"type": "function"}]}}',
            "session.tools[0].name is required",
        ),
    ],
)
async def test_errors_have_the_names_that_the_client_sent(
    talk: tuple[Site, Talk], text: str, message: str
) -> None:
    _, line = talk
    await line.socket.send_str(text)
    assert (await line.next())["error"]["message"] == message


async def test_what_is_no_json_is_refused(talk: tuple[Site, Talk]) -> None:
    _, line = talk
    await line.socket.send_str("{")
    assert "not valid JSON" in (await line.next())["error"]["message"]
    await line.socket.send_str("[" * 200)
    assert (await line.next())["type"] == "error"


async def test_a_session_needs_a_socket_a_model_and_a_key(serve: Serve) -> None:
    site = await serve(api_key=["secret"])
    for path, headers, status in (
        ("/v1/realtime", {}, 401),
        ("/v1/realtime?model=none", {"Authorization": "Bearer secret"}, 404),
    ):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await site.http.ws_connect(path, headers=headers)
        assert refused.value.status == status
    assert (await site.get("/v1/realtime", headers={"Authorization": "Bearer secret"}))[0] == 400

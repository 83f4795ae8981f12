"""/v1/conversations through the openai client, and responses in conversations."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site, at_rest

from sgla.errors import WorkerDied
from sgla.http.app import SERVER
from sgla.messages import Event, Usage

USER: Any = {"type": "message", "role": "user", "content": "one"}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "done"}


def texts(site: Site) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in site.ingress.jobs[-1].messages]


async def test_the_life_of_a_conversation(site: Site) -> None:
    api = site.client.conversations
    made = await api.create(items=[USER, CALL, OUTPUT], metadata={"topic": "demo"})
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
    assert await api.retrieve(made.id) == made
    changed = await api.update(made.id, metadata={"topic": "other"})
    assert (changed.created_at, changed.metadata) == (made.created_at, {"topic": "other"})
    assert await api.retrieve(made.id) == changed
    items = (await api.items.list(made.id, order="asc")).data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    message: Any = items[0]
    assert (message.role, message.status, message.content[0].type) == ("user", "completed", "input_text")
    assert message.content[0].text == "one"
    assert await api.items.retrieve(message.id, conversation_id=made.id) == message
    left = await api.items.delete(message.id, conversation_id=made.id)
    assert left == changed
    with pytest.raises(openai.NotFoundError) as missing:
        await api.items.retrieve(message.id, conversation_id=made.id)
    assert missing.value.code == "item_not_found"
    gone = await api.delete(made.id)
    assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
    for call in (
        api.retrieve(made.id),
        api.delete(made.id),
        api.items.list(made.id),
        api.update(made.id, metadata={}),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            await call
        assert missing.value.code == "conversation_not_found"
    await at_rest(site.app[SERVER].database)
    for table in ("items", "parts", "objects", "shares", "leftovers"):
        query = f"SELECT * FROM {table}"
        assert (
            await site.app[SERVER].database.run(None, lambda tx, query=query: tx.execute(query).fetchall())
            == []
        )  # type: ignore[misc]


async def test_items_come_in_pages(site: Site) -> None:
    api = site.client.conversations
    made = await api.create()
    for start in (0, 20, 40):
        added = await api.items.create(
            made.id,
            items=[{**USER, "content": str(i), "id": f"i{i}"} for i in range(start, start + 20)][
                : 45 - start
            ],
        )
        assert (added.first_id, added.has_more) == (f"i{start}", False)
    for order, expected in (("asc", range(45)), ("desc", range(44, -1, -1))):
        page = await api.items.list(made.id, order=order)  # type: ignore[arg-type]
        assert (len(page.data), page.has_more, page.last_id) == (20, True, page.data[-1].id)
        assert [int(item.content[0].text) async for item in page] == list(expected)  # type: ignore[union-attr]
    await api.items.delete("i3", conversation_id=made.id)
    page = await api.items.list(
        made.id, order="asc", limit=2, after="i2", include=["message.output_text.logprobs"]
    )
    assert [item.id for item in page.data] == ["i4", "i5"]


async def test_what_cannot_be_asked_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await site.client.conversations.create(items=[{**USER, "id": "mine"}])
    path = f"/v1/conversations/{made.id}"
    for body, param in (
        ({"items": [USER] * 21}, "items"),
        ({"items": [{"type": "martian"}]}, "items"),
        ({"items": [{"type": "function_call_output", "output": "x"}]}, "items"),
        ({"items": [{"type": "item_reference", "id": "none"}]}, "items"),
        ({"items": [{**USER, "id": "mine"}]}, "items"),
        ({"items": [{**USER, "id": "same"}] * 2}, "items"),
    ):
        status, reply = await site.post(f"{path}/items", body)
        assert (status, reply["error"]["param"]) == (400, param), reply
        assert "input" not in reply["error"]["message"]
    for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}):
        for where in ("/v1/conversations", path):
            status, reply = await site.post(where, {"metadata": metadata})
            assert (status, reply["error"]["param"]) == (400, "metadata")
    for query in ("limit=0", "limit=101", "order=up", "after=none", "include=everything"):
        status, reply = await site.get(f"{path}/items?{query}")
        assert (status, reply["error"]["param"]) == (400, query.partition("=")[0])
    monkeypatch.setattr("sgla.http.conversations.store.MAX_ITEMS", 3)
    status, reply = await site.post(f"{path}/items", {"items": [USER] * 3})
    assert (status, "would have 4 items, the limit is 3" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_responses_go_on_in_a_conversation(site: Site, stream: bool, store: bool) -> None:
    made = await site.client.conversations.create(items=[{**USER, "id": "mine"}])

    async def ask(text: Any, **more: Any) -> Any:
        asked = {"model": "fake", "input": text, "max_output_tokens": 3, "store": store, **more}
        if not stream:
            return await site.client.responses.create(**asked)
        return [event async for event in await site.client.responses.create(**asked, stream=True)][
            -1
        ].response

    first = await ask("two", conversation=made.id)
    assert first.conversation.id == made.id
    assert texts(site) == [("user", "one"), ("user", "two")]
    second = await ask([{"role": "user", "content": "three", "id": "mine"}], conversation={"id": made.id})
    said = [("user", "one"), ("user", "two"), ("assistant", first.output_text), ("user", "three")]
    assert texts(site) == said
    items = (await site.client.conversations.items.list(made.id, order="asc")).data
    assert [(item.role, item.content[0].text) for item in items] == [*said, ("assistant", second.output_text)]  # type: ignore[union-attr]
    assert len({item.id for item in items}) == 5
    assert [item.status for item in items] == ["completed"] * 2 + ["incomplete", "completed", "incomplete"]  # type: ignore[union-attr]
    await ask("alone")
    assert texts(site) == [("user", "alone")]
    counted = await site.client.responses.input_tokens.count(model="fake", conversation=made.id, input="x")
    assert counted.input_tokens > 30
    if store:
        with pytest.raises(openai.BadRequestError, match=f"send conversation: '{made.id}'"):
            await ask("on", previous_response_id=second.id)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        await ask("on", previous_response_id=second.id, conversation=made.id)
    with pytest.raises(openai.NotFoundError) as missing:
        await ask("on", conversation="conv_none")
    assert missing.value.code == "conversation_not_found"
    assert not site.app[SERVER].conversations.busy


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("end", ["stop", "error", "cancel"])
async def test_one_response_at_a_time(serve: Serve, background: bool, end: str) -> None:
    site = await serve(FakeIngress(manual=True))
    made = await site.client.conversations.create(items=[USER])
    asked: Any = {"input": "x", "conversation": made.id, "background": background}
    running = asyncio.ensure_future(site.post("/v1/responses", asked))
    while not site.ingress.jobs:
        await asyncio.sleep(0.001)
    path = f"/v1/conversations/{made.id}/items"
    for other, body in (("/v1/responses", asked), (path, {"items": [USER]})):
        status, reply = await site.post(other, body)
        assert (status, reply["error"]["code"]) == (409, "conversation_locked")
    assert len((await site.get(path))[1]["data"]) == 1
    rid = site.ingress.jobs[0].rid
    if end == "stop":
        site.ingress.push(
            rid, Event(rid=rid, index=0, text="y", tokens=[1], finish="stop", usage=Usage(1, 1))
        )
    elif end == "error":
        site.ingress.push(rid, WorkerDied("gone").rejected(rid))
    else:
        await site.app[SERVER].abort(None)
    await running
    while site.app[SERVER].conversations.busy:
        await asyncio.sleep(0.001)
    items = (await site.get(f"{path}?order=asc"))[1]["data"]
    assert [item["content"][0]["text"] for item in items] == (["one", "x", "y"] if end == "stop" else ["one"])
    assert (await site.post(path, {"items": [USER]}))[0] == 200


async def test_a_refused_request_leaves_its_conversation_free(site: Site) -> None:
    made = await site.client.conversations.create()
    for wrong in ({"input": "x" * 5000}, {"input": "x", "tools": [{"type": "web_search"}]}, {"input": []}):
        for stream in (False, True):
            status, _ = await site.post("/v1/responses", {**wrong, "conversation": made.id, "stream": stream})
            assert status == 400
    assert not site.app[SERVER].conversations.busy
    assert (await site.get(f"/v1/conversations/{made.id}/items"))[1]["data"] == []


async def test_items_are_referred_to_across_conversations_and_responses(site: Site) -> None:
    first = await site.client.responses.create(model="fake", input="a", max_output_tokens=2)
    refer: Any = {"type": "item_reference", "id": first.output[0].id}
    made = await site.client.conversations.create(items=[USER, refer])
    items = (await site.client.conversations.items.list(made.id, order="asc")).data
    assert items[1].content[0].text == first.output_text  # type: ignore[union-attr]
    await site.client.responses.create(model="fake", input=[{"type": "item_reference", "id": items[0].id}])
    assert texts(site) == [("user", "one")]


async def test_a_conversation_belongs_to_its_key_and_outlives_a_server(serve: Serve, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"api_key": ["anna", "ben"], "state_path": str(tmp_path)}
    site = await serve(key="anna", **settings)
    made = await site.client.conversations.create(items=[{**USER, "id": "mine"}], metadata={"a": "b"})
    await site.client.responses.create(model="fake", input="two", conversation=made.id, max_output_tokens=2)
    items = (await site.client.conversations.items.list(made.id)).data
    await site.app[SERVER].database.close()
    site = await serve(key="anna", **settings)
    assert await site.client.conversations.retrieve(made.id) == made
    assert (await site.client.conversations.items.list(made.id)).data == items
    await site.client.responses.create(model="fake", input="three", conversation=made.id)
    assert len(site.ingress.jobs[-1].messages) == 4
    by = {"headers": {"Authorization": "Bearer ben"}}
    path = f"/v1/conversations/{made.id}"
    for method, tail in (
        ("GET", ""),
        ("POST", ""),
        ("DELETE", ""),
        ("GET", "/items"),
        ("POST", "/items"),
        ("GET", "/items/mine"),
        ("DELETE", "/items/mine"),
    ):
        body = {"metadata": {}, "items": [USER]}
        async with site.http.request(method, path + tail, json=body, **by) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (
                404,
                "conversation_not_found",
            )
    status, _ = await site.post("/v1/responses", {"input": "x", "conversation": made.id}, **by)
    assert status == 404


async def test_conversations_are_bounded(serve: Serve) -> None:
    site = await serve(response_store=2)
    ids = [(await site.post("/v1/conversations", {"items": [USER]}))[1]["id"] for _ in range(4)]
    assert [(await site.get(f"/v1/conversations/{uid}"))[0] for uid in ids] == [404, 404, 200, 200]
    await site.post(f"/v1/conversations/{ids[2]}/items", {"items": [USER]})  # it is the younger one now
    await site.post("/v1/conversations")
    assert [(await site.get(f"/v1/conversations/{uid}"))[0] for uid in ids[2:]] == [200, 404]
    site = await serve(response_store=0)
    status, reply = await site.post("/v1/conversations")
    assert (status, "--response-store" in reply["error"]["message"]) == (400, True)

"""What is kept of responses: bounded, shared among owners, found without a search."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla import clock
from sgla.http.app import SERVER
from sgla.http.responses import store as module
from sgla.http.responses.store import Kept, Part, ResponseStore, Stored
from sgla.messages import Event, Usage


def entry(uid: str, owner: str = "", items: int = 0, size: int = 10, before: Stored | None = None) -> Stored:
    part = Part(before.part if before else None, [Kept(f"{uid}.{i}", b"1") for i in range(items)], owner)
    return Stored(id=uid, owner=owner, part=part, asked=items, uid=None, live={"id": uid}, size=size)


def names(store: ResponseStore) -> list[str]:
    return list(store._entries)


def test_old_responses_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "now", lambda: now)
    store = ResponseStore(3, ttl=10.0)
    for i in range(5):
        store.put(entry(str(i)))
        now += 1
    assert [store.get(str(i), "") is not None for i in range(5)] == [False, False, True, True, True]
    store.put(entry("9", size=1 << 40))
    assert len(store) == 0
    store.put(entry("6"))
    now += 10
    assert store.get("6", "") is None
    assert (store._bytes, store._shares) == (0, {})


def test_who_has_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(6, ttl=10.0)
    for uid in "ab":
        store.put(entry(uid, "ben"))
    for i in range(20):
        store.put(entry(str(i), "anna"))
    assert names(store) == ["a", "b", "16", "17", "18", "19"]
    for uid in "cdefgh":
        store.put(entry(uid, "ben"))
    assert [len(share.entries) for share in store._shares.values()] == [3, 3]
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    store = ResponseStore(100, ttl=10.0)
    store.put(entry("small", "ben"))
    for i in range(20):
        store.put(entry(str(i), "anna", size=400))
    assert names(store) == ["small", "18", "19"]


def test_a_conversation_is_all_of_the_client_that_began_it() -> None:
    store = ResponseStore(9, ttl=60.0)
    first = entry("first", "anna", items=2)
    store.put(first)
    store.put(entry("second", "ben", items=1, before=first))
    assert list(store._shares) == ["anna"]
    store.delete("first")
    assert store._bytes == store._shares["anna"].bytes > 2 * module.ITEM
    store.delete("second")
    assert (store._bytes, store._shares) == (0, {})


def test_an_owner_finds_what_is_its_own() -> None:
    store = ResponseStore(6, ttl=10.0)
    store.put(entry("r", "anna", items=1))
    assert store.get("r", "anna") is not None
    assert store.item("r.0", "anna") == b"1"
    assert store.get("r", "ben") is None
    assert store.item("r.0", "ben") is None
    assert store.get("r", "") is None


def test_items_are_found_without_a_search() -> None:
    """A search would look at 1,000,000,000 of them."""
    store = ResponseStore(300, ttl=60.0)
    for i in range(100):
        store.put(entry(str(i), items=500))
    assert all(store.item("0.0", "") == b"1" for _ in range(20_000))


def test_the_newest_item_of_an_id_is_found() -> None:
    store = ResponseStore(9, ttl=60.0)
    for i in range(3):
        kept = [Kept("same", b"%d" % i), Kept("", b"2"), Kept("same", b"3")]
        store.put(Stored(id=str(i), owner="", part=Part(None, kept, ""), asked=3, uid=None))
    for i in (2, 0, 1):
        store.delete(str(i))
        found = {2: b"1", 0: b"1", 1: None}[i]
        assert store.item("same", "") == found
    assert store.item("", "") is None


def test_what_a_conversation_needs_is_kept_and_counted_once() -> None:
    """The bytes are those of all responses and of all parts that can be reached."""
    chance = random.Random(0)
    store, known = ResponseStore(40, ttl=1e9), [entry("first", "a", 1)]
    for step in range(2000):
        before = chance.choice([None, *known[-20:]])  # one of them may have gone
        owner = before.owner if before else chance.choice("abc")
        new = entry(str(step), owner, chance.randrange(3), chance.randrange(99), before)
        store.put(new)
        known.append(new)
        if chance.random() < 0.5:
            store.end(new, [{"id": f"{step}.out", "x": "y" * chance.randrange(50)}])
        if chance.random() < 0.2:
            store.delete(chance.choice(names(store)))
    assert len(store) > 20
    parts = set()
    for stored in store._entries.values():
        part: Part | None = stored.part
        while part is not None:
            parts.add(part)
            part = part.before
    size = sum(part.size for part in parts) + sum(stored.size for stored in store._entries.values())
    assert store._bytes == size == sum(share.bytes for share in store._shares.values())
    assert {
        part for share in store._shares.values() for places in share.items.values() for part in places
    } == {stored.part for stored in store._entries.values() if stored.part.items}
    for uid in names(store):
        store.delete(uid)
    assert (store._bytes, store._shares) == (0, {})


def test_a_long_chain_is_freed() -> None:
    store, last = ResponseStore(2, ttl=60.0), None
    for i in range(30_000):
        last = entry(str(i), before=last)
        store.put(last)
    assert store._bytes == 20
    del last
    for uid in names(store):
        store.delete(uid)


# over HTTP ------------------------------------------------------------------------------------------------------------


def sizes(site: Site) -> ResponseStore:
    return site.app[SERVER].responses


async def test_references_share_what_they_refer_to_and_are_bounded(serve: Serve) -> None:
    site = await serve(FakeIngress(context=1 << 22), max_body_bytes=8_000)
    create = site.client.responses.create
    first = await create(model="fake", input=[{"role": "user", "content": "x" * 2_000, "id": "long"}])
    refer = {"type": "item_reference", "id": "long"}
    await create(model="fake", input=[refer] * 3)  # type: ignore[list-item]
    texts = [message["content"] for message in site.ingress.jobs[-1].messages]
    assert [len(text) for text in texts] == [2_000] * 3
    assert texts[0] is texts[1]
    with pytest.raises(openai.APIStatusError) as large:
        await create(model="fake", input=[refer] * 4)  # type: ignore[list-item]
    assert (large.value.status_code, "--max-body-bytes" in large.value.message) == (413, True)
    assert "8000" in large.value.message
    asked, status, rounds = {"input": "y" * 1_500, "previous_response_id": first.id}, 200, 0
    while status == 200:
        status, reply = await site.post("/v1/responses", asked)
        asked["previous_response_id"] = reply.get("id")
        rounds += 1
    assert (status, reply["error"]["code"]) == (413, "request_too_large")
    assert 2 < rounds < 6


async def test_what_is_stored_takes_memory_of_the_request(site: Site) -> None:
    store, budget = sizes(site), site.app[SERVER].budget
    first = await site.client.responses.create(model="fake", input="x" * 50_000, background=True)
    asked = {"input": "y", "previous_response_id": first.id, "max_output_tokens": 1}
    while (entry := store.get(first.id, "")) is None or entry.uid is not None:
        await asyncio.sleep(0.001)
    budget.limit = 70_000
    assert (await site.post("/v1/responses", {"input": "y"}))[0] == 200
    status, reply = await site.post("/v1/responses", {**asked, "input": "y" * 20_000})
    assert (status, "--request-memory-bytes" in reply["error"]["message"]) == (413, True)
    assert budget.used == 0


async def test_a_conversation_has_a_limit_of_items(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.http.responses.conversation.MAX_ITEMS", 3)
    user: Any = {"role": "user", "content": "x"}
    first = await site.client.responses.create(model="fake", input=[user] * 2, max_output_tokens=2)
    for more in ({"input": [user] * 4}, {"input": [user], "previous_response_id": first.id}):
        with pytest.raises(openai.BadRequestError, match="has 4 items, the limit is 3"):
            await site.client.responses.create(model="fake", **more)


async def test_what_arrives_in_chunks_is_counted_too(site: Site) -> None:
    async def body() -> Any:
        yield json.dumps({"input": "x" * 3000, "max_output_tokens": 1}).encode()

    for count in (1, 2):
        async with site.http.post("/v1/responses", data=body()) as response:
            assert response.status == 200
        assert sizes(site)._bytes > 3000 * count


async def test_input_items_come_in_pages(site: Site) -> None:
    items: Any = [{"role": "user", "content": str(i), "id": f"i{i}"} for i in range(45)]
    response = await site.client.responses.create(model="fake", input=items, max_output_tokens=1)
    listed = site.client.responses.input_items.list
    for order, expected in (("asc", range(45)), ("desc", range(44, -1, -1))):
        page = await listed(response.id, order=order)  # type: ignore[arg-type]
        assert (len(page.data), page.has_more) == (20, True)
        assert [int(item.content[0].text) async for item in page] == list(expected)
    page = await listed(response.id, limit=45)
    assert (len(page.data), page.has_more) == (45, False)
    for wrong in ("limit=0", "limit=101", "limit=x", "after=i45", f"after={response.output[0].id}"):
        status, reply = await site.get(f"/v1/responses/{response.id}/input_items?{wrong}")
        assert (status, reply["error"]["param"]) == (400, wrong.split("=")[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_pushed_out_in_the_background_is_ended(serve: Serve, stream: bool) -> None:
    """Its answer could not be found any more."""
    site = await serve(FakeIngress(manual=True), response_store=2)
    for i in range(3):
        async with site.http.post(
            "/v1/responses", json={"input": "x", "background": True, "stream": stream}
        ) as response:
            await response.content.readline()
        assert len(site.ingress.open_jobs) == min(i + 1, 2)
    uid = names(sizes(site))[0]
    assert (await site.http.delete(f"/v1/responses/{uid}")).status == 200
    assert len(site.ingress.open_jobs) == 1


async def test_events_count_while_they_come(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 20_000)
    site = await serve()
    asked = {"model": "fake", "input": "x", "background": True, "stream": True, "max_output_tokens": 200}
    async with site.http.post("/v1/responses", json=asked) as response:
        last = (await response.text()).rstrip().rpartition("data: ")[2]
    assert json.loads(last)["response"]["status"] == "cancelled"
    assert (len(sizes(site)), sizes(site)._bytes) == (0, 0)
    site.ingress.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["finish", "cancel", "delete"])
async def test_a_response_in_the_background_holds_its_memory_until_it_has_ended(
    serve: Serve, stream: bool, end: str
) -> None:
    site = await serve(FakeIngress(manual=True))
    budget = site.app[SERVER].budget
    asked = {"input": "x", "background": True, "stream": stream, "metadata": {"k": "v" * 200_000}}
    for _ in range(2):
        async with site.http.post("/v1/responses", json=asked) as response:
            await response.content.readline()
    assert len(site.ingress.open_jobs) == 2
    assert budget.used > 400_000
    assert sizes(site)._bytes > 400_000
    for uid, rid in zip(names(sizes(site)), list(site.ingress.open_jobs)):
        if end == "finish":
            site.ingress.push(rid, Event(rid=rid, index=0, finish="stop", usage=Usage()))
        elif end == "cancel":
            assert (await site.post(f"/v1/responses/{uid}/cancel"))[0] == 200
        else:
            assert (await site.http.delete(f"/v1/responses/{uid}")).status == 200
    async with asyncio.timeout(5):
        while budget.used:
            await asyncio.sleep(0.01)
    assert not budget.of_client
    kept = 0 if end == "delete" else 2
    assert (len(sizes(site)), sizes(site)._bytes > 400_000) == (kept, kept > 0)


async def test_responses_in_the_background_share_the_memory(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), request_memory_bytes=1 << 20)
    asked = {"input": "x", "background": True, "metadata": {"k": "v" * 100_000}}
    statuses = [(await site.http.post("/v1/responses", json=asked)).status for _ in range(12)]
    assert statuses[0] == 200
    assert statuses[-1] == 429

"""What is kept of responses: bounded, shared among owners, found without a search."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sqlite3
import threading
import weakref
from collections import Counter
from typing import Any

import openai
import pytest
from aiohttp import web
from http_fake import FakeIngress, make_event
from http_site import Serve, Site, at_rest

from sgla import clock
from sgla.http.app import SERVER
from sgla.http.clients import Client
from sgla.http.responses.background import Recorder
from sgla.http.responses.items import ITEM, Kept
from sgla.http.responses.store import Place, ResponseStore, Stored
from sgla.http.server import SCHEMAS
from sgla.http.state import shelf as shelf_module
from sgla.http.state.database import BACKLOG_BYTES, Database
from sgla.http.state.shelf import ENTRY, PART, Bounds
from sgla.messages import Event, Usage

DAY = 86400.0


def make(limit: int, size: int = 128 << 20, ttl: float = DAY) -> ResponseStore:
    return ResponseStore(Database(None, SCHEMAS), Bounds(limit, size, ttl))


def entry(uid: str, owner: str = "", items: int = 0, size: int = 0, place: Place | None = None) -> Stored:
    """``size``: bytes of its JSON beside those of ``{}``."""
    return Stored(
        id=uid,
        client=Client(owner, owner),
        asked=[Kept(f"{uid}.{i}", b"1") for i in range(items)],
        place=place or Place(),
        uid=None,
        live={"x" * (size - 5): 1} if size else {},
    )


def put(store: ResponseStore, new: Stored, *output: dict[str, Any]) -> Stored:
    """A response that comes and ends at once."""
    store.open(new)
    store.end(new, output)
    return new


async def behind(store: ResponseStore, uid: str, owner: str = "") -> Place:
    place = Place()
    await store.earlier(Client(owner, owner), uid, None, {}, 1 << 30, place)
    return place


async def rows(store: ResponseStore, query: str) -> list[Any]:
    await at_rest(store.shelf.database)
    return await store.shelf.database.run(None, lambda tx: tx.execute(query).fetchall())


async def names(store: ResponseStore) -> list[str]:
    return [uid for (uid,) in await rows(store, "SELECT id FROM objects ORDER BY number")]


async def taken(store: ResponseStore) -> int:
    return sum(size for (size,) in await rows(store, "SELECT bytes FROM totals WHERE kind = 'response'"))


async def item(store: ResponseStore, uid: str, owner: str) -> bytes:
    """The item that a reference finds; b"" for none."""
    return (await store.earlier(Client(owner, owner), None, None, {uid: 1}, 1 << 30, None)).named[uid]


async def test_old_responses_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "wall", lambda: now)
    store = make(3, size=20_000, ttl=10.0)
    for i in range(5):
        put(store, entry(str(i)))
        assert await store.find(str(i), Client("", "")) is not None
        now += 1
    assert await names(store) == ["2", "3", "4"]
    put(store, entry("9", size=30_000))
    assert await names(store) == []
    put(store, entry("6", items=2))
    assert await store.find("6", Client("", "")) is not None
    now += 10
    assert await store.find("6", Client("", "")) is None
    store.shelf.sweep()
    assert (await names(store), await taken(store)) == ([], 0)
    assert await rows(store, "SELECT * FROM shares") == await rows(store, "SELECT * FROM parts") == []


async def test_who_has_most_makes_room() -> None:
    store = make(6)
    for uid in "ab":
        put(store, entry(uid, "ben"))
    for i in range(20):
        put(store, entry(str(i), "anna"))
    assert await names(store) == ["a", "b", "16", "17", "18", "19"]
    for uid in "cdefgh":
        put(store, entry(uid, "ben"))
    assert await rows(store, "SELECT client, count FROM shares") == [("anna", 3), ("ben", 3)]
    store = make(100, size=3 * ENTRY + 1000)
    put(store, entry("small", "ben"))
    for i in range(20):
        put(store, entry(str(i), "anna", size=400))
    assert await names(store) == ["small", "18", "19"]


async def test_much_goes_in_several_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "wall", lambda: now)
    store = make(1000, ttl=10.0)
    for i in range(300):
        put(store, entry(str(i)))
    assert len(await names(store)) == 300
    now += 20
    put(store, entry("new"))
    count = "SELECT count(*) FROM objects"
    ((left,),) = await store.shelf.run(Client(""), "new", lambda tx: tx.execute(count).fetchall())
    assert 250 < left < 300
    assert await names(store) == ["new"]
    assert await rows(store, "SELECT * FROM leftovers") == []


async def test_a_conversation_is_all_of_the_client_that_began_it() -> None:
    store = make(9)
    put(store, entry("first", "anna", items=2))
    place = await behind(store, "first", "anna")
    put(store, entry("second", "ben", items=1, place=place))
    assert await rows(store, "SELECT client FROM shares") == [("anna",)]
    assert await store.delete("first", Client("anna", "anna"))
    assert await taken(store) > 3 * ITEM + ENTRY
    assert await store.delete("second", Client("ben", "ben"))
    assert await taken(store) == 0


async def test_an_owner_finds_what_is_its_own() -> None:
    store = make(6)
    put(store, entry("r", "anna", items=1))
    assert await store.find("r", Client("anna", "anna")) is not None
    assert await item(store, "r.0", "anna") == b"1"
    assert await store.find("r", Client("ben", "ben")) is None
    assert await item(store, "r.0", "ben") == b""
    assert await store.find("r", Client("", "")) is None
    assert not await store.delete("r", Client("ben", "ben"))


async def test_items_are_found_without_a_search() -> None:
    """A search for each would look at 60,000,000 of them."""
    store = make(300)
    for i in range(40):
        put(store, entry(str(i), items=500))
    wanted = Counter({f"{i % 40}.{i // 40}": 2 for i in range(3000)})
    found = await store.earlier(Client(""), None, None, wanted, 1 << 20, None)
    assert set(found.named) == set(wanted)
    assert set(found.named.values()) == {b"1"}
    assert found.size == 6000
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    def work(tx: sqlite3.Connection) -> None:
        tx.set_progress_handler(count, 1000)

    await store.shelf.database.run(None, work)
    await store.earlier(Client(""), None, None, wanted, 1 << 20, None)
    assert steps < 500  # thousands of SQLite's instructions


async def test_the_newest_item_of_an_id_is_found() -> None:
    store = make(9)
    for i in range(3):
        new = entry(str(i))
        new.asked = [Kept("same", b"%d" % i), Kept("", b"2"), Kept("same", b"3")]
        put(store, new)
    for i in (2, 0, 1):
        await store.delete(str(i), Client("", ""))
        assert await item(store, "same", "") == {2: b"1", 0: b"1", 1: b""}[i]
    assert await item(store, "", "") == b""


async def test_what_a_conversation_needs_is_kept_and_counted_once() -> None:
    """The bytes are those of all responses and of all parts that can be reached."""
    chance = random.Random(0)
    store = make(40)
    put(store, entry("first", "a", 1))
    for step in range(600):
        known = await rows(store, "SELECT id, owner FROM objects ORDER BY number DESC LIMIT 20")
        before, owner = chance.choice([("", chance.choice("abc")), *known])
        place = await behind(store, before, owner) if before else Place()
        for uid, of in chance.sample(known, 2) if len(known) > 9 and chance.random() < 0.2 else ():
            await store.delete(uid, Client(of, of))
        new = entry(str(step), owner, chance.randrange(3), place=place)
        if chance.random() < 0.1:
            store.drop(new)
        elif chance.random() < 0.3:
            store.open(new)
            await store.put(new)
            store.end(new, [])
        else:
            put(store, new, {"id": f"{step}.out", "x": "y" * chance.randrange(50)})
    parts = await rows(store, "SELECT number, before, size FROM parts")
    before_of = {number: before for number, before, _ in parts}
    reached: set[int | None] = set()
    for (number,) in await rows(store, "SELECT part FROM responses"):
        while number is not None:
            reached.add(number)
            number = before_of[number]
    assert len(await names(store)) > 20
    assert len(parts) == len(reached) > 20
    sizes = [size for (size,) in await rows(store, "SELECT size FROM objects")]
    assert await taken(store) == sum(size for _, _, size in parts) + sum(sizes)
    for uid, owner in await rows(store, "SELECT id, owner FROM objects"):
        await store.delete(uid, Client(owner, owner))
    assert await taken(store) == 0
    for table in ("parts", "items", "responses", "shares"):
        assert await rows(store, f"SELECT * FROM {table}") == []


@pytest.mark.parametrize("put_first", [False, True])
async def test_what_the_disk_cannot_follow_leaves_nothing(put_first: bool) -> None:
    store = make(9)
    put(store, entry("0", items=1))
    new = entry("1", items=1, place=await behind(store, "0"))
    store.open(new)
    if put_first:
        await store.put(new)
    disk = threading.Event()
    store.shelf.database.queue(None, lambda tx: disk.wait(), BACKLOG_BYTES)
    store.end(new, [])
    disk.set()
    assert await names(store) == ["0"]
    assert len(await rows(store, "SELECT 1 FROM parts")) == 1


async def test_a_long_chain_is_freed() -> None:
    store = make(2)
    put(store, entry("0", items=1))
    for i in range(1, 1200):
        put(store, entry(str(i), items=1, place=await behind(store, str(i - 1))))
    assert len(await rows(store, "SELECT 1 FROM parts")) == 1200
    for uid in await names(store):
        await store.delete(uid, Client("", ""))
    assert await rows(store, "SELECT * FROM parts") == await rows(store, "SELECT * FROM items") == []


# over HTTP


def stored(site: Site) -> ResponseStore:
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
    store, budget = stored(site), site.app[SERVER].memory
    first = await site.client.responses.create(model="fake", input="x" * 50_000, background=True)
    asked = {"input": "y", "previous_response_id": first.id, "max_output_tokens": 1}
    while store.live(first.id, "") is not None:
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
        assert await taken(stored(site)) > 3000 * count


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


async def changes(store: ResponseStore) -> int:
    await at_rest(store.shelf.database)
    return await store.shelf.database.run(None, lambda tx: tx.total_changes)


async def test_a_stream_in_memory_is_written_once_unless_somebody_asks(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    store = site.app[SERVER].responses
    for asked in (False, True):
        before = await changes(store)
        stream = await site.client.responses.create(model="fake", input="x", stream=True)
        uid = (await anext(aiter(stream))).response.id  # type: ignore[union-attr]
        if asked:
            (item,) = (await site.client.responses.input_items.list(uid)).data
            assert item.content[0].text == "x"  # type: ignore[union-attr]
        else:
            assert await changes(store) == before
        job = site.ingress.jobs[-1]
        site.ingress.push(job.rid, make_event(job, site.ingress.prompt(job), 0, 0, last=True))
        async for _ in stream:
            pass
        assert (await site.client.responses.retrieve(uid)).status == "incomplete"
        assert len((await site.client.responses.input_items.list(uid)).data) == 1
    assert await rows(store, "SELECT count(*) FROM objects") == [(2,)]


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
    uid = (await names(stored(site)))[0]
    assert (await site.http.delete(f"/v1/responses/{uid}")).status == 200
    assert len(site.ingress.open_jobs) == 1


async def test_events_count_while_they_come(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.005), state_bytes=1 << 20)
    stored(site).shelf.bounds = stored(site).shelf.bounds._replace(bytes=20_000)
    asked = {"model": "fake", "input": "x", "background": True, "stream": True, "max_output_tokens": 200}
    async with site.http.post("/v1/responses", json=asked) as response:
        last = (await response.text()).rstrip().rpartition("data: ")[2]
    assert json.loads(last)["response"]["status"] == "cancelled"
    assert (len(await names(stored(site))), await taken(stored(site))) == (0, 0)
    site.ingress.check()


@pytest.mark.parametrize("part", [61, 1000, PART])
async def test_large_events_are_read_in_parts(site: Site, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """A client that does not read makes the server hold no more than one of them."""
    monkeypatch.setattr(shelf_module, "PART", part)
    asked = {
        **{"input": "x", "background": True, "stream": True, "max_output_tokens": 3},
        "metadata": {"k": "v" * max(100, part)},
    }
    async with site.http.post("/v1/responses", json=asked) as response:
        whole = await response.read()
    store = stored(site)
    (uid,) = await names(store)
    while store.live(uid, "") is not None:
        await asyncio.sleep(0.001)
    found = await store.find(uid, Client("", ""))
    assert found is not None
    events = whole.split(b"\n\n")
    for number in range(len(events) + 1):
        parts = [data async for data in store.events(Client(""), found, number)]
        assert b"".join(parts) == b"\n\n".join(events[number:])
        assert sum(data.count(b"\n\n") for data in parts) == max(0, len(events) - 1 - number)
        assert max(map(len, parts), default=0) <= part
    path, budget = f"/v1/responses/{uid}?stream=true", site.app[SERVER].memory
    async with site.http.get(path) as response:
        assert await response.read() == whole
    budget.limit = 100
    assert (await site.get(path))[0] == 413
    assert budget.used == 0


async def test_events_of_a_response_that_has_ended_are_freed_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector of circles may come much later."""
    made: list[weakref.ref[Recorder]] = []
    begin = Recorder.__init__

    def told(self: Recorder, *args: Any) -> None:
        begin(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Recorder, "__init__", told)
    asked = {"input": "x", "background": True, "stream": True, "max_output_tokens": 3}
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            async with site.http.post("/v1/responses", json=asked) as response:
                await response.read()
        assert len(made) == 3
        async with asyncio.timeout(5):
            while any(recorder() is not None for recorder in made):
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_live_events_are_written_in_parts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    write = web.StreamResponse.write

    async def told(self: web.StreamResponse, data: Any) -> None:
        sizes.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", told)
    asked = {"input": "x", "background": True, "stream": True, "max_output_tokens": 200}
    async with site.http.post("/v1/responses", json={**asked, "metadata": {"k": "v" * 300_000}}) as response:
        whole = await response.read()
    assert len(whole) > 900_000
    assert max(sizes) == PART
    (uid,) = await names(stored(site))
    async with site.http.get(f"/v1/responses/{uid}?stream=true") as response:
        assert await response.read() == whole


@pytest.mark.parametrize("replayed", [False, True])
async def test_who_does_not_read_holds_memory_of_the_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, replayed: bool
) -> None:
    """Of a stream in the background, that of its blocks, although the response has ended; of a stored
    response, its JSON."""
    monkeypatch.setattr("sgla.http.responses.answer.MAX_ECHOED", 16 << 20)
    site = await serve(FakeIngress(manual=not replayed))
    asked = {"input": "x", "background": True, "stream": not replayed, "metadata": {"k": "v" * 8_000_000}}
    body = json.dumps(asked).encode()
    budget = site.app[SERVER].memory
    request = b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    if replayed:
        uid = (await site.post("/v1/responses", asked))[1]["id"]
        while stored(site).live(uid, "") is not None or budget.used:
            await asyncio.sleep(0.01)
        request = f"GET /v1/responses/{uid} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1024)
    writer.write(request)
    await writer.drain()
    if not replayed:
        while not site.ingress.open_jobs:
            await asyncio.sleep(0.01)
        for rid in list(site.ingress.open_jobs):
            site.ingress.push(rid, Event(rid=rid, index=0, finish="stop", usage=Usage()))
    await asyncio.sleep(0.5)
    assert not site.ingress.open_jobs
    assert budget.used > 7_000_000 * (1 if replayed else 4)
    writer.transport.abort()
    async with asyncio.timeout(5):
        while budget.used:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["finish", "cancel", "delete"])
async def test_a_response_in_the_background_holds_its_memory_until_it_has_ended(
    serve: Serve, stream: bool, end: str
) -> None:
    site = await serve(FakeIngress(manual=True))
    budget = site.app[SERVER].memory
    asked = {"input": "x", "background": True, "stream": stream, "metadata": {"k": "v" * 200_000}}
    for _ in range(2):
        async with site.http.post("/v1/responses", json=asked) as response:
            await response.content.readline()
    assert len(site.ingress.open_jobs) == 2
    assert budget.used > 400_000
    assert await taken(stored(site)) > 400_000
    for uid, rid in zip(await names(stored(site)), list(site.ingress.open_jobs)):
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
    assert (len(await names(stored(site))), await taken(stored(site)) > 400_000) == (kept, kept > 0)


async def test_responses_in_the_background_share_the_memory(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), request_memory_bytes=1 << 20)
    asked = {"input": "x", "background": True, "metadata": {"k": "v" * 100_000}}
    statuses = [(await site.http.post("/v1/responses", json=asked)).status for _ in range(12)]
    assert statuses[0] == 200
    assert statuses[-1] == 429

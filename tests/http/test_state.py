"""The database of what clients store: what outlives a server, and what its folder may be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_fake import FakeIngress
from http_site import Serve, Site, at_rest

from sgla.errors import ConfigError, Overloaded, StorageFailed
from sgla.http.app import SERVER
from sgla.http.clients import Client
from sgla.http.errors import error_headers
from sgla.http.server import SCHEMAS
from sgla.http.state import shelf
from sgla.http.state.database import BACKLOG_BYTES, NAME, VACUUMED, VERSION, WAITING, Database
from sgla.messages import Event, Usage

ANNA, BEN = Client("anna", "anna"), Client("ben", "ben")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "some" / "state"


def left(folder: Path) -> None:
    """A database as a server leaves it."""
    asyncio.run(Database(str(folder), SCHEMAS).close())


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        Database(str(folder), SCHEMAS)
    assert refused.value.param == "state_path"
    return refused.value.message


def test_a_folder_is_one_servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(folder)
    monkeypatch.setattr("sgla.http.state.database.CHECKED", 0)
    database = Database(str(folder), SCHEMAS)
    message = refusal(folder)
    assert str(folder) in message
    assert f"in use by another server, process {os.getpid()}" in message
    asyncio.run(database.close())
    left(folder)
    assert (folder.stat().st_mode & 0o777, (folder / NAME).stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_disk_that_is_full_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr("sgla.http.state.database.prepared", full)
    assert refusal(folder).endswith(
        "the disk is full; make room on it, or choose another folder for --state-path"
    )


def test_another_version_is_refused(folder: Path) -> None:
    left(folder)
    with sqlite3.connect(folder / NAME) as other:
        other.execute(f"PRAGMA user_version = {VERSION + 6}")
    message = refusal(folder)
    assert f"version {VERSION + 6} of the tables, this server knows version {VERSION}" in message


def test_what_is_no_state_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / NAME) as other:
        other.execute("CREATE TABLE mine (x)")
    assert "is no state of sgla" in refusal(folder)


@pytest.mark.parametrize("where", [0, 4096 * 3])
def test_damage_is_said_plainly(folder: Path, where: int) -> None:
    left(folder)
    with (folder / NAME).open("r+b") as file:
        file.seek(where)
        file.write(b"\xa5" * 4096)
    message = refusal(folder)
    assert f"{NAME} is damaged" in message
    assert "backup" in message


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refusal(tmp_path / "file" / "state")


async def test_transactions_are_all_or_nothing_and_in_order() -> None:
    database = Database(None, ["CREATE TABLE numbers (n INTEGER);"])

    def add(n: int, fail: bool = False) -> Any:
        def work(tx: sqlite3.Connection) -> None:
            tx.execute("INSERT INTO numbers VALUES (?)", (n,))
            if fail:
                raise ValueError(n)

        return work

    for n in range(3):
        database.queue(ANNA, add(n))
    with pytest.raises(ValueError, match="3"):
        await database.run(ANNA, add(3, fail=True))
    database.queue(ANNA, add(4, fail=True))
    asyncio.ensure_future(database.run(ANNA, add(5))).cancel()
    await asyncio.sleep(0)
    assert await database.run(ANNA, lambda tx: tx.execute("SELECT n FROM numbers").fetchall()) == [
        (0,),
        (1,),
        (2,),
    ]
    assert database.failures == 1
    for _ in range(2):
        await database.close()
    with pytest.raises(StorageFailed, match="is ending"):
        await database.run(ANNA, add(6))


async def test_what_waits_for_the_disk_is_bounded() -> None:
    database = Database(None, [])
    for _ in range(4):
        database.queue(None, lambda tx: None, 16 << 20)
    with pytest.raises(StorageFailed, match="does not keep up"):
        database.queue(None, lambda tx: None, 64 << 20)
    database.queue(None, lambda tx: None)
    assert database.failures == 1
    await database.close()


async def test_clients_take_turns() -> None:
    """One with much to do has a step, then everybody else; what a client asks for is done in its order."""
    database, done = Database(None, []), list[str]()
    disk = threading.Event()
    database.queue(Client("disk"), lambda tx: disk.wait())

    def work(name: str) -> Any:
        return lambda tx: done.append(name)

    def parts(name: str) -> Any:
        def steps(tx: sqlite3.Connection) -> Iterator[None]:
            for i in range(3):
                done.append(f"{name}.{i}")
                yield

        return steps

    for name in ("a0", "a1"):
        database.queue(ANNA, work(name))
    asking = [asyncio.ensure_future(database.run(ANNA, parts("a2")))]
    await asyncio.sleep(0)
    database.queue(ANNA, work("a3"))
    database.clean(None, parts("server"))
    asking += [asyncio.ensure_future(database.run(BEN, parts("b0")))]
    await asyncio.sleep(0)
    database.queue(BEN, work("b1"))
    disk.set()
    await asyncio.gather(*asking)
    await at_rest(database)
    assert " ".join(done) == "a0 server.0 b0.0 a1 server.1 b0.1 a2.0 server.2 b0.2 a2.1 a2.2 b1 a3"
    await database.close()


async def test_what_waits_for_a_client_is_bounded() -> None:
    database = Database(None, [])
    disk = threading.Event()
    database.queue(None, lambda tx: disk.wait())
    asking = [asyncio.ensure_future(database.run(ANNA, lambda tx: 1)) for _ in range(WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"{WAITING} requests of yours") as refused:
        await database.run(ANNA, lambda tx: 1)
    assert error_headers(refused.value)["Retry-After"] == "1"
    asking += [asyncio.ensure_future(database.run(ANNA, lambda tx: 1, always=True))]
    asking += [asyncio.ensure_future(database.run(BEN, lambda tx: 1))]
    half = BACKLOG_BYTES // 2
    database.queue(ANNA, lambda tx: None, half)
    with pytest.raises(StorageFailed, match="does not keep up"):
        database.queue(ANNA, lambda tx: None, 1)
    database.queue(BEN, lambda tx: None, half)
    disk.set()
    assert set(await asyncio.gather(*asking)) == {1}
    await at_rest(database)
    assert await database.run(ANNA, lambda tx: 2) == 2
    await database.close()


@pytest.mark.parametrize("on_disk", [False, True])
async def test_what_is_free_is_given_back(folder: Path, on_disk: bool) -> None:
    database = Database(str(folder) if on_disk else None, ["CREATE TABLE large (x BLOB);"])
    large = (VACUUMED + 1000) * 4096

    def pages(tx: sqlite3.Connection) -> int:
        return int(tx.execute("PRAGMA page_count").fetchone()[0])

    await database.run(None, lambda tx: tx.execute("INSERT INTO large VALUES (zeroblob(?))", (large,)))
    await database.run(None, lambda tx: tx.execute("DELETE FROM large"))
    before = await database.run(None, pages)
    database.give_back()
    await at_rest(database)
    after = await database.run(None, pages)
    assert before > VACUUMED + 1000
    assert after < (1100 if on_disk else 600)
    await database.close()


async def test_what_is_being_written_is_waited_for_in_its_writers_line() -> None:
    """Without keys others know its id."""
    site = shelf.Shelf(Database(None, SCHEMAS), "some", shelf.Bounds(9, 1 << 20, 1e9))
    disk = threading.Event()
    site.database.queue(None, lambda tx: disk.wait())
    for name in "xyz":
        site.queue(ANNA, name, lambda tx, name=name: site.add(tx, name, ANNA, b"1", 1), 1)  # type: ignore[misc]
    find = site.run(BEN, "z", lambda tx: site.find(tx, "z", ANNA.owner))
    asking = asyncio.ensure_future(find)
    await asyncio.sleep(0)
    disk.set()
    assert await asking is not None
    await site.database.close()


async def test_a_clean_up_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sgla.http.state.database.PAUSES", (0.001, 0.004))
    caplog.set_level("INFO")
    database, done, tries = Database(None, []), list[str](), 0

    def clean(name: str) -> Any:
        def work(tx: sqlite3.Connection) -> str:
            nonlocal tries
            tries += 1
            if tries < 9:
                raise sqlite3.OperationalError("database or disk is full")
            return name

        return work

    for name in "abc":
        database.clean(ANNA, clean(name), done.append)
    async with asyncio.timeout(5):
        while len(done) < 3:
            await asyncio.sleep(0.001)
    assert sorted(done) == ["a", "b", "c"]
    assert database.failures == 8
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    database.clean(ANNA, clean("d"), done.append)
    await at_rest(database)
    assert done[-1] == "d"
    await database.close()


# servers


async def again(serve: Serve, site: Site, *args: Any, **settings: Any) -> Site:
    """Another server with the state of one that has ended."""
    await site.app[SERVER].database.close()
    return await serve(*args, **settings)


def by(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


async def story(site: Site, key: str) -> tuple[list[str], list[Any]]:
    """Responses of several kinds; their ids, and what is told about them."""
    user = {"role": "user", "content": "one", "id": "mine"}
    ids: list[str] = []
    for asked in (
        {"input": [user], "metadata": {"a": "b"}},
        {"input": "two", "stream": True},
        {"input": "three", "background": True, "stream": True},
        {"input": [{"type": "item_reference", "id": "mine"}]},
    ):
        more = {"max_output_tokens": 3, **({"previous_response_id": ids[-1]} if ids else {})}
        async with site.http.post("/v1/responses", json={**asked, **more}, **by(key)) as response:
            text = await response.text()
            assert response.status == 200, text
        ids.append("resp_" + text.partition('"resp_')[2].partition('"')[0])
    return ids, await told(site, key, ids)


async def told(site: Site, key: str, ids: list[str]) -> list[Any]:
    seen: list[Any] = []
    for uid in ids:
        for tail in ("", "/input_items?order=asc", "?stream=true&starting_after=2"):
            async with site.http.get(f"/v1/responses/{uid}{tail}", **by(key)) as response:
                seen.append((response.status, await response.text()))
    asked = {"input": "on", "previous_response_id": ids[-1], "max_output_tokens": 1, "store": False}
    status, _ = await site.post("/v1/responses", asked, **by(key))
    seen += [status, site.ingress.jobs[-1].messages if status == 200 else None]
    return seen


async def test_responses_outlive_a_server(serve: Serve, folder: Path) -> None:
    settings = {"state_path": str(folder), "api_key": ["anna", "ben"]}
    site = await serve(**settings)
    ids, before = await story(site, "anna")
    assert [status for status, _ in before[:12]] == [
        200,
        200,
        400,
        200,
        200,
        400,
        200,
        200,
        200,
        200,
        200,
        400,
    ]
    assert len(before[-1]) == 9
    site = await again(serve, site, **settings)
    assert await told(site, "anna", ids) == before
    assert {answer[0] for answer in (await told(site, "ben", ids))[:12]} == {404}


async def test_memory_and_disk_tell_the_same(serve: Serve, folder: Path) -> None:
    stories = []
    for where in ({}, {"state_path": str(folder)}):
        site = await serve(api_key=["anna"], **where)
        ids, seen = await story(site, "anna")
        stories.append(plain(seen, ids))
    assert stories[0] == stories[1]


def plain(seen: list[Any], ids: list[str]) -> str:
    """Without what is different each time: random ids and times."""
    text = re.sub(r"(resp|msg|item)_[0-9a-f]{32}", r"\1", json.dumps(seen))
    return re.sub(r'(created_at|completed_at)\\\\?":\d+', "", text)


async def test_what_was_in_the_making_has_failed(serve: Serve, folder: Path) -> None:
    """The database as it is at a moment is what a killed server leaves."""
    site = await serve(FakeIngress(manual=True), state_path=str(folder))
    ids = []
    for stream in (False, True):
        body = {"input": "x" * 20_000, "background": True, "stream": stream, "metadata": {"a": "b" * 20_000}}
        async with site.http.post("/v1/responses", json=body) as response:
            ids.append("resp_" + (await response.content.readany()).decode().partition('"resp_')[2][:32])
    for job in site.ingress.jobs:
        site.ingress.push(job.rid, Event(rid=job.rid, index=0, text="so far", tokens=[1], usage=Usage(1, 1)))
    await asyncio.sleep(0.01)
    copy = folder.parent / "copy"
    copy.mkdir()
    await at_rest(site.app[SERVER].database)
    with sqlite3.connect(folder / NAME) as one, sqlite3.connect(copy / NAME) as other:
        one.backup(other)
    site = await serve(state_path=str(copy))
    for uid in ids:
        status, response = await site.get(f"/v1/responses/{uid}")
        assert (status, response["status"]) == (200, "failed")
        assert response["error"] == {
            "code": "server_error",
            "message": "the server ended before the response did",
        }
        listed = (await site.get(f"/v1/responses/{uid}/input_items"))[1]["data"]
        assert [item["content"][0]["text"] for item in listed] == ["x" * 20_000]
    for after in (-1, 1, 77):
        path = f"/v1/responses/{ids[1]}?stream=true&starting_after={after}"
        async with site.http.get(path) as response:
            blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
        events = [json.loads(block.partition("data: ")[2]) for block in blocks]
        assert [event["sequence_number"] for event in events] == list(
            range(after + 1, after + 1 + len(events))
        )
        assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == (
            "response.failed",
            "server_error",
        )
        assert (events[0]["type"] == "response.created") == (after == -1)


async def test_a_full_disk_is_no_end(serve: Serve, folder: Path) -> None:
    site = await serve(state_path=str(folder))
    kept = await site.client.responses.create(model="fake", input="x", max_output_tokens=1)
    talk = await site.client.conversations.create()
    database = site.app[SERVER].database
    pages = await database.run(None, lambda tx: tx.execute("PRAGMA page_count").fetchone()[0])
    await database.run(None, lambda tx: tx.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    asked = {"input": "x", "metadata": {"a": "b" * 100_000}, "max_output_tokens": 1}
    status, answer = await site.post("/v1/responses", asked)
    assert status == 200
    assert answer["output"]
    assert (await site.get(f"/v1/responses/{answer['id']}"))[0] == 404
    assert database.failures == 1
    for stream in (False, True):
        status, reply = await site.post("/v1/responses", {**asked, "background": True, "stream": stream})
        assert (status, reply["error"]["code"]) == (507, "storage_failed")
        assert "full" in reply["error"]["message"]
    assert not site.ingress.open_jobs
    long = {"items": [{"role": "user", "content": "x" * 100_000}]}
    for path, body in (("/v1/conversations", long), (f"/v1/conversations/{talk.id}/items", long)):
        status, reply = await site.post(path, body)
        assert (status, reply["error"]["code"]) == (507, "storage_failed")
    assert await site.client.conversations.retrieve(talk.id) == talk
    assert (await site.client.responses.retrieve(kept.id)).id == kept.id
    await database.run(None, lambda tx: tx.execute("PRAGMA max_page_count = 100000").fetchall())
    status, answer = await site.post("/v1/responses", {**asked, "previous_response_id": kept.id})
    assert (await site.get(f"/v1/responses/{answer['id']}"))[0] == 200
    async with site.http.get("/metrics") as response:
        text = await response.text()
    assert 'sgla:unstored_writes_total{model_name="fake"} 1.0' in text
    assert 'sgla:stored_objects{kind="response",model_name="fake"} 2.0' in text
    assert 'sgla:stored_objects{kind="conversation",model_name="fake"} 1.0' in text


async def test_what_a_killed_server_has_not_freed_goes_at_the_next_start(serve: Serve, folder: Path) -> None:
    site = await serve(state_path=str(folder))
    talk = await site.client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "x" * 3000} for _ in range(9)]
    )
    body = {"input": "x", "background": True, "stream": True, "max_output_tokens": 3}
    async with site.http.post("/v1/responses", json=body) as response:
        await response.read()
    await site.client.files.create(file=b"{}", purpose="batch")
    server = site.app[SERVER]
    await at_rest(server.database)
    for each in server.shelves:

        def remove(tx: sqlite3.Connection, each: shelf.Shelf = each) -> None:
            for (number,) in tx.execute("SELECT number FROM objects WHERE kind = ?", (each.kind,)).fetchall():
                each.remove(tx, number)

        await server.database.run(None, remove)
    left = "SELECT count(*) FROM (SELECT 1 FROM items UNION ALL SELECT 1 FROM events UNION ALL SELECT 1 FROM pieces)"  # noqa: E501
    assert (await server.database.run(None, lambda tx: tx.execute(left).fetchone()))[0] > 10
    site = await again(serve, site, state_path=str(folder))
    assert (await site.get(f"/v1/conversations/{talk.id}"))[0] == 404
    database = site.app[SERVER].database
    await at_rest(database)
    for table in ("items", "events", "pieces", "parts", "leftovers", "shares"):
        query = f"SELECT count(*) FROM {table}"
        assert await database.run(None, lambda tx, query=query: tx.execute(query).fetchone()) == (0,)  # type: ignore[misc]

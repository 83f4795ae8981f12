"""/v1/files and /v1/batches with the ``openai`` client, in front of the fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla import clock
from sgla.errors import Overloaded
from sgla.http import forms
from sgla.http.batches import asking as asking_module
from sgla.http.batches import runner as runner_module
from sgla.http.batches import turns, usage
from sgla.http.batches.files import COST, PIECE, Files
from sgla.http.batches.reading import BOM, Lines
from sgla.http.batches.runner import RUNNER, Runner
from sgla.http.batches.store import BatchStore
from sgla.http.clients import Client
from sgla.http.models import MODELS
from sgla.http.openai import chat as chat_module
from sgla.http.server import SERVER
from sgla.http.state.shelf import ENTRY, Bounds, one

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(i: int, url: str = CHAT, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"{i}?"}], "max_tokens": 3, "temperature": 0}
    if url != CHAT:
        body = {"input": f"{i}?", "max_output_tokens": 3}
    return {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body, **changes}


def jsonl(*lines: Any) -> bytes:
    return (
        b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines) + b"\n"
    )


async def uploaded(client: openai.AsyncOpenAI, *lines: Any) -> str:
    return (await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")).id


async def started(client: openai.AsyncOpenAI, *lines: Any, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = await uploaded(client, *lines)
    return await client.batches.create(
        input_file_id=file, endpoint=endpoint, completion_window="24h", **fields
    )


async def ended(client: openai.AsyncOpenAI, uid: str) -> Any:
    for _ in range(2000):
        batch = await client.batches.retrieve(uid)
        if batch.status in ENDED:
            return batch
        await asyncio.sleep(0.005)
    raise AssertionError(batch)


async def lines_of(client: openai.AsyncOpenAI, file: str | None) -> dict[str | None, dict[str, Any]]:
    if file is None:
        return {}
    text = (await client.files.content(file)).text
    return {answer["custom_id"]: answer for answer in map(json.loads, text.splitlines())}


async def test_files_come_are_listed_and_go(site: Site) -> None:
    client = site.client
    data = jsonl(*map(line, range(5000)))
    assert len(data) > 8 * PIECE
    first = await client.files.create(file=("einfach é.jsonl", data), purpose="batch")
    assert (first.bytes, first.filename, first.purpose, first.status) == (
        len(data),
        "einfach é.jsonl",
        "batch",
        "processed",
    )
    assert await client.files.retrieve(first.id) == first
    content = await client.files.content(first.id)
    assert content.content == data
    second = await client.files.create(
        file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert second.expires_at == second.created_at + 3600
    assert [file.id async for file in client.files.list()] == [second.id, first.id]
    assert [file.id async for file in client.files.list(order="asc", limit=1)] == [first.id, second.id]
    assert (await client.files.list(after=second.id)).data == [first]
    assert (await client.files.list(purpose="batch_output")).data == []
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(first.id)
    files: Files = site.app[SERVER].files
    await until_shed(files)
    left = await files.database.run(None, lambda tx: one(tx, "SELECT count(*) FROM pieces")[0])
    assert left == 1, "the pieces of a deleted file go, too"


async def until_shed(files: Files) -> None:
    while await files.database.run(None, lambda tx: one(tx, "SELECT 1 FROM leftovers")):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"purpose": "fine-tune", "file": b"x"},
            "purpose 'fine-tune' is not supported by this server; it takes 'batch'",
        ),
        ({"file": b"x"}, "purpose must be 'batch'"),
        ({"purpose": "batch"}, "file is required"),
        (
            {
                "purpose": "batch",
                "file": b"x",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "5",
            },
            "from 3600",
        ),
        ({"purpose": "b" * 5000, "file": b"x"}, "more than 4096 bytes"),
    ],
)
async def test_forms_that_are_no_upload_leave_nothing(
    site: Site, fields: dict[str, Any], message: str
) -> None:
    form = aiohttp.FormData()
    for name, value in fields.items():
        if isinstance(value, bytes):
            form.add_field(name, value, filename="f.jsonl")
        else:
            form.add_field(name, value)
    if not any(isinstance(value, bytes) for value in fields.values()):
        form.add_field("other", "x", content_type="text/plain")  # a form of several parts
    async with site.http.post("/v1/files", data=form) as response:
        assert response.status == 400
        assert message in (await response.json())["error"]["message"]
    await nothing_is_kept(site)


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Type": "application/json"}, b"{}"),
        ({"Content-Type": "multipart/form-data"}, b"x"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"no boundary"),
        ({"Content-Type": "multipart/form-data; boundary=b"}, b"\n" * forms.MAX_LINES + FORM),
        (
            {"Content-Type": "multipart/form-data; boundary=b"},
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx',
        ),
        (
            {"Content-Type": "multipart/form-data; boundary=b"},
            b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c",
        ),
        (
            {"Content-Type": "multipart/form-data; boundary=b"},
            b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\nx\r\n' * 20 + b"--b--\r\n",
        ),
    ],
)
async def test_bodies_that_are_no_form_are_refused(site: Site, headers: dict[str, str], body: bytes) -> None:
    status, answer = await site.post("/v1/files", body, headers=headers)
    assert status == 400, answer
    await nothing_is_kept(site)


async def test_the_type_of_a_body_is_read_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's e-mail package takes 0.1 s of the loop for a header of 8 KB."""
    monkeypatch.setattr("aiohttp.helpers.parse_content_type", None)
    headers = {"Content-Type": "Multipart/Form-Data; boundary=b" + '; a="\\\\"' * 800}
    assert (await site.post("/v1/files", FORM, headers=headers))[0] == 200
    assert (await site.post("/v1/files", FORM, headers={"Content-Type": "text/plain"}))[0] == 400


@pytest.mark.filterwarnings("default")
async def test_nothing_is_kept_of_wrong_headers(serve: Serve) -> None:
    site = await serve()
    kept: dict[Any, Any] = vars(aiohttp.multipart).setdefault("__warningregistry__", {})
    before = len(kept)
    for wrong in ('a b{}; name="x"', 'form-data; name="x"; a b{}=y'):  # the header, and a parameter
        for i in range(8):
            part = f"--b\r\nContent-Disposition: {wrong.format(i)}\r\n\r\nx"
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            assert (await site.post("/v1/files", part.encode(), headers=headers))[0] == 400
    assert len(kept) <= before + 1  # the version of the filters


async def nothing_is_kept(site: Site) -> None:
    files: Files = site.app[SERVER].files
    await until_shed(files)
    count = "SELECT (SELECT count(*) FROM pieces) + (SELECT count(*) FROM objects)"
    assert await files.database.run(None, lambda tx: one(tx, count)[0]) == 0


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (CHAT, lambda body: body["choices"][0]["message"]["content"]),
        ("/v1/responses", lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
async def test_a_batch_answers_as_its_route_does(site: Site, endpoint: Any, text: Any) -> None:
    client = site.client
    lines = [line(i, endpoint) for i in range(100)]
    made = await started(client, *lines, endpoint=endpoint, metadata={"for": "test"})
    assert (made.status, made.object, made.endpoint, made.metadata) == (
        "validating",
        "batch",
        endpoint,
        {"for": "test"},
    )
    batch = await ended(client, made.id)
    assert batch.status == "completed", batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        100,
        100,
        0,
    )
    assert batch.error_file_id is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = await lines_of(client, batch.output_file_id)
    assert list(answers) == [each["custom_id"] for each in lines]
    for each in lines[::10]:
        status, expected = await site.post(endpoint, each["body"])
        response = answers[each["custom_id"]]["response"]
        assert (status, answers[each["custom_id"]]["error"]) == (response["status_code"], None)
        assert text(response["body"]) == text(expected)
        assert response["body"].keys() == expected.keys()
        assert response["body"]["usage"] == expected["usage"]
    assert [each.id async for each in client.batches.list()] == [batch.id]
    assert (await client.files.retrieve(batch.output_file_id)).purpose == "batch_output"
    assert (
        b'sgla:batch_lines_total{model_name="fake",outcome="completed"} 100'
        in site.app[MODELS].metrics_text()
    )


async def test_bad_lines_become_errors_of_their_items(site: Site) -> None:
    client = site.client
    good = line(0)
    body = good["body"]
    lines = [
        BOM + json.dumps(good).encode(),
        b"",
        b"{no json",
        b"[1]",
        line(0),
        line(1, method="GET"),
        line(2, url="/v1/completions"),
        line(3, body={**body, "model": "other"}),
        line(4, body={**body, "stream": True}),
        line(5, body="text"),
        {"custom_id": "c6", "method": "POST", "body": body},
        line(7, body={**body, "temperature": -1}),
        line(8, body={**body, "who": 1}),
        b'{"custom_id": "\xff"}',
        line(9, custom_id="x" * 600),
    ]
    batch = await ended(client, (await started(client, *lines)).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        14,
        2,
        12,
    )
    answers = await lines_of(client, batch.output_file_id)
    assert list(answers) == ["c0", "c8"]
    assert answers["c8"]["response"]["ignored_fields"] == ["who"]
    text = (await client.files.content(batch.error_file_id)).text
    errors = [json.loads(each) for each in text.splitlines()]
    assert [
        (each["custom_id"], each["error"]["line"], each["error"]["code"]) for each in errors if each["error"]
    ] == [
        (None, 3, "invalid_json_line"),
        (None, 4, "bad_request"),
        ("c0", 5, "duplicate_custom_id"),
        ("c1", 6, "invalid_method"),
        ("c2", 7, "invalid_url"),
        ("c3", 8, "model_not_found"),
        ("c4", 9, "unsupported_parameter"),
        ("c5", 10, "bad_request"),
        ("c6", 11, "invalid_value"),
        (None, 14, "invalid_json_line"),
        (None, 15, "invalid_value"),
    ]
    (refused,) = [each for each in errors if each["response"]]
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("c7", 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert [each.line for each in batch.errors.data] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 14, 15]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([b""], "empty_file"),
        ([b"x", b"y"], "invalid_json_line"),
        ([line(i) for i in range(9)], "too_many_lines"),
        ([b"\n" * 30, line(0)], "too_many_lines"),
    ],
)
async def test_a_batch_without_a_good_line_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch, lines: list[Any], code: str
) -> None:
    monkeypatch.setattr(runner_module, "MAX_LINES", 8)
    monkeypatch.setattr(runner_module, "MAX_NUMBER", 20)
    batch = await ended(site.client, (await started(site.client, *lines)).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert {each.code for each in batch.errors.data} == {code}
    assert batch.output_file_id is None
    assert site.ingress.jobs == []


async def test_what_is_no_batch_is_refused(site: Site) -> None:
    file = await uploaded(site.client, line(0))
    right = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for change, status, param in (
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"endpoint": "/v1/videos"}, 400, "endpoint"),
        ({"completion_window": "1 day"}, 400, "completion_window"),
        ({"completion_window": "200h"}, 400, "completion_window"),
        ({"metadata": {"x" * 65: "y"}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after"),
    ):
        got, answer = await site.post("/v1/batches", {**right, **change})
        assert (got, answer["error"]["param"]) == (status, param), answer
    batch = await ended(site.client, (await site.post("/v1/batches", right))[1]["id"])
    right["input_file_id"] = batch.output_file_id
    status, answer = await site.post("/v1/batches", right)
    assert (status, answer["error"]["message"]) == (400, "input_file_id must be a file with purpose batch")
    assert (await site.post("/v1/batches/batch_none/cancel"))[0] == 404
    assert (await site.post(f"/v1/batches/{batch.id}/cancel"))[1]["status"] == "completed"


async def test_a_cancelled_batch_keeps_what_is_done(serve: Serve) -> None:
    ingress = FakeIngress(manual=True)
    assert ingress.facts is not None
    ingress.facts.slots = 3
    site = await serve(ingress)
    batch = await started(site.client, *map(line, range(9)))
    while len(ingress.open_jobs) < 3:
        await asyncio.sleep(0.001)
    assert all(job.yields for job in ingress.jobs)
    (rid, (job, _)), *_ = ingress.open_jobs.items()
    with pytest.raises(openai.ConflictError, match="cancel the batch first"):
        await site.client.files.delete(batch.input_file_id)
    ingress.manual = False
    await ingress._run(job)
    ingress.manual = True
    while (await site.client.batches.retrieve(batch.id)).request_counts.completed < 1:
        await asyncio.sleep(0.001)
    assert (await site.client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(site.client, batch.id)
    assert batch.status == "cancelled"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        9,
        1,
        0,
    )
    assert list(await lines_of(site.client, batch.output_file_id)) == ["c0"]
    ingress.check()
    assert (await site.client.files.delete(batch.input_file_id)).deleted


async def test_a_line_that_is_cancelled_before_it_begins_gives_its_place_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, next_ = site.app[RUNNER], Runner._next

    async def ends(self: Runner, batch: Any, *more: Any) -> Any:
        if batch.running:
            raise asyncio.CancelledError
        return await next_(self, batch, *more)

    free = runner._turns._free
    monkeypatch.setattr(Runner, "_next", ends)
    batch = await started(site.client, line(0), line(1))
    while (waiting := runner._turns._free) == free and batch.id in runner.batches:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert waiting <= free == runner._turns._free


async def test_what_comes_behind_the_end_of_a_batch_leaves_it_as_it_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the answers that cancelling gives up while an earlier one is stored."""
    end, gate = BatchStore.end, threading.Event()

    async def followed(self: BatchStore, batch: Any, status: str) -> None:
        held = asyncio.ensure_future(self._run(batch, lambda tx: gate.wait(5)))
        ending = asyncio.ensure_future(end(self, batch, status))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(self._put(batch, []))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, ending, late)

    monkeypatch.setattr(BatchStore, "end", followed)
    batch = await started(site.client, line(0))
    assert (await asyncio.wait_for(ended(site.client, batch.id), 10)).status == "completed"


async def test_a_batch_ends_whose_canceller_has_gone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    save, begun = BatchStore.save, asyncio.Event()

    async def never(self: BatchStore, batch: Any) -> None:
        if batch.seen["status"] == "cancelling":
            begun.set()
            await asyncio.Event().wait()
        await save(self, batch)

    monkeypatch.setattr(BatchStore, "save", never)
    site.ingress.manual = True
    batch = await started(site.client, *map(line, range(3)))
    gone = asyncio.ensure_future(site.client.batches.cancel(batch.id))
    await begun.wait()
    gone.cancel()
    assert (await ended(site.client, batch.id)).status == "cancelled"


@pytest.mark.parametrize(("asked", "status"), [(line(0), "completed"), (b"{", "failed")])
async def test_a_batch_that_ends_can_no_longer_be_cancelled(
    site: Site, monkeypatch: pytest.MonkeyPatch, asked: bytes, status: str
) -> None:
    """Its end is stored, and its task does not know that yet."""
    stored, go_on, end = asyncio.Event(), asyncio.Event(), BatchStore.end

    async def slowly(self: BatchStore, batch: Any, status: str) -> None:
        await end(self, batch, status)
        stored.set()
        await go_on.wait()

    monkeypatch.setattr(BatchStore, "end", slowly)
    batch = await started(site.client, asked)
    await stored.wait()
    assert (await site.client.batches.cancel(batch.id)).status == status
    go_on.set()
    await asyncio.sleep(0.05)
    batch = await site.client.batches.retrieve(batch.id)
    assert (batch.status, batch.cancelling_at) == (status, None)


async def test_what_a_batch_has_no_time_for_expires(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = FakeIngress(manual=True)
    site = await serve(ingress)
    monkeypatch.setattr(clock, "wall", lambda now=clock.wall: now() + 3600 - 1)
    batch = await started(site.client, *map(line, range(5)))
    monkeypatch.undo()
    runner = site.app[RUNNER]
    runner.end(runner.batches[batch.id], "expired")
    batch = await ended(site.client, batch.id)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert (batch.request_counts.total, batch.request_counts.failed) == (5, 5)
    errors = await lines_of(site.client, batch.error_file_id)
    assert [(name, each["error"]["code"]) for name, each in errors.items()] == [
        (f"c{i}", "batch_expired") for i in range(5)
    ]


async def test_a_batch_goes_on_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    """Lines that are done are not run again, and bad lines not told twice."""
    lines = [*map(line, range(6)), b"bad"]
    ingress = FakeIngress(manual=True)
    assert ingress.facts is not None
    ingress.facts.slots = 4
    site = await serve(ingress, state_path=str(tmp_path), api_key=["anna"], key="anna")
    batch = await started(site.client, *lines)
    while len(ingress.open_jobs) < 4:
        await asyncio.sleep(0.001)
    ingress.manual = False
    answered = list(ingress.jobs)[1:3]
    for job in answered:
        await ingress._run(job)
    done = {job.messages[0]["content"] for job in answered if job.messages}
    ingress.manual = True
    while (await site.client.batches.retrieve(batch.id)).request_counts.completed < 2:
        await asyncio.sleep(0.001)
    await site.stop()
    later = FakeIngress()
    site = await serve(later, state_path=str(tmp_path), api_key=["anna"], key="anna")
    batch = await ended(site.client, batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        7,
        6,
        1,
    )
    assert list(await lines_of(site.client, batch.output_file_id)) == [f"c{i}" for i in range(6)]
    asked = [job.messages[0]["content"] for job in later.jobs if job.messages]
    assert sorted(asked) == [f"{i}?" for i in range(6) if f"{i}?" not in done]


async def test_files_and_batches_of_another_key_are_not_there(serve: Serve) -> None:
    site = await serve(api_key=["anna", "ben"], key="anna")
    anna = site.client
    ben = anna.with_options(api_key="ben")
    batch = await ended(anna, (await started(anna, line(0))).id)
    assert (await ben.files.list()).data == []
    assert (await ben.batches.list()).data == []
    for call in (
        ben.files.retrieve(batch.output_file_id),
        ben.files.content(batch.input_file_id),
        ben.files.delete(batch.input_file_id),
        ben.batches.retrieve(batch.id),
        ben.batches.cancel(batch.id),
        ben.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert len((await anna.files.list()).data) == 2


async def test_a_line_finds_no_item_of_another_key(serve: Serve) -> None:
    site = await serve(api_key=["anna", "ben"], key="anna")
    ben = site.client.with_options(api_key="ben")
    url = "/v1/responses"
    told = {"id": "msg_1", "type": "message", "role": "user", "content": "a secret"}
    asked = {"type": "item_reference", "id": "msg_1"}
    for client, item, failed in ((ben, told, 0), (site.client, asked, 1), (ben, asked, 0)):
        body = {"input": [item], "max_output_tokens": 3}
        batch = await ended(client, (await started(client, line(0, url, body=body), endpoint=url)).id)
        assert batch.request_counts.failed == failed


async def test_without_keys_lists_show_what_comes_from_the_same_address(site: Site) -> None:
    batch = await ended(site.client, (await started(site.client, line(0))).id)
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(site.url, connector=connector) as elsewhere:
        for path in ("/v1/files", "/v1/batches"):
            async with elsewhere.get(path) as response:
                assert (await response.json())["data"] == []
        async with elsewhere.get(f"/v1/batches/{batch.id}") as response:
            assert (await response.json())["status"] == "completed"


async def test_answers_that_are_made_while_they_are_sent_are_whole_lines(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**line(0)["body"], "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
    batch = await ended(site.client, (await started(site.client, line(0, body=body))).id)
    answers = await lines_of(site.client, batch.output_file_id)
    _, expected = await site.post(CHAT, body)
    assert answers["c0"]["response"]["body"]["choices"] == expected["choices"]
    monkeypatch.setattr(asking_module, "MAX_ANSWER", 1 << 16)
    batch = await ended(site.client, (await started(site.client, line(0, body=body), line(1))).id)
    assert list(await lines_of(site.client, batch.output_file_id)) == ["c1"]
    (refused,) = (await lines_of(site.client, batch.error_file_id)).values()
    assert (refused["response"]["status_code"], refused["response"]["body"]["error"]["code"]) == (
        413,
        "request_too_large",
    )


async def test_a_fault_of_the_server_costs_one_line_or_one_batch(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fields: Any, server: Any) -> None:
        if fields.messages[0]["content"] == "1?":
            raise ZeroDivisionError

    monkeypatch.setattr(chat_module, "check_fields", broken)
    batch = await ended(site.client, (await started(site.client, line(0), line(1))).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    (failed,) = (await lines_of(site.client, batch.error_file_id)).values()
    assert failed["response"]["body"]["error"]["code"] == "internal_error"
    monkeypatch.setattr(runner_module, "answer_line", broken)
    batch = await ended(site.client, (await started(site.client, line(0))).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "internal_error")


async def test_a_long_line_is_counted_before_it_is_decoded(site: Site) -> None:
    body = {**line(0)["body"], "extra": [0] * 600_000}
    batch = await ended(site.client, (await started(site.client, line(0, body=body), line(1))).id)
    assert (batch.request_counts.completed, batch.errors.data[0].code) == (1, "request_too_complex")


async def test_a_line_waits_while_there_is_no_room_for_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(FakeIngress):
        refusals = 3

        def open_all(self, jobs: Any, extra: bool = False) -> None:
            if self.refusals:
                self.refusals -= 1
                raise Overloaded("full", retry_after=1.0)
            super().open_all(jobs, extra)

    monkeypatch.setattr(runner_module, "WAITS", (0.001, 0.002))
    site = await serve(Busy())
    batch = await ended(site.client, (await started(site.client, line(0), line(1))).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 2)


async def test_clients_take_turns(serve: Serve) -> None:
    """A client's batches run beside each other, and beside those of another, who has as many places."""
    ingress = FakeIngress(manual=True)
    assert ingress.facts is not None
    ingress.facts.slots = 4
    site = await serve(ingress, api_key=["anna", "ben"], key="anna")
    ben = site.client.with_options(api_key="ben")
    for _ in range(3):
        await started(site.client, *map(line, range(50)))
    await started(ben, *(line(i, custom_id=f"b{i}") for i in range(50)))
    runner = site.app[RUNNER]
    for _ in range(20):
        while len(ingress.open_jobs) < 4:
            await asyncio.sleep(0.001)
        job, _ = next(iter(ingress.open_jobs.values()))
        ingress.manual = False
        await ingress._run(job)
        ingress.manual = True
    while len(ingress.open_jobs) < 4:
        await asyncio.sleep(0.001)
    *of_anna, of_ben = (batch.running for batch in runner.batches.values())
    assert of_ben == 2
    assert sorted(of_anna) == [0, 1, 1]


def stored(size: int) -> int:
    """What a file of ``size`` bytes counts for."""
    return ENTRY + size + COST * -(-size // PIECE)


async def test_uploads_are_bounded_and_shared(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    site = await serve(api_key=["anna", "ben", "carl"], key="anna")
    anna = site.client
    ben, carl = anna.with_options(api_key="ben"), anna.with_options(api_key="carl")
    files: Files = site.app[SERVER].files
    files.bounds = Bounds(100, 4 * stored(PIECE), 1e6)

    async def put(client: openai.AsyncOpenAI, size: int = PIECE) -> str:
        return (await client.files.create(file=b"x" * size, purpose="batch")).id

    with pytest.raises(openai.APIStatusError, match="the file is larger than"):
        await put(anna, files.longest + 1)
    first = [await put(anna) for _ in range(2)]
    with pytest.raises(openai.APIStatusError, match="you may have 50 with") as refused:
        await put(anna)
    assert (refused.value.status_code, refused.value.code) == (413, "storage_full")
    second = [await put(ben)]
    await put(carl)
    # All is full now: whoever has most makes room for another, but nobody for himself.
    second.append(await put(ben, PIECE // 2))
    assert [file.id for file in (await anna.files.list()).data] == [first[1]]
    assert [file.id for file in (await ben.files.list(order="asc")).data] == second


async def test_an_upload_that_is_cut_off_leaves_nothing(site: Site) -> None:
    async def cut() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 5 * PIECE
        while not await files.database.run(None, lambda tx: one(tx, "SELECT count(*) > 1 FROM pieces")[0]):
            await asyncio.sleep(0.001)
        raise ConnectionError

    files: Files = site.app[SERVER].files
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await site.http.post("/v1/files", data=cut(), headers=headers)
    while await files.database.run(None, lambda tx: one(tx, "SELECT 1 FROM objects")):
        await asyncio.sleep(0.005)
    await nothing_is_kept(site)


async def test_answers_that_come_together_are_stored_together(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress = FakeIngress()
    assert ingress.facts is not None
    ingress.facts.slots = 16
    groups: list[int] = []
    put = BatchStore._put

    async def counted(self: BatchStore, batch: Any, group: list[Any]) -> None:
        groups.append(len(group))
        await put(self, batch, group)

    monkeypatch.setattr(BatchStore, "_put", counted)
    site = await serve(ingress)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    bodies = chat, {**chat, "temperature": -1}
    batch = await started(site.client, *(line(i, body=bodies[i % 2]) for i in range(80)))
    batch = await ended(site.client, batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (40, 40)
    assert len(await lines_of(site.client, batch.output_file_id)) == 40
    assert len(await lines_of(site.client, batch.error_file_id)) == 40
    assert sum(groups) == 80
    assert len(groups) < 60


async def test_a_batch_whose_answers_find_no_room_fails(serve: Serve) -> None:
    """Half of all is for others."""
    site = await serve(api_key=["anna", "ben"], key="anna")
    files: Files = site.app[SERVER].files
    data = [line(i) for i in range(40)]
    files.bounds = Bounds(100, 2 * (stored(len(jsonl(*data))) + 2 * ENTRY + 3000), 1e6)
    batch = await started(site.client, *data)
    batch = await ended(site.client, batch.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
    assert 0 < len(await lines_of(site.client, batch.output_file_id)) < 40
    assert await uploaded(site.client.with_options(api_key="ben"), *data)


async def test_a_long_line_is_read_in_parts(site: Site) -> None:
    """A client that does not read makes the server hold no more than one of them."""
    files: Files = site.app[SERVER].files
    data = jsonl(*map(line, range(5000)))
    uid = (await site.client.files.create(file=data, purpose="batch")).id
    number = await files.database.run(None, lambda tx: files.shelf.number(tx, uid))
    long = [bytes([i]) * size for i, size in enumerate((3 * PIECE + 5, 7, PIECE, 2 * PIECE))]

    def replace(tx: Any) -> None:
        tx.execute("DELETE FROM pieces WHERE number > 0")
        for at, piece in enumerate(long, 3):
            yield from files.put(tx, number, at, piece, "127.0.0.1")

    await files.database.run(None, replace)
    parts = [part async for part in files.content(Client("127.0.0.1"), number)]
    assert b"".join(parts) == data[:PIECE] + b"".join(long)
    assert max(map(len, parts)) <= PIECE


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
async def test_lines_are_found_however_the_file_is_cut(site: Site, cut: int) -> None:
    data = b"one\r\n\n  two \n" + b"x" * 30 + b"\nthree is longer\n\xef\xbb\xbffour\n" + b" " * 40 + b"\nfive"
    files: Files = site.app[SERVER].files

    anna = Client("127.0.0.1")

    def store(tx: Any) -> Generator[None, None, int]:
        number = files.begin(tx, anna)
        for i, at in enumerate(range(0, len(data), cut)):
            yield from files.put(tx, number, i, data[at : at + cut], anna.name)
        return number

    lines = Lines(files, anna, await files.database.run(anna, store), 20, kept=10)
    found = []
    while not lines.ended:
        if (line := await lines.next()) is not None:
            found.append(line)
    assert [(line.number, line.text) for line in found] == [
        (1, b"one"),
        (3, b"two"),
        (4, None),
        (5, None),
        (6, b"\xef\xbb\xbffour"),
        (8, b"five"),
    ]
    texts = [await lines.text(line) for line in found]
    assert texts == [b"one", b"two", None, b"three is longer", b"\xef\xbb\xbffour", b"five"]


async def test_a_batch_tells_its_usage(serve: Serve, tmp_path: Path) -> None:
    """Also of what was done before a restart."""
    ingress = FakeIngress(manual=True)
    site = await serve(ingress, state_path=str(tmp_path), api_key=["anna"], key="anna")
    batch = await started(site.client, *map(line, range(4)), b"bad")
    assert batch.usage.total_tokens == 0
    while len(ingress.open_jobs) < 4:
        await asyncio.sleep(0.001)
    for job in list(ingress.jobs)[:2]:
        await ingress._run(job)
    while (await site.client.batches.retrieve(batch.id)).request_counts.completed < 2:
        await asyncio.sleep(0.001)
    prompts = [len(ingress.prompt(job)) for job in ingress.jobs]
    await site.stop()
    site = await serve(FakeIngress(), state_path=str(tmp_path), api_key=["anna"], key="anna")
    batch = await ended(site.client, batch.id)
    assert batch.usage.input_tokens == sum(prompts)
    assert batch.usage.output_tokens == 4 * 3
    assert batch.usage.total_tokens == sum(prompts) + 4 * 3
    answers = await lines_of(site.client, batch.output_file_id)
    told = [answer["response"]["body"]["usage"] for answer in answers.values()]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    assert batch.usage.input_tokens_details.cached_tokens == cached
    assert batch.usage.output_tokens_details.reasoning_tokens == 0


def test_the_usage_of_a_long_answer_is_found() -> None:
    """Whatever its text says of usage."""
    told = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    for size in (10, 2 << 20):
        text = '"usage":{"prompt_tokens":1}' + "x" * size
        body = json.dumps(
            {"choices": [{"usage": {"prompt_tokens": 9}, "text": text}], "usage": told, "last": None},
            separators=(",", ":"),
        )
        total = usage.no_usage()
        usage.add(total, body.encode())
        assert (total["input_tokens"], total["output_tokens"], total["total_tokens"]) == (7, 3, 10)
        assert total["input_tokens_details"]["cached_tokens"] == 2


async def test_lines_of_spaces_are_passed_a_few_at_a_time(site: Site) -> None:
    files: Files = site.app[SERVER].files
    file = await uploaded(site.client, b"\r\n" * 10_000, b"\n" * 10_000, line(0))
    number = await files.database.run(None, lambda tx: files.shelf.number(tx, file))
    lines = Lines(files, Client("127.0.0.1"), number, 1000, 1000)
    found = []
    while not lines.ended:
        found.append(await lines.next())
    assert len(found) > 5
    (last,) = filter(None, found)
    assert last.number == 20_003


def two_clients(site: Site) -> tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]:
    return site.client, site.client.with_options(api_key="ben")


async def test_a_large_batch_is_checked_in_turns_with_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await serve(api_key=["anna", "ben"], key="anna")
    anna, ben = two_clients(site)
    checked, held = Runner._checked, asyncio.Event()

    async def slowly(self: Runner, batch: Any, text: bytes | None) -> Any:
        if batch.seen["metadata"]:
            held.set()
            await asyncio.sleep(0.01)
        return await checked(self, batch, text)

    monkeypatch.setattr(Runner, "_checked", slowly)
    large = await started(anna, *map(line, range(2000)), metadata={"is": "large"})
    await held.wait()
    batch = await ended(ben, (await started(ben, line(0))).id)
    assert batch.status == "completed"
    assert (await anna.batches.retrieve(large.id)).status == "validating"
    await anna.batches.cancel(large.id)
    await ended(anna, large.id)


async def test_a_line_that_waits_for_bytes_keeps_no_place(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LINE_BYTES", 250_000)
    ingress = FakeIngress(manual=True, context=1 << 20)
    assert ingress.facts is not None
    ingress.facts.slots = 4
    site = await serve(ingress, api_key=["anna", "ben"], key="anna")
    anna, ben = two_clients(site)

    def long(i: int, size: int) -> dict[str, Any]:
        return line(i, body={"messages": [{"role": "user", "content": f"{i}" * size}], "max_tokens": 1})

    large = await started(anna, *(long(i, 150_000) for i in range(3)))
    while len(ingress.open_jobs) < 1:
        await asyncio.sleep(0.001)
    small = await started(ben, long(1, 1000), long(2, 70_000))
    while len(ingress.open_jobs) < 3:
        await asyncio.sleep(0.001)
    assert [len(job.messages[0]["content"]) for job in ingress.jobs if job.messages] == [
        150_000,
        1000,
        70_000,
    ]
    ingress.manual = False
    for job in list(ingress.jobs):
        await ingress._run(job)
    for client, batch, count in ((anna, large, 3), (ben, small, 2)):
        assert (await ended(client, batch.id)).request_counts.completed == count


def admissions(
    turns_: turns.Turns, batch: Any, *sizes: int
) -> list[tuple[turns.Admission, asyncio.Task[None]]]:
    found = [turns.Admission(batch, i, size) for i, size in enumerate(sizes)]
    return [(admission, asyncio.ensure_future(turns_.admit(admission))) for admission in found]


async def test_a_large_line_is_not_passed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LINE_BYTES", 3 << 20)
    monkeypatch.setattr(turns, "PASSES", 5)
    anna, ben = (SimpleNamespace(client=Client(name), running=0, number=i) for i, name in enumerate("ab"))
    served = turns.Turns()
    served.open(8)
    (first, _), *_ = admissions(served, ben, 1 << 20)
    ((waiting, task),) = admissions(served, anna, 3 << 20)
    passing = admissions(served, ben, *[1 << 20] * 20)
    await asyncio.sleep(0)
    order = []
    while not task.done():
        held = [admission for admission, turn in passing if turn.done() and admission.held]
        order += held
        served.release(first)
        for admission in held:
            served.release(admission)
        await asyncio.sleep(0)
    assert waiting.held
    assert len(order) == 5
    for _, turn in passing:
        turn.cancel()


async def test_a_place_is_given_to_nobody_who_goes() -> None:
    """It comes free when the one who waits is cancelled, and does not know that yet."""
    batch: Any = SimpleNamespace(client=Client("a"), running=0, number=0)
    served = turns.Turns()
    served.open(1)
    (first, _), (gone, going), (next_, _) = admissions(served, batch, 1, 1, 1)
    await asyncio.sleep(0)
    assert first.held
    going.cancel()
    served.release(first)
    await asyncio.sleep(0)
    assert (gone.held, next_.held, going.cancelled()) == (False, True, True)


async def test_choices_take_places() -> None:
    batch: Any = SimpleNamespace(client=Client("a"), running=0, number=0)
    served = turns.Turns()
    served.open(4)
    (first, _), (second, _) = admissions(served, batch, 1, 1)
    await asyncio.sleep(0)
    served.resize(first, 4)  # one more than there are places
    ((third, _),) = admissions(served, batch, 1)
    served.release(second)
    await asyncio.sleep(0)
    assert not third.held
    served.resize(first, 3)
    assert third.held
    served.resize(first, 4000)
    served.release(third)
    served.release(first)
    held = admissions(served, batch, *[1] * 5)
    await asyncio.sleep(0)
    assert [admission.held for admission, _ in held] == [True] * 4 + [False]
    held[-1][1].cancel()


async def test_a_line_that_is_tried_again_keeps_no_place(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(FakeIngress):
        def open_all(self, jobs: Any, extra: bool = False) -> None:
            if "99" in jobs[0][0].messages[0]["content"]:
                raise Overloaded("full", retry_after=1.0)
            super().open_all(jobs, extra)

    monkeypatch.setattr(runner_module, "WAITS", (0.01, 0.02))
    ingress = Picky()
    assert ingress.facts is not None
    ingress.facts.slots = 1
    site = await serve(ingress, api_key=["anna", "ben"], key="anna")
    anna, ben = two_clients(site)
    stuck = await started(anna, line(99), *map(line, range(3)))
    batch = await ended(ben, (await started(ben, line(0), line(1))).id)
    assert batch.request_counts.completed == 2
    while (await anna.batches.retrieve(stuck.id)).request_counts.completed < 3:
        await asyncio.sleep(0.001)
    await anna.batches.cancel(stuck.id)
    assert (await ended(anna, stuck.id)).status == "cancelled"


async def test_lines_of_one_conversation_wait_for_each_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "WAITS", (0.001, 0.01))
    url = "/v1/responses"
    talk = await site.client.conversations.create()
    body = {"input": "and?", "conversation": talk.id, "max_output_tokens": 3}
    lines = [line(i, url, body=body) for i in range(5)]
    batch = await ended(site.client, (await started(site.client, *lines, endpoint=url)).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
    items = [item async for item in site.client.conversations.items.list(talk.id, order="asc")]
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 5
    lengths = sorted(len(job.messages) for job in site.ingress.jobs if job.messages)
    assert lengths == [1, 3, 5, 7, 9]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"previous_response_id": "resp_none"}, 404, "previous_response_not_found"),
        ({"conversation": "conv_none"}, 404, "conversation_not_found"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, 400, None),
    ],
)
async def test_what_a_response_goes_on_from_must_be_there(
    site: Site, body: dict[str, Any], status: int, code: str | None
) -> None:
    url = "/v1/responses"
    lines = [line(0, url, body={"input": "x", **body}), line(1, url)]
    batch = await ended(site.client, (await started(site.client, *lines, endpoint=url)).id)
    (answer,) = (await lines_of(site.client, batch.error_file_id)).values()
    expected = await site.post(url, {"input": "x", **body})
    assert (answer["response"]["status_code"], answer["response"]["body"]) == expected
    assert expected[0] == status
    assert code is None or expected[1]["error"]["code"] == code

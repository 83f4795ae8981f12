"""The SSE sink on real sockets: headers, pings, slow readers, hang-ups, errors after the headers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from http_fake import FakeIngress
from http_site import Serve, Site, sse_payloads

from sgla.errors import WorkerDied
from sgla.http.answer.sse import TOGETHER
from sgla.http.answer.unread import Unread
from sgla.http.openai.chat import ChatStream
from sgla.http.server import SERVER
from sgla.messages import Event, TokenLogprob, Usage

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


async def until(condition: Callable[[], object]) -> None:
    """Give the loop time until ``condition()``; fails after five seconds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def raw(
    site: Site, body: dict[str, Any], path: str = "/v1/chat/completions", **socket_options: int
) -> Any:
    """(reader, writer) of a request sent by hand; ``rcvbuf`` shrinks what the kernel holds for a client that
    sleeps."""
    sock = socket.socket()
    for size in socket_options.values():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", site.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
    data = json.dumps(body).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
    )
    return reader, writer


def event(site: Site, text: str, index: int = 0, **fields: Any) -> Event:
    return Event(
        rid=site.ingress.jobs[-1].rid, index=index, text=text, tokens=[300], usage=Usage(3, 1, 0), **fields
    )


async def test_headers_come_before_the_first_token(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    async with site.http.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["x-request-id"]
        job = site.ingress.jobs[0]
        site.ingress.push(job.rid, event(site, "a", prompt_tokens=[1]))
        first = await response.content.readuntil(b"\n\n")
        assert json.loads(first[6:])["choices"][0]["delta"]["role"] == "assistant"
        site.ingress.push(job.rid, event(site, "", finish="stop"))
        assert sse_payloads(await response.content.read())[-1] == "[DONE]"


async def test_idle_streams_get_pings(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), sse_keepalive=0.02)
    async with site.http.post("/v1/chat/completions", json=CHAT) as response:
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        site.ingress.push(site.ingress.jobs[0].rid, event(site, "a", finish="length"))
        assert sse_payloads(await response.content.read())[-1] == "[DONE]"


async def test_error_after_the_headers(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    async with site.http.post("/v1/chat/completions", json=CHAT) as response:
        rid = site.ingress.jobs[0].rid
        site.ingress.push(rid, event(site, "a"))
        site.ingress.push(rid, WorkerDied("the worker died", retry_after=1).rejected(rid))
        payloads = sse_payloads(await response.content.read())
    assert payloads[-1] == "[DONE]"
    assert json.loads(payloads[-2])["error"]["code"] == "worker_died"
    site.ingress.check()


async def test_text_that_is_held_back_makes_no_chunk(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    async with site.http.post("/v1/chat/completions", json=CHAT) as response:
        rid = site.ingress.jobs[0].rid
        for text in ("", "", "ab", ""):
            site.ingress.push(rid, event(site, text))
        site.ingress.push(rid, event(site, "c", finish="stop"))
        payloads = sse_payloads(await response.content.read())
    deltas = [json.loads(payload)["choices"][0]["delta"] for payload in payloads[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ab"}, {"content": "c"}, {}]


async def test_a_reader_that_catches_up_loses_nothing(serve: Serve) -> None:
    """While it sleeps, events are merged per choice: fewer chunks than events, the same text, choices
    apart."""
    site = await serve(FakeIngress(manual=True), sink_limit_bytes=64 << 20)
    reader, _ = await raw(site, CHAT | {"n": 2}, rcvbuf=4096)
    await until(lambda: site.ingress.jobs)
    rid, count = site.ingress.jobs[0].rid, 600
    for step in range(count):
        for index in range(2):
            finish = "length" if step == count - 1 else None
            site.ingress.push(rid, event(site, f"{index}:{step:05} " + "x" * 10_000, index, finish=finish))
        if step % 100 == 0:
            await asyncio.sleep(0)
    texts, chunks = {0: "", 1: ""}, 0
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(10):
        body = await read_chunked(reader)
    for payload in sse_payloads(body)[:-1]:
        choice = json.loads(payload)["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        chunks += 1
    for index in range(2):
        assert texts[index] == "".join(f"{index}:{step:05} " + "x" * 10_000 for step in range(count))
    assert chunks < count
    assert not site.ingress.cancels


async def test_logprobs_that_a_reader_has_to_catch_up_with_come_in_parts(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), sink_limit_bytes=64 << 20)
    asked = CHAT | {"logprobs": True, "top_logprobs": 2}
    reader, _ = await raw(site, asked, rcvbuf=4096)
    await until(lambda: site.ingress.jobs)
    rid, count = site.ingress.jobs[0].rid, 20 * TOGETHER
    for step in range(count):
        sent = event(site, "x" * 1000, finish="length" if step == count - 1 else None)
        sent.tokens, sent.logprobs = [256], [TokenLogprob(256, -float(step), 1, [(256, -1.0), (257, -2.0)])]
        site.ingress.push(rid, sent)
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(10):
        body = await read_chunked(reader)
    choices = [json.loads(payload)["choices"][0] for payload in sse_payloads(body)[:-1]]
    parts = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert [entry["logprob"] for part in parts for entry in part] == [-float(step) for step in range(count)]
    assert max(map(len, parts)) <= TOGETHER
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "x" * 1000 * count


async def read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def test_a_reader_that_stays_away_is_dropped(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), sink_limit_bytes=1 << 20)
    _, writer = await raw(site, CHAT, rcvbuf=4096)
    await until(lambda: site.ingress.jobs)
    slow = site.ingress.jobs[0].rid
    other = asyncio.ensure_future(site.sse("/v1/chat/completions", CHAT))
    await until(lambda: len(site.ingress.jobs) == 2)
    quick = site.ingress.jobs[1].rid
    pushed = 0
    async with asyncio.timeout(10):
        while not site.ingress.cancels:
            site.ingress.push(
                slow, Event(rid=slow, index=0, text="x" * 50_000, tokens=[1], usage=Usage(1, 1, 0))
            )
            pushed += 50_000
            await asyncio.sleep(0)
    assert site.ingress.cancels == [(slow, "slow")]
    assert pushed > 1 << 20
    site.ingress.push(quick, event(site, "fine", finish="stop"))
    assert (await other)[-1] == "[DONE]"
    assert site.metrics.slow_readers == 1
    writer.close()


async def test_what_all_streams_leave_unread_is_bounded(serve: Serve) -> None:
    """Those that have most are dropped, although none is beyond its own limit."""
    limit = 8 << 20
    ingress = FakeIngress(manual=True)
    site = await serve(ingress, sink_limit_bytes=64 << 20, request_memory_bytes=2 * limit)
    for count in range(1, 5):
        reader, _ = await raw(site, CHAT, rcvbuf=4096)
        await until(lambda count=count: len(ingress.jobs) == count)
    *large, small = [job.rid for job in ingress.jobs]
    pushed = 0
    async with asyncio.timeout(10):
        while len(site.ingress.cancels) < len(large):
            for rid in large:
                site.ingress.push(rid, event(site, "x" * 100_000))
                pushed += 100_000
            site.ingress.push(small, event(site, "x" * 1000))
            await asyncio.sleep(0)
    assert pushed < 4 * limit
    assert {rid for rid, _ in site.ingress.cancels} == set(large)
    site.ingress.push(small, event(site, "end", finish="stop"))
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(10):
        assert sse_payloads(await read_chunked(reader))[-1] == "[DONE]"
    await until(lambda: not site.app[SERVER].unread.total)


def test_what_is_unread_is_shared_out_among_clients_and_streams() -> None:
    unread = Unread(100)
    assert all(unread.hold("a", i, 20) for i in range(5))
    assert not unread.hold("a", 5, 20)
    assert unread.hold("b", 0, 50)
    assert not unread.hold("b", 0, 51)
    assert not unread.hold("a", 0, 21)
    assert unread.total == 80
    assert unread.hold("a", 0, 10)
    assert all(unread.hold("a", i, 0) for i in range(5))
    assert unread.total == 0
    assert unread.hold("b", 0, 100)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [True, False], ids=["before-first-token", "midway"])
async def test_hang_up_cancels_all_jobs(serve: Serve, stream: bool, before: bool) -> None:
    site = await serve(FakeIngress(manual=True))
    body = {"prompt": ["a", "b"], "n": 2, "stream": stream, "max_tokens": 50}
    _, writer = await raw(site, body, "/v1/completions")
    await until(lambda: len(site.ingress.jobs) == 2)
    rids = [job.rid for job in site.ingress.jobs]
    if not before:
        site.ingress.push(rids[0], Event(rid=rids[0], index=0, text="x", tokens=[1], usage=Usage(1, 1, 0)))
        await asyncio.sleep(0.02)
    writer.close()
    await until(lambda: not site.ingress.open_jobs)
    assert sorted(site.ingress.cancels) == sorted((rid, "client") for rid in rids)
    assert site.metrics.http_active == 0


async def test_openai_stream_close_cancels(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.005))
    stream = await site.client.chat.completions.create(
        model="fake", stream=True, messages=CHAT["messages"], max_tokens=150
    )
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: site.ingress.cancels)
    site.ingress.check()


async def test_connection_is_kept_alive_after_a_stream(site: Site) -> None:
    reader, writer = await raw(site, CHAT | {"max_tokens": 2})
    for _ in range(2):
        await reader.readuntil(b"\r\n\r\n")
        assert sse_payloads(await read_chunked(reader))[-1] == "[DONE]"
        data = json.dumps(CHAT | {"max_tokens": 1}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
            % (len(data), data)
        )
    writer.close()


async def test_http_1_0(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    data = json.dumps(CHAT | {"max_tokens": 2}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert sse_payloads(body)[-1] == "[DONE]"
    writer.close()


async def test_abort_request(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    native = asyncio.ensure_future(site.post("/generate", {"text": "a", "rid": "mine"}))
    chat = asyncio.ensure_future(site.sse("/v1/chat/completions", CHAT | {"rid": "other"}))
    whole = asyncio.ensure_future(
        site.post("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "third"})
    )
    await until(lambda: len(site.ingress.jobs) == 3)
    assert (await site.post("/abort_request", {"rid": "nobody"}))[1]["aborted"] == 0
    assert (await site.post("/abort_request", {"rid": "mine"}))[1]["aborted"] == 1
    status, reply = await native
    assert (status, reply["meta_info"]["finish_reason"]["type"], reply["meta_info"]["id"]) == (
        200,
        "abort",
        "mine",
    )
    assert (await site.post("/abort_request", {"abort_all": True}))[1]["aborted"] == 2
    payloads = await chat
    assert json.loads(payloads[-2])["error"]["code"] == "request_aborted"
    status, reply = await whole
    assert (status, reply["error"]["code"]) == (400, "request_aborted")
    site.ingress.check()
    assert (await site.post("/abort_request", {}))[0] == 400


async def test_a_bug_in_one_stream_stays_there(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """``push`` is called by the actor that serves all streams, so it must not raise."""
    site = await serve(FakeIngress(manual=True))
    _, writer = await raw(site, CHAT)
    await until(lambda: site.ingress.jobs)
    rid = site.ingress.jobs[0].rid
    monkeypatch.setattr(ChatStream, "encode", lambda self, event: 1 / 0)
    site.ingress.push(rid, event(site, "a"))
    await until(lambda: site.ingress.cancels)
    assert site.ingress.cancels == [(rid, "client")]
    assert (await site.get("/version"))[0] == 200
    writer.close()

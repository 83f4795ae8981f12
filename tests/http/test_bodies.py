"""Request bodies: compressed ones, and the memory that all of them may take together."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.errors import SglaError
from sgla.http import bodies
from sgla.http.answer.collect import LOGPROB, PAIR, TOKEN
from sgla.http.bodies import Inflater
from sgla.http.server import SERVER
from sgla.messages import Event, Pairs, TokenLogprob, Usage

TEXT = "/v1/completions"
MIB = 1 << 20


def compressed(data: bytes, wbits: int) -> bytes:
    stream = zlib.compressobj(wbits=wbits)
    return stream.compress(data) + stream.flush()


@pytest.fixture
def inflated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pieces that are inflated."""
    sizes: list[int] = []
    pieces = Inflater.pieces

    def counted(self: Inflater, data: bytes) -> Any:
        for piece in pieces(self, data):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(Inflater, "pieces", counted)
    return sizes


@pytest.mark.parametrize(
    ("encoding", "wbits"), [("gzip", 31), ("X-GZip", 31), ("deflate", 15), ("deflate", -15), ("identity", 0)]
)
async def test_compressed_bodies(site: Site, encoding: str, wbits: int, inflated: list[int]) -> None:
    body = json.dumps({"prompt": "x", "user": "abc" * 100_000}).encode()
    data = compressed(body, wbits) if wbits else body
    assert (await site.post(TEXT, data, headers={"Content-Encoding": encoding}))[0] == 200
    assert site.ingress.jobs[-1].text == "x"
    assert (sum(inflated) == len(body)) == bool(wbits)
    assert max(inflated, default=0) <= bodies.SLICE


@pytest.mark.parametrize(
    ("encoding", "data", "status", "words"),
    [
        ("br", b"abc", 415, "'br' is not supported; send gzip, deflate"),
        ("zstd", b"abc", 415, "zstd"),
        ("gzip, gzip", b"abc", 415, "gzip, gzip"),
        ("gzip", b"no gzip at all", 400, "is no gzip"),
        ("gzip", gzip.compress(b'{"prompt": "x"}', mtime=0)[:-9], 400, "ends before its gzip does"),
        ("gzip", gzip.compress(b'{"prompt": "x"}', mtime=0) + b"more", 400, "behind the end of its gzip"),
        ("deflate", b"\x00nothing", 400, "is no deflate"),
        ("gzip", b"", 400, "the request body is empty"),
    ],
)
async def test_what_cannot_be_inflated(
    site: Site, encoding: str, data: bytes, status: int, words: str
) -> None:
    headers = {"Content-Encoding": encoding}
    async with site.http.post(TEXT, data=data, headers=headers) as response:
        assert response.status == status
        assert words in (await response.json())["error"]["message"]
    assert (await site.post(TEXT, {"prompt": "x"}))[0] == 200


async def test_two_encodings_in_two_headers_are_a_list(site: Site) -> None:
    data = gzip.compress(b'{"prompt": "x"}', mtime=0)
    headers = [("Content-Encoding", "gzip")] * 2
    async with site.http.post(TEXT, data=data, headers=headers) as response:
        assert response.status == 415
        assert "'gzip, gzip' is not supported" in (await response.json())["error"]["message"]


async def test_a_bomb_is_inflated_up_to_the_limit(serve: Serve, inflated: list[int]) -> None:
    site = await serve(max_body_bytes=MIB, api_key=["secret"])
    bomb = gzip.compress(bytes(64 * MIB))
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer secret"}
    status, reply = await site.post(TEXT, bomb, headers=headers)
    assert status == 413
    assert "--max-body-bytes" in reply["error"]["message"]
    assert MIB < sum(inflated) <= MIB + bodies.SLICE


async def test_bombs_of_one_client_keep_nobody_waiting(serve: Serve) -> None:
    """A small body waits for none of them, a large one for a piece of each client."""
    site = await serve(api_key=["noisy", "quiet"])
    memory = site.app[SERVER].memory

    async def ask(key: str, body: bytes) -> int:
        headers = {"Content-Encoding": "gzip", "Authorization": f"Bearer {key}"}
        return (await site.post(TEXT, gzip.compress(body), headers=headers))[0]

    bombs = [asyncio.ensure_future(ask("noisy", bytes(4 * MIB))) for _ in range(20)]
    while memory.used < MIB:
        await asyncio.sleep(0)
    assert await ask("quiet", b'{"prompt": "x", "user": "%b"}' % (b"a" * 300_000)) == 200
    assert sum(bomb.done() for bomb in bombs) < 10
    async with memory.inflating.everybodys:
        assert await ask("quiet", b'{"prompt": "x"}') == 200
    assert await asyncio.gather(*bombs) == [400] * 20
    assert memory.used == 0


async def test_only_bodies_that_are_wanted_are_inflated(serve: Serve, inflated: list[int]) -> None:
    site = await serve(api_key=["secret"], admin_api_key=["boss"])
    bomb = gzip.compress(bytes(8 * MIB))
    keyed = {"Content-Encoding": "gzip", "Authorization": "Bearer secret"}
    for path, status, headers in (
        (TEXT, 401, {"Content-Encoding": "gzip"}),
        ("/nothing", 404, keyed),
        ("/version", 405, keyed),
        ("/flush_cache", 403, keyed),
        ("/flush_cache", 200, keyed | {"Authorization": "Bearer boss"}),
    ):
        async with site.http.post(path, data=bomb, headers=headers) as response:
            assert response.status == status
    site.ingress.phase = "starting"
    assert (await site.post(TEXT, bomb, headers=keyed))[0] == 503
    assert inflated == []


async def test_a_refused_body_closes_its_connection(serve: Serve) -> None:
    site = await serve(api_key=["secret"])
    for path in (TEXT, "/nothing"):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {64 * MIB}\r\n\r\n"
        writer.write(head.encode() + bytes(1000))
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b" 401 " in answer
        assert b"connection: close" in answer.lower()
        writer.close()


class Slow:
    """A client that sends ``size`` bytes of a larger body and then waits."""

    async def start(self, site: Site, size: int, key: str) -> Slow:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", site.port)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {2 * size}\r\n\r\n"  # noqa: E501
        self.writer.write(head.encode() + bytes(size))
        return self

    async def status(self) -> int:
        line = await asyncio.wait_for(self.reader.readline(), 5)
        self.writer.close()
        return int(line.split()[1])


def large(key: str) -> dict[str, Any]:
    """A request of 400 KiB."""
    body = json.dumps({"prompt": "x", "user": "a" * (400 << 10)}).encode()
    return {"data": body, "headers": {"Authorization": f"Bearer {key}"}}


async def test_the_sum_of_bodies_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    site = await serve(request_memory_bytes=2 * MIB, api_key=["a", "b", "c"])
    budget = site.app[SERVER].memory
    slow = [await Slow().start(site, 400 << 10, key) for key in "aabb"]
    while budget.used < 1600 << 10:
        await asyncio.sleep(0.01)
    for key, words in (("a", "your requests take"), ("c", "the requests of all clients take")):
        async with site.http.post(TEXT, **large(key)) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert words in (await response.json())["error"]["message"]
    small = {"headers": {"Authorization": "Bearer c"}}
    assert (await site.post(TEXT, {"prompt": "x"}, **small))[0] == 200
    assert budget.used == 1600 << 10

    monkeypatch.setattr(bodies, "PATIENCE", 0.0)
    async with site.http.post(TEXT, **large("c")) as response:
        assert response.status == 200
    assert await slow[0].status() == 429
    for other in slow[1:]:
        other.writer.close()
    while budget.used:
        await asyncio.sleep(0.01)
    assert not budget.of_client


async def test_what_is_decoded_is_counted_until_it_is_answered(serve: Serve) -> None:
    site = await serve(ingress=FakeIngress(manual=True), request_memory_bytes=8 * MIB)
    budget = site.app[SERVER].memory
    ids = {"input_ids": [5] * 100_000, "sampling_params": {"max_new_tokens": 1}}
    request = asyncio.ensure_future(site.post("/generate", ids))
    while not site.ingress.open_jobs:
        await asyncio.sleep(0.01)
    assert budget.used > 48 * 100_000
    async with site.http.post("/generate", json=ids) as response:
        assert response.status == 429
    request.cancel()
    while budget.used:
        await asyncio.sleep(0.01)
    status, reply = await site.post("/generate", {"input_ids": [5] * 200_000})
    assert status == 413
    assert "--request-memory-bytes" in reply["error"]["message"]


async def test_what_an_answer_gathers_is_counted_until_it_is_sent(serve: Serve) -> None:
    """A request whose logprobs find no room any more ends, and makes room for the others."""
    site = await serve(
        ingress=FakeIngress(manual=True), request_memory_bytes=2 * MIB, api_key=["a", "b", "c"]
    )
    budget = site.app[SERVER].memory
    body = {"prompt": "x", "max_tokens": 4000, "logprobs": 20}
    asking = []
    for key in "abc":
        headers = {"Authorization": f"Bearer {key}"}
        asking.append(asyncio.ensure_future(site.http.post(TEXT, json=body, headers=headers)))
        while len(site.ingress.jobs) < len(asking):
            await asyncio.sleep(0.01)
    first, second, third = (job.rid for job in site.ingress.jobs)
    for step in range(2000):
        push(site, first, step)
        push(site, second, step)
    assert 2000 * 2 * (LOGPROB + 20 * PAIR) < budget.used < 2000 * 2 * (TOKEN + LOGPROB + 21 * PAIR) + 10_000
    for step in range(2000):
        push(site, third, step)
    reply = await asking[2]
    assert reply.status == 429
    assert reply.headers["Retry-After"] == "1"
    assert "--request-memory-bytes" in (await reply.json())["error"]["message"]
    assert site.ingress.cancels == [(third, "client")]
    for rid in (first, second):
        push(site, rid, 2000, finish="stop")
    for one in asking[:2]:
        reply = await one
        assert len((await reply.json())["choices"][0]["logprobs"]["tokens"]) == 2001
    while budget.used:
        await asyncio.sleep(0.01)


def push(site: Site, rid: str, step: int, finish: str | None = None) -> None:
    logprob = TokenLogprob(256, -1.0, 1, Pairs(bytes(20 * PAIR)))
    site.ingress.push(
        rid,
        Event(
            rid=rid,
            index=0,
            tokens=[256],
            text=" alpha",
            logprobs=[logprob],
            finish=finish,
            usage=Usage(1, step + 1, 0),
        ),
    )


async def test_what_is_sent_behind_a_running_request_is_not_read(serve: Serve) -> None:
    site = await serve(ingress=FakeIngress(manual=True))
    _, writer = await asyncio.open_connection("127.0.0.1", site.port)
    body = json.dumps({"prompt": "x", "user": "a" * MIB}).encode()
    post = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    writer.write(post)
    while not site.ingress.open_jobs:
        await asyncio.sleep(0.01)
    sent = len(post) * 60
    writer.write(post * 60)
    before = -1
    while (left := writer.transport.get_write_buffer_size()) != before:
        before = left
        await asyncio.sleep(0.2)
    assert left > sent // 2  # the rest is in the buffers of the two sockets
    assert len(site.ingress.jobs) == 1
    writer.transport.abort()


async def test_what_an_error_quotes_is_cut(site: Site) -> None:
    params = {"id": "a", "rid": "x" * 100_000}
    assert (await site.post("/open_session", {"session_id": "a", "capacity_of_str_len": 100}))[0] == 200
    status, reply = await site.post("/generate", {"text": "x", "session_params": params})
    assert status == 400
    assert len(reply["error"]["message"]) < 400
    assert len(SglaError("x" * MIB).message) < 5000

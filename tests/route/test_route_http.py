"""What clients see through the router."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tracemalloc
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import FormData, web
from route_fakes import CARDS, FakeWorker, Route, Router
from yarl import URL

from sgla.http import middleware
from sgla.http.app import ROUTES
from sgla.route import front
from sgla.route.exchange import EVERYWHERE, ONE_BY_ONE
from sgla.route.watch import Watch
from sgla.route.workers import Look

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}
ADMIN = {"Authorization": "Bearer admin"}


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("remote", [False, True])
async def test_requests_and_answers_pass_unchanged(route: Route, remote: bool) -> None:
    router = await route(1, remote)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=418, body=b"\x00tea", headers={"X-Odd": "1", "Content-Type": "a/b"})

    router.workers[0].answer = answer
    headers = {
        "Authorization": "Bearer k",
        "X-Request-Id": "mine",
        "X-Forwarded-For": "9.9.9.9",
        "Trailer": "x",
    }
    async with router.session.put(
        f"{router.url}/any//path?q=%20", data=b"\xff\x00" * 9, headers=headers
    ) as response:
        assert (response.status, await response.read()) == (418, b"\x00tea")
        assert (response.headers["X-Odd"], response.headers["x-request-id"]) == ("1", "mine")
    [(path, body, seen)] = router.workers[0].seen
    assert (path, body) == ("/any//path?q=%20", b"\xff\x00" * 9)
    assert (seen["Authorization"], seen["X-Request-Id"]) == ("Bearer k", "mine")
    assert seen["X-Forwarded-For"] == "9.9.9.9, 127.0.0.1"
    assert "Trailer" not in seen


@pytest.mark.parametrize("remote", [False, True])
async def test_streams_pass_as_they_come(route: Route, remote: bool) -> None:
    router = await route(1, remote)
    async with router.session.post(
        f"{router.url}/v1/chat/completions", json=CHAT | {"stream": True}
    ) as response:
        for token in "abc":
            router.workers[0].queue.put_nowait(token)
            assert await response.content.readuntil(b"\n\n") == f"data: {token}\n\n".encode()
        router.workers[0].queue.put_nowait("[DONE]")
        assert await response.content.read() == b"data: [DONE]\n\n"
    [worker] = router.balancer.workers.values()
    await until(lambda: not worker.running)
    assert worker.unread == 0


@pytest.mark.parametrize("remote", [False, True])
async def test_a_killed_worker_loses_only_what_had_begun(route: Route, remote: bool) -> None:
    router = await route(2, remote, policy="round_robin")
    dying, living = router.workers
    living.go.set()
    begun = asyncio.ensure_future(
        router.raw(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + b'{"stream":true}')
    )
    await until(lambda: dying.seen)
    dying.queue.put_nowait("a")
    waiting = [asyncio.ensure_future(router.post(CHAT | {"wait": True})) for _ in range(8)]
    await until(lambda: len(dying.seen) == 5)
    dying.kill()
    answers = await asyncio.gather(*waiting)
    assert [(status, body["url"]) for status, body, _ in answers] == [(200, living.url)] * 8
    stream = (await begun).partition(b"data: a\n\n\r\n")[2]
    size, _, event = stream.partition(b"\r\n")
    assert len(event) == int(size, 16) + 2, "the last chunk is whole, and the body has no end"
    assert b'"code":"worker_died"' in event
    assert (await router.post(CHAT))[0] == 200


@pytest.mark.parametrize("remote", [False, True])
async def test_what_waits_at_a_worker_that_is_down_is_asked_of_another(route: Route, remote: bool) -> None:
    """A worker that is stuck, or whose host is gone, closes no connection."""
    router = await route(2, remote, policy="round_robin")
    stuck, living = router.workers
    living.go.set()
    waiting = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
    await until(lambda: stuck.seen)
    router.balancer.saw(stuck.url, Look(trouble="it makes no steps"))
    status, body, _ = await waiting
    assert (status, body["url"]) == (200, living.url)
    assert stuck.cancelled == 1


async def test_a_worker_whose_health_comes_late_keeps_its_requests(route: Route) -> None:
    router = await route(1, health_check_timeout_secs=0.8, health_check_interval_secs=0.05)
    [worker] = router.workers
    slow = asyncio.Event()
    again = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/health" and slow.is_set() and not again.is_set():
            again.set()
            await asyncio.sleep(1)
        if request.path.startswith("/v1/chat"):
            return await worker._usual(request)
        return web.json_response({"data": CARDS})

    worker.answer = answer
    watch = Watch(router.balancer)
    try:
        running = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
        await until(lambda: any(path.startswith("/v1/chat") for path, *_ in worker.seen))
        slow.set()
        [known] = router.balancer.workers.values()
        await until(lambda: known.state == "late")
        assert (await router.get("/health"))[0] == 200
        assert (await router.post(CHAT))[0] == 200, "no other is up"
        await until(lambda: known.state == "up")
        worker.go.set()
        assert (await running)[0] == 200
        assert sum(path.startswith("/v1/chat") for path, *_ in worker.seen) == 2, "none was sent again"
    finally:
        await watch.close()


async def test_without_workers_clients_are_told_to_come_back(route: Route) -> None:
    router = await route(2)
    for worker in router.workers:
        worker.kill()
    status, body, headers = await router.post(CHAT)
    assert (status, headers["Retry-After"], body["error"]["code"]) == (503, "1", "not_ready")
    for worker in router.workers:
        router.balancer.saw(worker.url, Look(trouble="gone"))
    for path in ("/health", "/v1/models/x"):
        status, _, headers = await router.get(path)
        assert status == (503 if path == "/health" else 404)
    assert (await router.post(CHAT))[0] == 503
    assert (await router.get("/health/live"))[0] == 200


async def test_a_request_that_ends_workers_ends_two_of_them(route: Route) -> None:
    router = await route(3)

    async def die(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    for worker in router.workers:
        worker.answer = die
    status, body, _ = await router.post(CHAT)
    assert (status, body["error"]["code"]) == (503, "worker_died")
    assert sum(len(worker.seen) for worker in router.workers) == 2


async def test_a_worker_that_refuses_is_passed_over(route: Route) -> None:
    router = await route(2, policy="round_robin")

    async def busy(request: web.Request) -> web.Response:
        return web.json_response({"why": "full"}, status=429, headers={"Retry-After": "7"})

    router.workers[0].answer = busy
    assert [(await router.post(CHAT))[0] for _ in range(4)] == [200] * 4
    router.workers[1].answer = busy
    status, body, headers = await router.post(CHAT)
    assert (status, body, headers["Retry-After"]) == (429, {"why": "full"}, "7")
    assert all(not worker.running for worker in router.balancer.workers.values())


async def test_what_one_worker_keeps_is_found(route: Route) -> None:
    router = await route(3, policy="round_robin")

    async def nothing(request: web.Request) -> web.Response:
        return web.json_response({}, status=404)

    for worker in router.workers[:2]:
        worker.answer = nothing
    for _ in range(2):
        status, body, _ = await router.get("/v1/responses/resp_1")
        assert (status, body["url"]) == (200, router.workers[2].url)
    assert [len(worker.seen) for worker in router.workers] == [1, 1, 2]
    assert (await router.post({"previous_response_id": "resp_1"}, "/v1/responses"))[0] == 200
    router.workers[2].answer = nothing
    assert (await router.get("/v1/files/file-1"))[0] == 404


async def test_models_choose_workers(route: Route) -> None:
    router = await route(2)
    router.balancer.saw(router.workers[1].url, Look(cards=[{"id": "other"}]))
    router.balancer.saw(router.workers[0].url, Look(cards=[{"id": "m:v1"}, {"id": "adapter"}]))
    for name, worker in (("other", 1), ("m:v1", 0), ("other:latest", 1), ("adapter", 0), ("m:v1:adapter", 0)):
        status, body, _ = await router.post(CHAT | {"model": name})
        assert (status, body["url"]) == (200, router.workers[worker].url)
    for name in ("other:adapter", "m:v1:other", "adapter:", "m"):
        assert (await router.post(CHAT | {"model": name}))[0] == 404
    status, body, _ = await router.post(CHAT | {"model": "none"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    listed = (await router.get("/v1/models"))[1]["data"]
    assert [card["id"] for card in listed] == ["m:v1", "adapter", "other"]
    assert (await router.get("/v1/models/other"))[1] == {"id": "other"}


async def test_workers_come_and_go(route: Route) -> None:
    router = await route(1, admin_api_key=["admin"], api_key=["user"])
    [first] = router.workers
    second = FakeWorker()
    await second.start()
    try:
        assert (await router.get("/workers"))[0] == 401
        assert (await router.get("/workers", headers={"x-api-key": "user"}))[0] == 403
        for url, status in (("ftp://x", 400), ("http://x/y", 400), (second.url, 200)):
            assert (await router.post({"url": url}, "/workers", headers=ADMIN))[0] == status
        router.balancer.saw(second.url, Look(cards=[{"id": "m"}]))
        running = asyncio.ensure_future(router.post(CHAT | {"wait": True}, headers=ADMIN))
        await until(lambda: first.seen)
        assert (await router.post({}, f"/remove_worker?url={first.url}", headers=ADMIN))[0] == 200
        for _ in range(3):
            assert (await router.post(CHAT, headers=ADMIN))[1]["url"] == second.url
        assert len((await router.get("/list_workers", headers=ADMIN))[1]["urls"]) == 2
        first.go.set()
        assert (await running)[1]["url"] == first.url
        assert (await router.get("/list_workers", headers=ADMIN))[1] == {"urls": [second.url]}
        assert (await router.post({}, f"/add_worker?url={first.url}", headers=ADMIN))[0] == 200
        assert (await router.post({}, "/remove_worker?url=http://no:1", headers=ADMIN))[0] == 404
        quoted = URL(f"{router.url}/workers/{quote(second.url, safe='')}", encoded=True)
        for method, status in (("GET", 200), ("DELETE", 200), ("GET", 404)):
            async with router.session.request(method, quoted, headers=ADMIN) as response:
                assert response.status == status
        for path in ("/%77orkers", "//workers/", "/workers/x"):
            async with router.session.get(URL(router.url + path, encoded=True)) as response:
                assert response.status == 401
    finally:
        await second.stop()


async def test_nobody_adds_workers_without_an_admin_key(route: Route) -> None:
    router = await route(1)
    assert (await router.post({}, "/add_worker?url=http://127.0.0.1:1"))[0] == 403
    assert len(router.balancer.workers) == 1


async def test_keys_of_the_router(route: Route) -> None:
    router = await route(1, api_key=["user"])
    assert (await router.post(CHAT))[0] == 401
    assert (await router.post(CHAT, headers={"x-api-key": "wrong"}))[0] == 401
    assert (await router.post(CHAT, headers={"Authorization": "Bearer user"}))[0] == 200
    assert (await router.get("/metrics"))[0] == (await router.get("/health"))[0] == 200


async def test_a_key_has_its_limit(route: Route) -> None:
    router = await route(1, rpm_limit=2)
    keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
    assert [(await router.post(CHAT, headers=keys[0]))[0] for _ in range(3)] == [200, 200, 429]
    _, body, headers = await router.post(CHAT, headers=keys[0])
    assert (body["error"]["code"], int(headers["Retry-After"]) in range(25, 31)) == ("overloaded", True)
    assert (await router.post(CHAT, headers=keys[1]))[0] == 200
    tokens = await route(1, tpm_limit=100)
    assert [(await tokens.post({"prompt": "x" * 1000}))[0] for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("remote", [False, True])
async def test_those_who_wait_have_turns(route: Route, remote: bool) -> None:
    router = await route(1, remote, worker_max_requests=1, queue_size=5)
    [worker] = router.workers
    first = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
    await until(lambda: worker.seen)
    rest = []
    for n, key in enumerate("aaaab"):
        headers = {"Authorization": f"Bearer {key}"}
        rest.append(asyncio.ensure_future(router.post(CHAT | {"n": n}, headers=headers)))
        await until(lambda: router.balancer.waiting == len(rest))
    many = {"Authorization": "Bearer a"}
    assert (await router.post(CHAT, headers=many))[0] == 429
    few = asyncio.ensure_future(router.post(CHAT, headers={"Authorization": "Bearer c"}))
    assert (await rest[3])[0] == 429, "the newest of who has most gives its place to who has none"
    rest[2].cancel()
    await until(lambda: router.balancer.waiting == 4)
    worker.go.set()
    assert {status for status, _, _ in await asyncio.gather(first, *rest[:2], rest[4], few)} == {200}
    assert [seen[2]["Authorization"][-1:] for seen in worker.seen[1:]] == list("abca")


async def test_an_adapter_is_there_once_it_is_loaded(route: Route) -> None:
    """Before the worker has been asked for its models again, which it then is at once."""
    router = await route(1)
    [worker] = router.workers
    looks: list[str] = []
    router.balancer.look_now = looks.append
    assert (await router.post(CHAT | {"model": "new"}))[0] == 404
    assert (await router.post({"lora_name": "new"}, "/load_lora_adapter"))[0] == 200
    assert (await router.post(CHAT | {"model": "new"}))[0] == 200
    assert looks == [worker.url]
    models = ["m", "new"]

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model} for model in models]})

    worker.answer = answer
    watch = Watch(router.balancer)
    try:
        while router.balancer.workers[worker.url].names != {"m", "new"}:
            await asyncio.sleep(0.01)
        models.append("newer")
        router.balancer.look_now(worker.url)
        while router.balancer.workers[worker.url].names != {"m", "new", "newer"}:
            await asyncio.sleep(0.01)
    finally:
        await watch.close()


async def test_a_look_that_began_before_an_adapter_came_does_not_forget_it(route: Route) -> None:
    router = await route(1)
    [worker], looks = router.workers, 0
    known, begun, on = router.balancer.workers[worker.url], asyncio.Event(), asyncio.Event()

    class Slow(Watch):
        async def look(self, url: str, cards: Any = None) -> Look:
            nonlocal looks
            looks += 1
            begun.set()
            if looks == 2:
                await asyncio.Event().wait()
            await on.wait()
            return Look(cards=[{"id": "m"}])

    watch = Slow(router.balancer)
    try:
        await begun.wait()
        assert (await router.post({"lora_name": "new"}, "/load_lora_adapter"))[0] == 200
        on.set()
        while looks < 2:
            await asyncio.sleep(0.01)
        assert known.names is None
        assert (await router.post(CHAT | {"model": "new"}))[0] == 200
    finally:
        await watch.close()


async def test_what_changes_a_server_goes_to_all(route: Route) -> None:
    router = await route(3)

    async def fail(request: web.Request) -> web.Response:
        return web.json_response({"no": 1}, status=409)

    assert (await router.post({}, "/flush_cache"))[0] == 200
    router.workers[1].answer = fail
    assert (await router.post({}, "/flush_cache"))[:2] == (409, {"no": 1})
    assert [len(worker.seen) for worker in router.workers] == [2, 2, 2]
    assert (await router.post({}, "/init_weights_update_group"))[0] == 400


def test_every_route_of_administrators_is_for_all_or_for_each() -> None:
    """What changes one server of several, and nobody knows which, would be found out late."""
    reading = {"get_weights_by_name", "step_log", "weights"}
    changing = {f"/{name}" for name in (middleware.ADMIN | middleware.OWN) - reading}
    changing |= middleware.ADMIN_OF_V1
    assert {path for path in changing if path in ROUTES} <= EVERYWHERE | ONE_BY_ONE


async def test_counts_of_experts_are_those_of_all_workers(route: Route) -> None:
    router = await route(2)
    for worker, numbers in zip(router.workers, ([1, 2], [10, 0])):
        layers = [{"layer": 3, "experts": numbers, "ranks": [[0], [1]], "balance": 0.5}]

        async def dump(request: web.Request, layers: Any = layers) -> web.Response:
            return web.json_response({"layers": layers})

        worker.answer = dump
    path = "/dump_expert_distribution_record"
    for name in ("start", "stop"):
        assert (await router.post({}, f"/{name}_expert_distribution_record"))[0] == 200
    assert (await router.post({}, path))[:2] == (200, {"layers": [{"layer": 3, "experts": [11, 2]}]})
    assert [len(worker.seen) for worker in router.workers] == [3, 3]
    router.balancer.remove(router.workers[1].url)
    assert (await router.post({}, path))[1]["layers"][0]["balance"] == 0.5  # one's answer is unchanged

    async def written(request: web.Request) -> web.Response:
        return web.json_response("Content is written")

    router.balancer.add(router.workers[1].url)
    router.balancer.saw(router.workers[1].url, Look(cards=CARDS))
    router.workers[1].answer = written  # as of SGLang
    assert (await router.post({}, path))[0] == 200


async def test_what_lasts_waits_for_all_replicas(route: Route) -> None:
    """One that comes later would not sleep where the others do."""
    router = await route(2)
    first, second = router.workers
    router.balancer.replicas = 3
    status, body, headers = await router.post({}, "/sleep")
    assert (status, headers["Retry-After"]) == (503, "1")
    assert body["error"]["message"].startswith("2 of 3 replicas are up")
    assert (await router.post({}, "/flush_cache"))[0] == 200
    router.balancer.replicas = 2
    assert (await router.post({}, "/sleep"))[0] == 200
    for worker in router.workers:
        router.balancer.saw(worker.url, Look(trouble="/health says 503", rests=True))
    assert (await router.post({}, "/pause"))[0] == 200
    router.balancer.saw(second.url, Look(trouble="gone"))
    assert (await router.post({}, "/pause"))[0] == 503
    assert (await router.post({}, "/wake_up"))[0] == 200
    assert [len(worker.seen) for worker in router.workers] == [4, 3]


async def test_health_tells_of_workers_that_rest(route: Route) -> None:
    router = await route(2)
    for worker in router.workers:
        router.balancer.saw(worker.url, Look(trouble="/health says 503", rests=True))
    status, body, headers = await router.get("/health")
    assert (status, headers["Retry-After"]) == (503, "1")
    assert body["error"]["message"].startswith("2 of 2 workers rest")
    assert [card["id"] for card in (await router.get("/v1/models"))[1]["data"]] == ["m"]
    for worker in router.workers:
        router.balancer.saw(worker.url, Look(trouble="gone"))
    assert (await router.get("/health"))[1]["error"]["message"] == "no worker is up"


async def test_an_unknown_expectation_is_refused(route: Route) -> None:
    router = await route(1)
    assert (await router.post({}, headers={"Expect": "a-miracle"}))[0] == 417


async def test_what_changes_a_server_goes_to_those_that_rest(route: Route) -> None:
    """A server that sleeps has to be woken, and one whose weights become others tells so later than a look at
    it. Nobody else is sent there while others are up."""
    router = await route(2)
    resting, other = router.workers
    updating = asyncio.ensure_future(router.post({"wait": True}, "/update_weights_from_disk"))
    await until(lambda: resting.seen)
    asleep = Look(trouble="/health says 503", rests=True)
    router.balancer.saw(resting.url, asleep)
    for worker in router.workers:
        worker.go.set()
    assert (await updating)[0] == 200
    assert resting.cancelled == 0
    looks: list[str] = []
    router.balancer.look_now = looks.append
    assert (await router.post({}, "/wake_up"))[0] == 200
    assert looks == [resting.url, other.url]
    for _ in range(2):
        assert (await router.post(CHAT))[1]["url"] == other.url
    router.balancer.saw(other.url, asleep)

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "the server sleeps"}}, status=503)

    resting.answer = other.answer = refuse
    assert (await router.post(CHAT))[:2] == (503, {"error": {"message": "the server sleeps"}})
    for worker in router.workers:
        router.balancer.saw(worker.url, Look(trouble="gone"))
    assert (await router.post({}, "/wake_up"))[1]["error"]["message"] == "no worker is up; retry later"


async def test_a_client_that_leaves_frees_the_worker(route: Route) -> None:
    router = await route(1)
    [worker] = router.workers
    asking = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
    await until(lambda: worker.seen)
    asking.cancel()
    await until(lambda: worker.cancelled)
    [known] = router.balancer.workers.values()
    assert (known.running, known.unread, known.breaker.open) == (0, 0, False)


async def test_websockets_pass(route: Route) -> None:
    router = await route(1)

    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data.upper())
        return socket

    router.workers[0].answer = echo
    async with router.session.ws_connect(f"{router.url}/v1/realtime") as socket:
        for text in ("a", "b" * 100_000):
            await socket.send_str(text)
            assert await socket.receive_str(timeout=5) == text.upper()
    await until(lambda: not router.front.pool.active)


async def test_forms_and_chunked_bodies_pass(route: Route) -> None:
    router = await route(1)
    form = FormData()
    form.add_field("file", b"{}\n" * 9, filename="in.jsonl")
    async with router.session.post(f"{router.url}/v1/files", data=form) as response:
        assert response.status == 200

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 10_000

    async with router.session.post(f"{router.url}/odd", data=pieces()) as response:
        assert response.status == 200
    assert [len(body) for _, body, _ in router.workers[0].seen[1:]] == [200_000]


HOST = b"Host: x\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (
            b"POST / HTTP/1.1\r\n"
            + HOST
            + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +1\r\n\r\na", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length : 1\r\n\r\na", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"X: a\nY: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n", 200),
    ],
)
async def test_what_can_be_read_in_two_ways_is_refused(route: Route, request_: bytes, status: int) -> None:
    router = await route(1, max_body_bytes=10_000)
    answer = await router.raw(request_)
    assert answer.startswith(b"HTTP/1.1 %d " % status) or answer.startswith(b"HTTP/1.0 %d " % status)
    assert len(router.workers[0].seen) == (b"GET / HTTP/1.0" in request_)


async def test_requests_on_one_connection_keep_their_order(route: Route) -> None:
    router = await route(2)
    one = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await router.raw(b"".join(one % n for n in range(5)) + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 6
    assert answer.count(b"HTTP/1.1 100 Continue\r\n\r\n") == 5
    assert sorted(path for worker in router.workers for path, _, _ in worker.seen) == [
        f"/{n}" for n in range(5)
    ]


async def test_a_slow_reader_slows_its_worker(route: Route) -> None:
    """What a client does not read stays with the worker, but for what buffers hold."""
    router = await route(1)
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(400):
            await response.write(b"x" * 100_000)
            sent += 100_000
        return response

    router.workers[0].answer = flood
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=4096)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert sent < 30_000_000
    total = 0
    while piece := await reader.read(1 << 20):
        total += len(piece)
    assert total > 40_000_000
    writer.close()


async def test_a_drain_ends_behind_the_last_answer(route: Route) -> None:
    router = await route(1)
    [worker] = router.workers
    running = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
    await until(lambda: worker.seen)
    draining = asyncio.ensure_future(router.front.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    worker.go.set()
    assert (await running)[0] == 200
    await asyncio.wait_for(draining, 5)


@pytest.mark.parametrize("remote", [False, True])
async def test_what_runs_at_the_end_is_told(route: Route, remote: bool) -> None:
    router = await route(1, remote)
    [worker] = router.workers
    waiting = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
    request = b'POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n\r\n{"stream": true}'
    stream = asyncio.ensure_future(router.raw(request))
    worker.queue.put_nowait("a")
    await until(lambda: len(worker.seen) == 2 and worker.queue.empty())
    await asyncio.sleep(0.05)
    await router.front.end()
    status, body, _ = await waiting
    assert (status, body["error"]["message"]) == (503, "the router is shutting down; retry later")
    answer = await stream
    assert b"data: a\n\n" in answer
    assert b'event: error\ndata: {"type":"error"' in answer


async def test_bodies_of_clients_that_are_gone_give_their_memory_back(route: Route) -> None:
    """Even where the connection is lost between a request and its task."""
    router = await route(1)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", router.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9000\r\n\r\n"
            client.sendall(head + b"x" * 9000)
    await asyncio.sleep(0.1)
    assert not router.front.connections
    router.front.memory.take(router.config.request_memory_bytes, "any", 0)


async def test_bodies_of_one_client_leave_room(route: Route) -> None:
    router = await route(1, max_body_bytes=300_000, request_memory_bytes=300_000, forwarded_allow_ips=["*"])
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 150000\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(head + b"x" * 140_000)
    await until(lambda: router.front.memory._taken == 140_000)
    assert b"the bodies of your requests" in await router.raw(head + b"x" * 140_000)
    other = {"X-Forwarded-For": "192.0.2.1"}
    assert (await router.post(CHAT | {"x": "y" * 100_000}, headers=other))[0] == 200
    writer.close()


async def test_a_body_is_there_once_while_its_worker_does_not_read(route: Route) -> None:
    router = await route(1)
    got = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await got.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        await reader.readuntil(b'"}')
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    worker = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1 << 26)
    url = f"http://127.0.0.1:{worker.sockets[0].getsockname()[1]}"
    router.balancer.remove(router.workers[0].url)
    router.balancer.add(url)
    router.balancer.saw(url, Look(cards=CARDS))
    size = 15 << 20
    body = b'{"x":"' + b"y" * (size - 8) + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(head)
    tracemalloc.start()
    for at in range(0, size, 1 << 18):
        writer.write(body[at : at + (1 << 18)])
        await writer.drain()
    await until(lambda: router.front.pool.active)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert router.front.memory._taken == size
    assert peak < 1.5 * size
    got.set()
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    worker.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has these")
async def test_a_worker_may_read_a_request_late(route: Route) -> None:
    """All its threads may be busy. A host that is gone is noticed all the same."""
    router = await route(1)
    asking = asyncio.ensure_future(router.post({"wait": True}))
    await until(lambda: router.workers[0].seen)
    (upstream,) = router.front.pool.active
    assert upstream._transport is not None
    sock = upstream._transport.get_extra_info("socket")
    names = "TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"
    found = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
    assert (found, sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == ([0, 5, 2, 3], 1)
    router.workers[0].go.set()
    assert (await asking)[0] == 200


async def test_headers_of_all_requests_have_a_limit(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "ALL_BYTES", 20_000)
    router = await route(1)
    line = b"\r\nx: " + b"y" * 7_000
    head = b"GET /v1/x HTTP/1.1\r\nHost: x" + 2 * line
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(head)
    await until(lambda: router.front.buffered == len(head))
    assert (await router.raw(head)).startswith(b"HTTP/1.1 431 ")
    assert (await router.post(CHAT))[0] == 200
    running = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n" + b'{"wait": true}'
    _, other = await asyncio.open_connection("127.0.0.1", router.port)
    other.write(running)
    await until(lambda: len(router.workers[0].seen) == 2)
    other.write(head)
    await until(lambda: router.workers[0].cancelled == 1)
    writer.write(b"\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert router.front.buffered == 0
    for each in (writer, other):
        each.close()


async def test_without_a_key_bodies_are_small(route: Route) -> None:
    router = await route(1, api_key=["k"])
    for line in (b"OPTIONS /v1/x", b"POST /health"):
        answer = await router.raw(line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"more than 4096 bytes" in answer


async def test_who_reads_nothing_is_answered_no_more(route: Route) -> None:
    """Neither are answers piled up for it, nor do others wait behind them."""
    router = await route(1)
    seen = 0

    async def flood(request: web.Request) -> web.Response:
        nonlocal seen
        seen += 1
        return web.Response(body=b"x" * 1_000_000)

    router.workers[0].answer = flood
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=4096)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 40)
    before = -1
    while before != seen:
        before = seen
        await asyncio.sleep(0.1)
    assert seen < 30
    router.workers[0].answer = None
    async with asyncio.timeout(5):
        assert (await router.post(CHAT))[0] == 200
    router.workers[0].answer = flood
    total = 0
    while total < 40_000_000:
        total += len(await reader.read(1 << 20))
    writer.close()


async def test_silent_connections_keep_nobody_out(route: Route) -> None:
    router = await route(1, max_connections=2, forwarded_allow_ips=["127.0.0.1"])
    with contextlib.ExitStack() as held:
        for _ in range(80):
            held.enter_context(socket.create_connection(("127.0.0.1", router.port)))
            await asyncio.sleep(0)
        assert (await router.post(CHAT))[0] == 200
        running = [
            asyncio.ensure_future(
                router.post(CHAT | {"wait": True}, headers={"X-Forwarded-For": f"1.1.1.{n}"})
            )
            for n in range(2)
        ]
        await until(lambda: len(router.workers[0].seen) == 3)
        for _ in range(80):
            held.enter_context(socket.create_connection(("127.0.0.1", router.port)))
            await asyncio.sleep(0)
        assert (await router.get("/health"))[0] == 200
        assert b"2 connections are open" in await router.raw(b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n")
        router.workers[0].go.set()
        assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]


async def test_a_front_that_is_gone_gives_back_what_it_had(route: Route) -> None:
    router = await route(1, remote=True)
    running = asyncio.ensure_future(router.post(CHAT | {"wait": True}))
    [known] = router.balancer.workers.values()
    await until(lambda: known.running)
    router.desk.close()
    await until(lambda: not known.running)
    running.cancel()


async def test_metrics_tell_where_requests_went(route: Route) -> None:
    router: Router = await route(1)
    for _ in range(3):
        await router.post(CHAT)
    text = (await router.get("/metrics"))[1]
    assert f'sgla_router:requests_total{{outcome="200",worker="{router.workers[0].url}"}} 3.0' in text

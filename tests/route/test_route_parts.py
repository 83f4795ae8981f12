"""The router's parts by themselves: bytes, prefixes, policies, limits, workers and where they come from."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import ssl
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from route_fakes import FakeWorker, Route

from sgla.cli.args import parse
from sgla.cli.route import config_of
from sgla.errors import BadRequest, ConfigError, NotReady, Overloaded, SglaError
from sgla.route import asked, discovery, policies, prefix, serve
from sgla.route.balancer import Balancer, Ticket
from sgla.route.config import RouteConfig, check
from sgla.route.limits import Bucket, Turns
from sgla.route.places import Places
from sgla.route.policies import View
from sgla.route.prefix import EDGES, PrefixTree
from sgla.route.watch import Watch, read_metrics
from sgla.route.wire import CHUNKED, OF_CONNECTION, UNTIL_CLOSE, Answer, Body, Chunks, Request
from sgla.route.workers import Breaker, Look, Worker

TEXTS = st.binary(max_size=2000)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


@given(st.lists(st.binary(min_size=1, max_size=99)), st.binary(max_size=9), st.lists(st.integers(0)))
def test_chunks_are_followed_wherever_pieces_end(parts: list[bytes], rest: bytes, places: list[int]) -> None:
    chunked = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nT: x\r\n\r\n"
    kept, ended = bytearray(), b""
    chunks, body = Chunks(kept), Body(CHUNKED)
    done = False
    for piece in cut(chunked + rest, places):
        if done:
            ended += piece
            continue
        end = chunks.feed(piece)
        assert body.feed(piece) == end
        done = end is not None
        ended += piece[end:] if end is not None else b""
    assert (done, bytes(kept), ended) == (True, b"".join(parts), rest)


class Silent:
    gone = False

    def abort(self) -> None:
        self.gone = True


def test_a_flood_takes_nobody_elses_connection() -> None:
    places = Places(4)
    honest, flood = Silent(), [Silent() for _ in range(9)]
    assert not places.open(honest, "a")
    assert not any(places.open(each, "b") for each in flood)
    assert [each.gone for each in flood] == [True] * 6 + [False] * 3
    places.busy(flood[6], "b")
    assert not places.open(Silent(), "c")
    assert (honest.gone, flood[6].gone, flood[7].gone) == (False, False, True)
    for each in flood[6:]:
        places.close(each)
    places.waits(honest)
    assert not places.open(Silent(), "b")
    assert not honest.gone


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,8}", fullmatch=True)
VALUES = st.from_regex(r"[\x21-\x7e]([\x20-\x7e]{0,20}[\x21-\x7e])?", fullmatch=True)


@given(st.dictionaries(NAMES, VALUES, max_size=9), TEXTS)
def test_a_request_written_anew_says_the_same(headers: dict[str, str], body: bytes) -> None:
    """Its length is that of its body, whatever else it says, and it has no headers of the connection."""
    taken = ("host", "content-length", "transfer-encoding", "connection", "expect", "x")
    headers = {name: value for name, value in headers.items() if name.lower() not in taken}
    lines = ["POST /a?b HTTP/1.1", "Host: h", "Connection: X, close", "X: gone", "Transfer-Encoding: chunked"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())])
    first = Request(head.encode())
    written, _, rest = first.forwarded(len(body), [b"More: 1"]).partition(b"\r\n\r\n")
    again = Request(written)
    assert (again.target, rest, again.length(0)) == ("/a?b", b"", len(body))
    for name in {name.lower().encode() for name in headers} - OF_CONNECTION - {b"more"}:
        assert again.all(name) == first.all(name)
    assert not again.all(b"x")
    assert again.get(b"more") == b"1"


@pytest.mark.parametrize(
    ("head", "method", "size"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3", "GET", 3),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3", "HEAD", 0),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 3", "GET", 0),
        (b"HTTP/1.1 200\r\nTransfer-Encoding: Chunked", "GET", CHUNKED),
        (b"HTTP/1.0 200 OK", "GET", UNTIL_CLOSE),
    ],
)
def test_where_an_answer_ends(head: bytes, method: str, size: int) -> None:
    answer = Answer(head, method)
    assert answer.size == size
    assert answer.keeps == (size != UNTIL_CLOSE)
    assert not Answer(head + b"\r\nConnection: close", method).keeps


def test_bodies_of_tiny_chunks_are_refused() -> None:
    with pytest.raises(BadRequest, match="small chunks"):
        Chunks(bytearray()).feed(b"1\r\na\r\n" * 10_000)


@given(st.binary(max_size=6000), st.binary(max_size=6000), st.binary(max_size=3000))
def test_a_tree_knows_how_much_of_a_prompt_was_seen(common: bytes, one: bytes, other: bytes) -> None:
    """To within a sixteenth: to the last place at which prompts are cut."""
    tree = PrefixTree(1 << 20)
    tree.insert(prefix.path(common + b"\x00" + one))
    shared = len(common)
    matched = tree.match(prefix.path(common + b"\x01" + other))
    assert matched == max((edge for edge in EDGES[:200] if edge <= shared), default=0)
    assert shared - matched < max(64, shared // 16) + 64
    assert tree.match(prefix.path(common + b"\x00" + one, b"another model")) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9000)), max_size=30), st.integers(64, 20_000))
def test_a_tree_keeps_to_its_capacity(prompts: list[tuple[int, int]], capacity: int) -> None:
    tree = PrefixTree(capacity)
    for seed, size in prompts:
        path = prefix.path(random.Random(seed).randbytes(size))
        tree.insert(path)
        assert tree.size == sum(tree._nodes.values()) <= capacity
        there = [digest in tree._nodes for digest in path]
        assert there == sorted(there, reverse=True), "what is above a node is there"
        assert tree.match(path) <= size


VIEWS = st.lists(
    st.builds(
        View,
        st.text(max_size=9),
        st.integers(0, 99),
        st.integers(0, 9999),
        st.integers(0, 9999),
        st.integers(0, 9999),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=9,
    unique_by=lambda view: view.url,
)


@given(VIEWS, st.integers(0, 10_000), st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.text())
def test_policies_choose_as_they_say(views: list[View], size: int, one: int, two: int, key: str) -> None:
    least = policies.least_load(views)
    assert views[least].running == min(view.running for view in views)
    chosen = views[policies.power_of_two(views, one, two)]
    assert sum(view.running >= chosen.running for view in views) >= min(2, len(views))
    assert views[policies.round_robin(views)].last == min(view.last for view in views)
    costs = [view.unread + max(0, size - view.matched) + 100 * view.running for view in views]
    assert costs[policies.cache_aware(views, size, 100)] == min(costs)
    hashed = views[policies.consistent_hashing(views, key)]
    for view in views:
        rest = [each for each in views if each is not view]
        if view is not hashed:
            assert rest[policies.consistent_hashing(rest, key)] is hashed, "only keys of what is gone move"


def test_keys_are_spread_over_workers() -> None:
    views = [View(f"http://w{i}:1") for i in range(4)]
    chosen = [policies.consistent_hashing(views, f"user-{n}") for n in range(1000)]
    assert min(chosen.count(i) for i in range(4)) > 180


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=60))
def test_a_bucket_gives_a_minutes_worth_a_minute(asks: list[tuple[float, int]]) -> None:
    bucket, now, taken = Bucket(60), 0.0, 0
    for pause, amount in asks:
        now += pause
        if not bucket.wait("k", amount, now):
            bucket.take("k", amount, now)
            taken += amount
        assert taken <= 60 + now + 1e-6
    wait = bucket.wait("k", 30, now)
    assert not bucket.wait("k", 30, now + wait + 1e-6)
    assert not bucket.wait("other", 60, now)


def test_one_clients_requests_leave_places_to_others() -> None:
    places = Places(16)
    running = [Silent() for _ in range(14)]
    for each in running:
        places.open(each, "a")
        places.busy(each, "a")
    one_more = Silent()
    places.open(one_more, "a")
    with pytest.raises(Overloaded, match="14 of your requests run, of 16"):
        places.busy(one_more, "a")
    others = [Silent(), Silent()]
    for each in others:
        assert not places.open(each, "b")
        places.busy(each, "b")
    assert one_more.gone
    places.waits(running[0])
    places.close(running[1])
    for each in running[:2]:
        places.open(each, "a")
        places.busy(each, "a")


@pytest.mark.parametrize(("workers", "most", "spare"), [(1, 2, 1), (2, 1, 1), (2, 8, 2), (4, 32, 16)])
async def test_one_keys_requests_leave_workers_to_others(workers: int, most: int, spare: int) -> None:
    balancer = Balancer(RouteConfig(worker_max_requests=most, queue_size=1000))
    for port in range(workers):
        balancer.add(f"http://a:{port + 1}")
        balancer.saw(f"http://a:{port + 1}", Look())
    places = workers * most

    def place(key: str) -> Ticket:
        return balancer.place(asked.Asked(), key, (), lambda error: None)

    greedy = [place("a") for _ in range(places + 1)]
    assert sum(ticket.worker is not None for ticket in greedy) == places - spare
    late = [place("b") for _ in range(spare)]
    assert all(ticket.worker is not None for ticket in late)
    third = place("c")
    assert third.worker is None
    balancer.close(late[0], 200, False)
    assert third.worker is not None, "it came last, and goes before the first one's"
    for ticket in (*late[1:], third):
        balancer.close(ticket, 200, False)
    assert sum(ticket.worker is not None for ticket in greedy) == places - spare
    for ticket in list(greedy):
        balancer.close(ticket, 200, False)
    assert (balancer.waiting, sum(worker.running for worker in balancer.workers.values())) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("aaaaabbc"), st.sampled_from("xy")), max_size=40))
async def test_a_full_queue_is_shared_out_between_keys(asks: list[tuple[str, str]]) -> None:
    """Whatever comes, for whichever model: who is refused has as many places as others, or one fewer."""
    balancer = Balancer(RouteConfig(worker_max_requests=1, queue_size=6))
    balancer.add("http://a:1")
    balancer.saw("http://a:1", Look())
    balancer.place(asked.Asked(), "z", (), lambda error: None)
    waiting: dict[int, str] = {}
    for n, (key, model) in enumerate(asks):

        def done(error: SglaError | None, n: int = n) -> None:
            assert error is not None
            del waiting[n]

        try:
            balancer.place(asked.Asked(model), key, (), done)
            waiting[n] = key
        except Overloaded:
            assert len(waiting) == 6
            mine = sum(each == key for each in waiting.values())
            assert all(list(waiting.values()).count(each) <= mine + 1 for each in "abc")
        assert len(waiting) == balancer.waiting <= 6


@given(st.lists(st.sampled_from("aaaab"), max_size=30))
def test_turns_give_each_key_one(keys: list[str]) -> None:
    turns: Turns[int] = Turns()
    for n, key in enumerate(keys):
        turns.push(key, n)
    if keys:
        turns.push("c", -1)
        turns.remove("c", -1)
        turns.remove("c", -1)
    got = [keys[turns.pop()] for _ in keys]
    assert (sorted(got), len(turns)) == (sorted(keys), 0)
    for before in range(0, 2 * min(keys.count("a"), keys.count("b")), 2):
        assert set(got[before : before + 2]) == {"a", "b"}


def test_a_breaker_opens_tries_and_closes() -> None:
    breaker = Breaker(2, 10.0)
    breaker.failure(0)
    breaker.success()
    breaker.failure(1)
    assert breaker.allows(1)
    breaker.failure(2)
    assert not breaker.allows(11.9)
    assert breaker.allows(12)
    breaker.began()
    assert not breaker.allows(12), "one request tries"
    breaker.failure(13)
    assert not breaker.allows(22.9)
    breaker.began()
    breaker.neither()
    assert breaker.allows(23)
    breaker.began()
    breaker.answered()
    assert breaker.allows(23), "what tried is answered, however long that takes"
    breaker.failure(24)
    assert not breaker.allows(33.9), "one more failure in the same row is enough"
    breaker.success()
    assert not breaker.open


def test_a_worker_that_makes_no_steps_is_down() -> None:
    worker = Worker("http://w:1", RouteConfig(stuck_secs=30))
    assert not worker.usable(0)
    worker.saw(Look(steps=5, busy=True), 0)
    worker.tree.insert(prefix.path(b"x" * 999))
    assert worker.usable(0)
    assert not worker.saw(Look(steps=5, busy=True), 29)
    assert worker.saw(Look(steps=5, busy=True), 30)
    assert (worker.usable(30), worker.tree.size) == (False, 0)
    worker.saw(Look(steps=6, busy=True), 31)
    assert worker.usable(31)
    worker.saw(Look(steps=6, busy=False), 90)
    assert not worker.saw(Look(steps=6, busy=True), 119), "an idle one need not"
    assert not worker.saw(Look(steps=None, busy=True), 999), "nor one that does not count"


def test_a_worker_that_rests_is_not_down() -> None:
    worker = Worker("http://w:1", RouteConfig())
    worker.saw(Look(), 0)
    assert not worker.saw(Look(trouble="it sleeps", rests=True), 1)
    assert (worker.usable(1), worker.reachable(1)) == (False, True)
    assert worker.saw(Look(trouble="it is gone"), 2), "what it has is given up"
    assert not worker.reachable(2)
    assert worker.describe(2)["state"] == "down"


def test_a_worker_that_is_late_once_is_not_down() -> None:
    worker = Worker("http://w:1", RouteConfig())
    silent = Look(trouble="it has not answered for 5 s", silent=True)
    assert not worker.saw(silent, 0)
    assert (worker.state, worker.reachable(0)) == ("down", False), "it has never been up"
    worker.saw(Look(), 1)
    worker.tree.insert(prefix.path(b"x" * 500))
    assert not worker.saw(silent, 2)
    assert (worker.state, worker.usable(2), worker.reachable(2)) == ("late", False, True)
    assert worker.tree.size
    worker.saw(Look(), 3)
    assert worker.state == "up"
    assert not worker.saw(silent, 4)
    assert worker.saw(silent, 5), "the second time in a row"
    assert (worker.state, worker.tree.size) == ("down", 0)
    worker.saw(Look(), 6)
    worker.saw(silent, 7)
    assert worker.saw(Look(trouble="connection refused"), 8)


def test_metrics_of_engines_are_read() -> None:
    ours = 'sgla:steps_total{model_name="m"} 7.0\nsgla:num_running_reqs{model_name="m"} 2.0\n'
    assert read_metrics(ours + "sgla:max_total_num_tokens 100.0") == Look(steps=7, busy=True, tokens=100)
    both = 'sgla:max_total_num_tokens 100.0\nsglang:max_total_num_tokens{tp_rank="0"} 100.0'
    assert read_metrics(both) == Look(tokens=100)
    vllm = 'vllm:cache_config_info{block_size="16",x="y",num_gpu_blocks="10"} 1.0'
    assert read_metrics(vllm) == Look(tokens=160)
    assert read_metrics(vllm.replace("16", "9" * 400)) == Look()  # no number of a size
    llama = (
        "# TYPE llamacpp:n_decode_total counter\nllamacpp:n_decode_total 332\nllamacpp:requests_processing 1"
    )
    assert read_metrics(llama) == Look(steps=332, busy=True)
    assert read_metrics(ours + llama).steps == 7, "an engine's own count goes before what it has for others"
    # A long prompt is read in steps that end without a token: the cache fills up meanwhile.
    lines = (
        'vllm:iteration_tokens_total_count{engine="0"} 4.0',
        'vllm:iteration_tokens_total_count{engine="1"} 2.0',
        'vllm:generation_tokens_total{engine="0"} 10.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        'vllm:num_requests_running{engine="0"} 0.0',
        'vllm:num_requests_running{engine="1"} 1.0',
    )
    assert read_metrics("\n".join(lines)) == Look(steps=16.25, busy=True)
    assert read_metrics("sgla:steps_total nonsense\nsgla:num_running_reqs inf") == Look()


@given(st.one_of(st.binary(), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)))
def test_any_body_can_be_asked_about(body: bytes | str) -> None:
    data = body.encode() if isinstance(body, str) else body
    for text in (data, b'{"model":' + data + b',"messages":' + data + b',"user":' + data + b"}"):
        found = asked.read("/v1/x", "application/json", text, "", True)
        assert found.size <= len(text)


def test_what_a_body_tells() -> None:
    body = json.dumps({"messages": [1], "tools": [2], "model": "m", "user": "u", "conversation": {"id": "c"}})
    found = asked.read("/v1/responses", "application/json", body.encode(), "", True)
    assert (found.model, found.size, found.session, found.stored) == ("m", 6, "c", "c")
    assert asked.read("/v1/responses/r_1/cancel?x=1", "", b"", "s", True)[3:5] == ("s", "r_1")
    assert not asked.read("/v1/responses/input_tokens", "", b"", "", True).stored
    for many in (
        b'{"model":"m","prompt":[' + b"{}," * asked.MEMBERS + b"1]}",
        b'{"model":"m"' * asked.MEMBERS,
    ):
        assert asked.read("/v1/x", "application/json", many, "s", True) == asked.Asked(session="s")


async def test_prompts_go_where_they_are_cached() -> None:
    """Conversations stay where they began, new ones spread, and a crowd behind one prompt is shared out."""
    balancer = balancer_of(4)
    rng = random.Random(0)
    talks = [rng.randbytes(3000) for _ in range(40)]
    homes: dict[int, set[str]] = {}
    total = matched = 0
    for _ in range(5):
        for n in rng.sample(range(40), 40):
            talks[n] += rng.randbytes(400)
            ticket = placed(balancer, talks[n])
            assert ticket.worker is not None
            total += len(talks[n])
            matched += len(talks[n]) - ticket.unread
            homes.setdefault(n, set()).add(ticket.worker.url)
            balancer.close(ticket, 200, False)
    assert all(len(urls) == 1 for urls in homes.values())
    counts = [sum(url in urls for urls in homes.values()) for url in balancer.workers]
    assert counts == [10] * 4
    assert matched > 0.95 * (total - 40 * (3400 + 4 * 400)), "but for what is new, all was cached"
    crowd = [placed(balancer, talks[0]) for _ in range(32)]
    assert len({ticket.worker for ticket in crowd}) == 4


def balancer_of(count: int, **settings: Any) -> Balancer:
    balancer = Balancer(RouteConfig(**settings), seed=0)
    for n in range(count):
        balancer.add(f"http://w{n}:1")
        balancer.saw(f"http://w{n}:1", Look())
    return balancer


def placed(balancer: Balancer, prompt: bytes = b"", session: str = "", tried: tuple[str, ...] = ()) -> Ticket:
    what = asked.Asked("", len(prompt), prefix.path(prompt), session)
    return balancer.place(what, "key", tried, lambda error: None)


@pytest.mark.parametrize("policy", ["session", "consistent_hashing"])
async def test_sessions_stay_with_their_worker(policy: str) -> None:
    balancer = balancer_of(4, policy=policy)
    first = {name: placed(balancer, session=name).worker for name in map(str, range(40))}
    assert len(set(first.values())) == 4
    assert {name: placed(balancer, session=name).worker for name in first} == first
    gone = first["0"]
    assert gone is not None
    balancer.saw(gone.url, Look(trouble="down"))
    for name, worker in first.items():
        assert (placed(balancer, session=name).worker is worker) == (worker is not gone)


async def test_a_breaker_keeps_requests_away(monkeypatch: pytest.MonkeyPatch) -> None:
    balancer = balancer_of(2, policy="round_robin", cb_failure_threshold=2)
    for _ in range(4):
        ticket = placed(balancer)
        assert ticket.worker is not None
        balancer.close(ticket, 0, fault=ticket.worker.url == "http://w0:1")
    chosen = [placed(balancer).worker for _ in range(5)]
    assert {worker.url for worker in chosen if worker is not None} == {"http://w1:1"}
    with pytest.raises(NotReady):
        placed(balancer, tried=("http://w1:1",))


async def test_an_answer_that_takes_long_holds_no_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker whose breaker was open: the answer that tries it has begun."""
    now = 0.0
    monkeypatch.setattr("sgla.clock.now", lambda: now)
    balancer = balancer_of(1, cb_failure_threshold=1, cb_timeout_duration_secs=10)
    balancer.close(placed(balancer), 0, fault=True)
    now = 10.0
    tries = placed(balancer)
    with pytest.raises(NotReady):
        placed(balancer)
    balancer.began(tries)
    assert placed(balancer).worker is tries.worker


async def test_workers_are_looked_at(route: Route) -> None:
    router = await route(1)
    [worker] = router.workers
    texts = {
        "/health": "{}",
        "/v1/models": '{"data": [{"id": "a"}, 3]}',
        "/metrics": "sgla:steps_total 3\nsgla:max_total_num_tokens 50",
    }

    async def answer(request: web.Request) -> web.Response:
        status = statuses.get(request.path, 200) if request.path in texts else 404
        return web.Response(text=texts.get(request.path, ""), status=status)

    statuses: dict[str, int] = {}
    worker.answer = answer
    watch = Watch(balancer_of(0, worker_api_key="k"))
    try:
        assert await watch.look(worker.url) == Look(cards=[{"id": "a"}], steps=3, tokens=50)
        assert worker.seen[0][2]["Authorization"] == "Bearer k"
        del texts["/v1/models"]
        assert (await watch.look(worker.url)).cards is None
        del texts["/health"]
        look = await watch.look(worker.url)
        assert ("404" in look.trouble, look.rests) == (True, False)
        for phase in ("sleeping", "updating", "draining", "load"):
            texts["/health"] = json.dumps({"phase": phase})
            statuses["/health"] = 503
            assert (await watch.look(worker.url)).rests == (phase in ("sleeping", "updating"))
        assert "Connect" in (await watch.look("http://127.0.0.1:1")).trouble
    finally:
        await watch.close()


async def test_names_become_addresses() -> None:
    assert "http://127.0.0.1:99" in await discovery.resolve("dns://localhost:99")
    balancer = balancer_of(0)
    found = discovery.Discovery(balancer, None)
    found.apply(set(), {"http://a:1", "http://b:1"})
    found.apply({"http://a:1", "http://b:1"}, {"http://b:1"})
    assert list(balancer.workers) == ["http://b:1"]


async def test_a_server_with_two_addresses_is_one_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a name that has none for a while is told of once."""
    both = [(socket.AF_INET6, 1, 6, "", ("fd00::1", 9, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.1", 9))]
    turns = [both[:1], both, OSError("no such name"), OSError("no such name"), both]
    seen = asyncio.Event()

    async def ask(*args: Any, **more: Any) -> Any:
        if len(turns) == 1:
            seen.set()
        found = turns.pop(0) if len(turns) > 1 else turns[0]
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", ask)
    assert await discovery.resolve("dns://a:9") == {"http://[fd00::1]:9"}
    monkeypatch.setattr(discovery, "INTERVAL", 0.001)
    balancer = Balancer(RouteConfig(worker=["dns://a:9"]))
    following = discovery.Discovery(balancer, None)
    async with asyncio.timeout(5):
        await seen.wait()
    following.close()
    assert list(balancer.workers) == ["http://10.0.0.1:9"]
    assert caplog.text.count("workers cannot be found") == 1


def pod(ip: str, ready: str = "True", **metadata: str) -> dict[str, Any]:
    return {
        "metadata": metadata,
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
    }


async def test_kubernetes_lists_ready_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        pod("10.0.0.1"),
        pod("fd00::1"),
        pod("10.0.0.2", "False"),
        pod("10.0.0.3", deletionTimestamp="x"),
    ]
    api = FakeWorker()
    await api.start()

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.query["labelSelector"] == "app=x,tier=y"
        return web.json_response({"items": listed})

    api.answer = answer
    for name, text in (("token", "secret\n"), ("namespace", "ours")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: None)
    config = RouteConfig(service_discovery=True, selector=["app=x", "tier=y"], service_discovery_port=8)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    cluster = discovery.Cluster(config, environ, tmp_path)
    cluster._url = cluster._url.replace("https://127.0.0.1:1", api.url)
    assert await cluster.find() == {"http://10.0.0.1:8", "http://[fd00::1]:8"}
    assert api.seen[0][0].startswith("/api/v1/namespaces/ours/pods?")
    await api.stop()
    for arguments in ((environ, tmp_path / "none"), ({}, tmp_path)):
        with pytest.raises(ConfigError, match="inside a Kubernetes cluster"):
            discovery.Cluster(config, *arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no workers"),
        ("--worker ftp://x:1", "no address of a worker"),
        ("--worker http://x:1/base", "no address of a worker"),
        ("--worker http://u:p@x:1", "no address of a worker"),
        ("--worker dns://x", "no address of a worker"),
        ("--worker http://x:1 --rpm-limit 0", "--rpm-limit must be more than 0"),
        ("--worker http://x:1 --stuck-secs nan", "--stuck-secs must be more than 0"),
        ("--worker http://x:1 --queue-timeout-secs inf", "--queue-timeout-secs must be more than 0"),
        ("--worker http://x:1 --drain-timeout nan", "--drain-timeout must not be less than 0"),
        ("--worker http://x:1 --service-discovery-port 65536", "--service-discovery-port must be from 0"),
        ("--worker http://x:1 --session-header a:b", "'a:b' is no name of a header"),
        ("--worker http://x:1 --api-key=", "--api-key is empty"),
        ("--worker http://x:1 --admin-api-key=", "--admin-api-key is empty"),
        ("--worker http://x:1 --worker-api-key=", "--worker-api-key is empty"),
        ("--worker http://x:1 --selector a=b", "needs --service-discovery"),
        ("--service-discovery", "needs --selector"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config_of(parse(["route", *words.split()])))


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLA_API_KEY", "a b")
    words = "route --worker-urls http://a:1 http://b:2 --worker http://c:3 --policy session "
    config = config_of(parse((words + "--max-body-bytes 1M --max-tree-size 2G").split()))
    assert (config.max_body_bytes, config.max_tree_size) == (1 << 20, 2 << 30)
    assert config.worker == ["http://a:1", "http://b:2", "http://c:3"]
    assert (config.policy, config.api_key) == ("session", ["a", "b"])


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("route --worker http://a:1 --cache-threshold 0.5", "--load-weight"),
        ("route --worker http://a:1 --pd-disaggregation", "as --worker"),
        ("route --worker http://a:1 --retry-initial-backoff-ms 5", "--retry-max-retries"),
    ],
)
def test_flags_of_others_are_refused_with_what_to_use(
    words: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words.split())
    assert instead in capsys.readouterr().err


def test_a_port_that_is_taken_is_named() -> None:
    first = serve.bind(RouteConfig(port=0), 2)
    port = first[0][0].getsockname()[1]
    assert first[1][0].getsockname()[1] == port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*choose another --port"):
        serve.bind(RouteConfig(port=port), 1)
    for each in first:
        each[0].close()

"""Large requests leave turns of the loop to others, and say the same as small ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.errors import BadRequest, InvalidField
from sgla.http import turns
from sgla.http.native.generate import SCHEMA as GENERATE
from sgla.http.openai.text import SCHEMA
from sgla.http.request import numbers
from sgla.http.request.schema import CHECKED, LOOKED, Schema
from sgla.http.turns import AT_ONCE, TURNS, Desk, Door, paced, pause, stepped


async def turns_of_another(running: list[bool]) -> int:
    count = 0
    while running:
        count += 1
        await asyncio.sleep(0)
    return count


async def test_a_pause_is_several_turns() -> None:
    running = [True]
    other = asyncio.ensure_future(turns_of_another(running))
    await asyncio.sleep(0)
    for _ in range(5):
        await pause()
    running.clear()
    assert await other >= 5 * TURNS


async def test_many_items_are_made_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = []

    async def told() -> None:
        paused.append(len(made))

    monkeypatch.setattr(turns, "pause", told)
    monkeypatch.setattr(turns, "SLICE", -1.0)  # each item takes too long
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(4):
            made.append(i)
            yield i

    assert await paced(items()) == [0, 1, 2, 3]
    assert paused == [1, 2, 3, 4]
    monkeypatch.setattr(turns, "SLICE", 1e9)
    assert await paced(iter(range(10_000))) == list(range(10_000))
    assert len(paused) == 4


async def test_steps_end_with_their_result() -> None:
    def work() -> Any:
        yield
        yield
        return "done"

    assert await stepped(work()) == "done"


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_numbers_are_the_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(numbers, "PIECE", rng.randrange(4, 40))
    value: list[Any] = [
        rng.choice([[], [7] * rng.randrange(30), rng.randrange(10**9), None, -1.5]) for _ in range(60)
    ]
    text = json.dumps(
        value, indent=rng.choice([None, 0, 2]), separators=rng.choice([None, (",", ":")])
    ).encode()
    items: list[Any] = []
    longest = 0
    for piece, inside in numbers.pieces(text):
        numbers.read(msgspec.json.decode, "prompt", items, inside, piece)
        longest = max(longest, len(piece))
    assert items == value
    assert longest < numbers.PIECE + 70


def test_a_list_that_is_nested_deeper_is_one_piece() -> None:
    text = b"[[1],[[" + b"2," * numbers.PIECE + b"3]]]"
    items: list[Any] = []
    for piece, inside in numbers.pieces(text):
        numbers.read(msgspec.json.decode, "prompt", items, inside, piece)
    assert items == json.loads(text)


def counted(work: Generator[None, None, Any]) -> tuple[Any, int]:
    """What it returns, and how many pauses it has."""
    pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


LONG = 100_000  # ids, which are several pieces


@pytest.mark.parametrize("prompt", [[49_000] * LONG, [[1, 2, 3], [49_000] * LONG, [], [5] * LONG]])
def test_a_long_list_is_read_in_steps(prompt: list[Any]) -> None:
    work = SCHEMA.steps(json.dumps({"prompt": prompt, "n": 2, "stop": ["a"], "odd": 1}).encode())
    (request, ignored), steps = counted(work)
    assert (request.prompt, request.n, request.stop) == (prompt, 2, ["a"])
    assert ignored == ["odd"]
    assert steps >= LONG * 5 // numbers.PIECE


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([5] * LONG + [None], f"prompt[{LONG}]: expected int | str | array, got null"),
        ([[5] * LONG, [5] * LONG, [1.5]], "prompt[2][0]: expected int, got float"),
        ([[5] * LONG, [5] * LONG + [None]], "prompt[1]"),
        ([5] * LONG + [[[5]]], f"prompt[{LONG}][0]: expected int, got array"),
    ],
)
def test_an_error_in_a_long_list_has_its_place(wrong: list[Any], told: str) -> None:
    with pytest.raises(InvalidField) as caught:
        SCHEMA.typed(json.dumps({"prompt": wrong}).encode())
    assert caught.value.message.startswith(told)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("end", [b",]", b"", b",,5]", b",01]", b"]]", b"] 5", b",-]", b",5}"])
def test_a_long_list_that_is_no_json_is_refused(end: bytes) -> None:
    with pytest.raises(BadRequest, match="not valid JSON"):
        SCHEMA.typed(b'{"prompt":[' + b"5," * LONG + b"5" + end + b"}")


class Numbered(msgspec.Struct):
    """A request with a bound on a list."""

    logprob_start_len: list[int]


def test_a_long_list_is_checked_as_a_whole() -> None:
    with pytest.raises(InvalidField, match=f"has {LONG} items"):
        Schema(Numbered).typed(json.dumps({"logprob_start_len": [5] * LONG}).encode())


def test_many_objects_are_looked_at_in_steps() -> None:
    """A small request, too, has no pause."""
    many = 4 * CHECKED
    body = {"text": ["a"] * many, "sampling_params": [{"max_new_tokens": 1, "odd": 1}] * many}
    (_, ignored), steps = counted(GENERATE.steps(json.dumps(body).encode()))
    assert set(ignored) == {"odd"}
    assert steps >= 4 + many // LOOKED
    small = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    assert counted(GENERATE.steps(json.dumps(small).encode()))[1] == 0


async def test_whoever_comes_is_answered_between_two_looks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of reading a large body leaves as many turns as a small request takes."""
    seen: list[int] = []
    running = [True]
    turn = 0

    async def counting() -> None:
        nonlocal turn
        while running:
            turn += 1
            await asyncio.sleep(0)

    read = numbers.read

    def reads(*args: Any) -> None:
        seen.append(turn)
        read(*args)

    monkeypatch.setattr(numbers, "read", reads)
    other = asyncio.ensure_future(counting())
    status, reply = await site.post("/v1/completions", {"prompt": [49_000] * LONG})
    running.clear()
    await other
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert len(seen) > 2
    assert min(later - earlier for earlier, later in itertools.pairwise(seen)) >= TURNS


async def test_tasks_that_come_together_go_on_a_few_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take turns, who is cancelled has no place any more, and nobody is left."""
    monkeypatch.setattr(turns, "SLICE", -1.0)  # each task takes too long
    door, went = Door(), []

    async def task(client: str, number: int) -> None:
        await door.enter(client)
        went.append((client, number))

    greedy = [asyncio.ensure_future(task("greedy", i)) for i in range(4 * AT_ONCE)]
    await asyncio.sleep(0)
    modest = [asyncio.ensure_future(task("modest", i)) for i in range(2)]
    greedy[3].cancel()
    counts = []
    while not all(each.done() for each in (*greedy, *modest)):
        before = len(went)
        await asyncio.sleep(0)
        counts.append(len(went) - before)
    assert max(counts) <= AT_ONCE
    assert [number for client, number in went if client == "greedy"] == [
        i for i in range(4 * AT_ONCE) if i != 3
    ]
    assert max(went.index(("modest", i)) for i in range(2)) < 2 * AT_ONCE
    await task("greedy", -1)
    assert not door._waiting


async def test_a_task_alone_goes_on_at_once() -> None:
    door = Door()
    running = [True]
    other = asyncio.ensure_future(turns_of_another(running))
    for _ in range(5):
        await door.enter("a")
    running.clear()
    assert await other == 0


async def test_a_desk_serves_clients_by_turns() -> None:
    """One at a time; who is cancelled while it waits has no turn, and nobody is left."""
    desk, served, busy = Desk(), [], 0

    async def serve(client: str) -> None:
        nonlocal busy
        async with desk.turn(client):
            busy += 1
            assert busy == 1
            await asyncio.sleep(0)
            served.append(client)
            busy -= 1

    noisy = [asyncio.ensure_future(serve("noisy")) for _ in range(20)]
    await asyncio.sleep(0)
    quiet = [asyncio.ensure_future(serve("quiet")) for _ in range(2)]
    noisy[1].cancel()
    await asyncio.gather(*noisy, *quiet, return_exceptions=True)
    assert len(served) == 21
    assert served.index("quiet") <= 2
    assert "quiet" in served[served.index("quiet") + 1 :][:2]


async def test_a_flood_of_requests_is_answered_in_turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLICE", -1.0)
    bodies = [{"prompt": "x", "max_tokens": 1}] * 50
    replies = await asyncio.gather(*(site.post("/v1/completions", body) for body in bodies))
    assert {status for status, _ in replies} == {200}
    assert {(await site.get("/health/live"))[0], (await site.get("/health_generate"))[0]} == {200}


async def test_all_requests_are_aborted_with_pauses(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    site = await serve(ingress=FakeIngress(manual=True))
    running = [
        asyncio.ensure_future(site.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 9}}))
        for _ in range(20)
    ]
    while len(site.ingress.jobs) < len(running):
        await asyncio.sleep(0.01)
    monkeypatch.setattr(turns, "SLICE", -1.0)
    status, reply = await site.post("/abort_request", {"abort_all": True})
    assert (status, reply["aborted"]) == (200, len(running))
    for _, answer in await asyncio.gather(*running):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_those_who_are_refused_have_their_turn_too(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, entered = await serve(api_key=["secret"]), []

    async def enter(self: Door, client: str) -> None:
        entered.append(client)

    monkeypatch.setattr(Door, "enter", enter)
    for method, expected in (("GET", 401), ("OPTIONS", 204)):
        async with site.http.request(
            method, site.url + "/v1/models", headers={"Authorization": "Bearer wrong"}
        ) as response:
            assert response.status == expected
    assert entered == ["127.0.0.1"] * 2

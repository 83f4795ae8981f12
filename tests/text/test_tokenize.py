"""The tokenizer actor: whose turn it is, requests that are cancelled, and libraries that panic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sgla.actors.cost import job_bytes
from sgla.actors.lanes import INLINE_SIZE, SMALL_SIZE, Lanes
from sgla.actors.tokenize import TURN, Tokenize, cost
from sgla.errors import InvalidField, SglaError
from sgla.media.picture import Picture
from sgla.messages import (
    GRAMMAR,
    Cancel,
    Grammar,
    Job,
    Opened,
    Prepared,
    Ready,
    Rejected,
    RowSampling,
    SamplingParams,
    Submit,
)

NOBODY: Any = None


def actor(prepare: Callable[[Job], list[Submit]], reject: Callable[[Rejected], None]) -> Tokenize:
    def crash(name: str, error: BaseException) -> None:
        raise AssertionError(f"{name} crashed") from error

    return Tokenize(prepare, NOBODY, NOBODY, reject, crash, Lanes(1, 1))


def job(rid: str, size: int, client: str = "") -> Job:
    return Job(rid=rid, sampling=SamplingParams(), text="x" * size, client=client)


async def nothing_pends(tokenize: Tokenize) -> None:
    async with asyncio.timeout(10):
        while tokenize._pending:
            await asyncio.sleep(0.001)


async def test_what_is_cancelled_in_the_queue_is_not_prepared() -> None:
    prepared, go_on = [], threading.Event()

    def prepare(job: Job) -> list[Submit]:
        prepared.append(job.rid)
        go_on.wait()
        return []

    tokenize = actor(prepare, lambda rejected: None)
    for rid in ("a", "b", "c"):
        tokenize.post(job(rid, INLINE_SIZE + 1))
    await asyncio.sleep(0)  # its turn
    tokenize.cancel("b", 1, "client")
    assert list(tokenize._lanes.small._waiting[""]) == ["c"]
    go_on.set()
    await nothing_pends(tokenize)
    assert prepared == ["a", "c"]
    assert not tokenize._lanes.small._waiting
    tokenize.close()


@pytest.mark.parametrize("size", [INLINE_SIZE + 1, SMALL_SIZE + 1])
async def test_clients_take_turns(size: int) -> None:
    """Who has queued a hundred prompts does not make another wait for more than the one that runs."""
    prepared, begun, go_on = [], threading.Event(), threading.Event()

    def prepare(job: Job) -> list[Submit]:
        prepared.append(job.rid)
        begun.set()
        go_on.wait()
        return []

    tokenize = actor(prepare, lambda rejected: None)
    for i in range(100):
        tokenize.post(job(f"many-{i}", size, "greedy"))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 10)
    for i in range(2):
        tokenize.post(job(f"few-{i}", size, "modest"))
    while tokenize._mailbox:
        await asyncio.sleep(0)
    go_on.set()
    await nothing_pends(tokenize)
    assert prepared[:5] == ["many-0", "many-1", "few-0", "many-2", "few-1"]
    assert len(prepared) == 102
    tokenize.close()


async def test_a_small_prompt_does_not_wait_for_large_ones() -> None:
    prepared, small, go_on = [], threading.Event(), threading.Event()

    def prepare(job: Job) -> list[Submit]:
        prepared.append(job.rid)
        if job.rid == "small":
            small.set()
        else:
            go_on.wait()
        return []

    tokenize = actor(prepare, lambda rejected: None)
    for i in range(100):
        tokenize.post(job(str(i), SMALL_SIZE + 1))
    tokenize.post(job("small", SMALL_SIZE))
    while tokenize._mailbox:
        await asyncio.sleep(0)
    assert await asyncio.to_thread(small.wait, 10)
    assert sorted(prepared) == ["0", "small"]
    tokenize.close()
    go_on.set()


async def test_an_id_used_again_is_a_new_request() -> None:
    """What a cancelled request left running is not taken for the one that has its id now."""
    prepared, begun, go_on = [], threading.Event(), threading.Event()

    def prepare(job: Job) -> list[Submit]:
        prepared.append(job.text)
        begun.set()
        go_on.wait()
        return []

    tokenize = actor(prepare, lambda rejected: None)
    first, second = job("a", INLINE_SIZE + 1), job("a", INLINE_SIZE + 2)
    tokenize.post(first)
    await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 10)
    tokenize.cancel("a", 1, "client")
    tokenize.post(second)
    await asyncio.sleep(0)
    go_on.set()
    await nothing_pends(tokenize)
    assert prepared == [first.text, second.text]
    tokenize.close()


class Compiler:
    """Has every grammar compiled at once, when it is told to."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    def find(self, grammar: Grammar) -> None:
        return None

    async def compile(self, grammar: Grammar, client: str) -> str:
        return await asyncio.shield(self.done)

    def close(self) -> None:
        pass


class Rest:
    """The actors behind."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.rejected: list[Rejected] = []

    def open(self, opened: Opened) -> None:
        pass

    def post(self, message: Submit | Ready | Cancel) -> None:
        self.posted.append(message)


async def test_requests_are_held_until_their_grammar_is_compiled() -> None:
    def prepare(job: Job) -> list[Submit]:
        sampling = RowSampling()
        return [
            Submit(
                rid=f"{job.rid}-{i}",
                parent=job.rid,
                index=i,
                tokens=[1],
                max_new=1,
                stop_ids=frozenset(),
                sampling=sampling,
            )
            for i in range(2)
        ]

    compiler: Any = Compiler()
    rest: Any = Rest()
    tokenize = Tokenize(prepare, rest, rest, rest.rejected.append, NOBODY, Lanes(), compiler)
    grammar = SamplingParams(grammar=Grammar(kind="regex", text="a", param="regex"))
    for rid in ("a", "b", "c"):
        tokenize.post(Job(rid=rid, sampling=grammar, text="x"))
    await nothing_pends(tokenize)
    assert [(submit.rid, set(submit.holds)) for submit in rest.posted] == [
        (f"{rid}-{i}", {GRAMMAR}) for rid in "abc" for i in range(2)
    ]
    assert tokenize.preparing("a")
    tokenize.cancel("b", 2, "client")
    rest.posted.clear()
    compiler.done.set_result("source")
    while tokenize.preparing("c"):
        await asyncio.sleep(0)
    assert [(told.rid, told.reason, told.sampling.grammar) for told in rest.posted] == [
        (f"{rid}-{i}", GRAMMAR, "source") for rid in "ac" for i in range(2)
    ]
    tokenize.close()


async def test_a_grammar_that_cannot_be_compiled_ends_its_held_request() -> None:
    compiler: Any = Compiler()
    rest: Any = Rest()
    tokenize = Tokenize(lambda job: [], rest, rest, rest.rejected.append, NOBODY, Lanes(), compiler)
    grammar = SamplingParams(grammar=Grammar(kind="regex", text="a", param="regex"))
    tokenize.post(Job(rid="a", sampling=grammar, text="x"))
    await nothing_pends(tokenize)
    compiler.done.set_exception(InvalidField("no", param="regex"))
    while tokenize.preparing("a"):
        await asyncio.sleep(0)
    [rejected] = rest.rejected
    assert (rejected.rid, rejected.message) == ("a", "no")
    tokenize.close()


def test_a_message_is_more_than_its_text() -> None:
    """A chat of thousands of empty messages is not rendered in the loop."""
    messages = [{"role": "user", "content": ""}] * 1000
    assert job_bytes(Job(rid="a", sampling=SamplingParams(), messages=messages)) > INLINE_SIZE


class Panic(BaseException):
    """As what a panic of a library in Rust becomes."""


@pytest.mark.parametrize("size", [1, INLINE_SIZE + 1])
async def test_a_panic_ends_its_request_only(size: int) -> None:
    def prepare(job: Job) -> list[Submit]:
        if job.rid == "bad":
            raise Panic
        return []

    rejected = asyncio.get_running_loop().create_future()
    tokenize = actor(prepare, rejected.set_result)
    for rid in ("bad", "good"):
        tokenize.post(job(rid, size))
    ended = await asyncio.wait_for(rejected, 5)
    assert (ended.rid, ended.status) == ("bad", 500)
    await nothing_pends(tokenize)
    tokenize.close()


async def test_a_panic_of_an_actor_is_told() -> None:
    def panic(rejected: Rejected) -> None:
        raise Panic

    crashed = asyncio.get_running_loop().create_future()
    refused = SglaError("no").rejected("bad")

    def prepare(job: Job) -> Any:
        return refused

    tokenize = Tokenize(prepare, NOBODY, NOBODY, panic, lambda *told: crashed.set_result(told), Lanes())
    tokenize.post(job("bad", 1))
    name, error = await asyncio.wait_for(crashed, 5)
    assert (name, type(error)) == ("Tokenize", Panic)
    tokenize.close()


async def test_many_short_prompts_take_several_turns() -> None:
    prepared: list[str] = []

    def prepare(job: Job) -> list[Submit]:
        prepared.append(job.rid)
        return []

    tokenize = actor(prepare, lambda rejected: None)
    count = 4 * TURN // INLINE_SIZE
    for i in range(count):
        tokenize.post(job(str(i), INLINE_SIZE))
    turns = []
    while len(prepared) < count:
        before = len(prepared)
        await asyncio.sleep(0)
        turns.append(len(prepared) - before)
    assert prepared == [str(i) for i in range(count)]
    assert max(turns) <= 1 + TURN // INLINE_SIZE
    tokenize.close()


async def test_what_is_left_of_many_prompts_takes_smaller_turns() -> None:
    """A batch of ordinary size comes to the scheduler whole; behind a larger one others need not wait for
    several such turns."""
    prepared: list[str] = []

    def prepare(job: Job) -> list[Submit]:
        prepared.append(job.rid)
        return []

    tokenize = actor(prepare, lambda rejected: None)
    size = cost(job("a", 500))
    first, later = TURN // size + 1, TURN // 4 // size + 1
    count = first + 2 * later + 1
    for batch in range(2):  # once nothing is left, who comes has a large turn again
        prepared.clear()
        expected = [f"{batch}-{i}" for i in range(count)]
        for rid in expected:
            tokenize.post(job(rid, 500))
        turns = []
        while tokenize._mailbox:
            before = len(prepared)
            await asyncio.sleep(0)
            turns.append(len(prepared) - before)
            if len(turns) == 1:
                tokenize.post(job("new", 500))
        assert turns == [first, later, later, 2]
        assert prepared == [*expected, "new"]
    tokenize.close()


@pytest.mark.parametrize(("size", "lane"), [(0, "small"), (SMALL_SIZE + 1, "large")])
async def test_chats_are_prepared_in_lanes(size: int, lane: str) -> None:
    """Their template may take its time, for what is not in the messages, too."""
    names: list[str] = []
    done = threading.Event()

    def prepare(job: Job) -> list[Submit]:
        names.append(threading.current_thread().name)
        done.set()
        return []

    tokenize = actor(prepare, lambda rejected: None)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    tokenize.post(Job(rid="a", sampling=SamplingParams(), messages=chat, size=size))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(done.wait, 10)
    assert names[0].startswith(lane)
    tokenize.close()


@pytest.mark.parametrize(
    "more",
    [
        {"suffix": "x" * (INLINE_SIZE + 1)},
        {"sampling": SamplingParams(bad_words=["x" * 1024] * 5)},
        {"sampling": SamplingParams(stop=["x" * 1024] * 5)},
        {"sampling": SamplingParams(allowed_token_ids=[5, 6] * INLINE_SIZE)},
        {"sampling": SamplingParams(logit_bias=dict.fromkeys(range(INLINE_SIZE + 1), 1.0))},
    ],
)
@pytest.mark.parametrize("prompt", [{"text": "hi"}, {"token_ids": [1]}])
async def test_what_comes_beside_a_prompt_counts(prompt: dict[str, Any], more: dict[str, Any]) -> None:
    names: list[str] = []
    done = threading.Event()

    def prepare(job: Job) -> list[Submit]:
        names.append(threading.current_thread().name)
        done.set()
        return []

    tokenize = actor(prepare, lambda rejected: None)
    tokenize.post(Job(**{"rid": "a", "sampling": SamplingParams(), **prompt, **more}))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(done.wait, 10)
    assert names[0].startswith("small")
    tokenize.close()


class Room:
    """Prepares pictures when it is told to."""

    def __init__(self, error: SglaError | None = None) -> None:
        self.error, self.begun, self.go_on = error, asyncio.Event(), asyncio.Event()

    async def prepare(
        self, pictures: list[Picture], client: str, sizes: dict[str, Any], window: Any
    ) -> list[Prepared]:
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return [Prepared(picture.digest, "", []) for picture in pictures]


@pytest.mark.parametrize("end", ["prepared", "refused", "cancelled"])
async def test_a_prompt_waits_for_its_pictures(end: str) -> None:
    seen: list[Job] = []
    rejected: list[Rejected] = []
    room: Any = Room(InvalidField("no picture", param="messages") if end == "refused" else None)
    tokenize = actor(lambda job: seen.append(job) or [], rejected.append)  # type: ignore[func-returns-value]
    tokenize._pictures = room
    picture = Picture.of(1, 1, b"abc")
    wanted = job("a", 5)
    wanted.pictures = [picture]
    tokenize.post(wanted)
    await asyncio.wait_for(room.begun.wait(), 60)
    assert tokenize.preparing("a")
    if end == "cancelled":
        tokenize.cancel("a", 1, "client")
    room.go_on.set()
    await nothing_pends(tokenize)
    await asyncio.sleep(0)
    assert not tokenize._looks
    assert [made.prepared[0].digest for made in seen] == [picture.digest] * (end == "prepared")
    assert [each.message for each in rejected] == ["no picture"] * (end == "refused")
    assert wanted.pictures == ([picture] if end == "cancelled" else [])
    tokenize.close()

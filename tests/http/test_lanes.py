"""Work of handlers beside the loop: what is too much is refused, and small work does not wait for large."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from typing import Any

import msgspec
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.actors import lanes
from sgla.actors.lanes import SMALL_SIZE, Lanes
from sgla.http.lanes import sliced, sliced_lists
from sgla.http.native.tokens import MAX_CHARS, MAX_TEXTS
from sgla.http.openai.text import MAX_AT_ONCE
from sgla.http.request import intake
from sgla.http.request.schema import MAX_REPEATED
from sgla.http.wire import PIECE, Pieces

TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("route", "body", "told"),
    [
        ("/tokenize", {"prompt": "x" * (MAX_CHARS + 1)}, f"{MAX_CHARS} is the limit"),
        ("/tokenize", {"prompt": ["x"] * (MAX_TEXTS + 1)}, f"{MAX_TEXTS} is the limit"),
        ("/tokenize", {"prompt": ["x" * 3, "y" * 3]}, "prompt has 8 tokens or more; 7 is the limit"),
        ("/detokenize", {"tokens": [1] * 6}, "5 is the limit"),
        ("/detokenize", {"tokens": [1, [2]]}, "between 0 and"),
    ],
)
async def test_limits_of_texts(
    site: Site, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, object], told: str
) -> None:
    monkeypatch.setattr("sgla.http.native.tokens.MAX_IDS", 5)
    monkeypatch.setattr("sgla.http.native.tokens.MAX_TOKENS", 7)
    status, reply = await site.post(route, body)
    assert status == 400
    assert told in reply["error"]["message"]


async def test_small_work_does_not_wait_for_large(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    encode = site.ingress.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > lanes.SMALL_SIZE:
            release.wait(30)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(site.ingress.tokenizer, "encode", slow)
    monkeypatch.setattr(lanes, "HELD", 3)
    large = [
        asyncio.ensure_future(site.post("/tokenize", {"prompt": "x" * (lanes.SMALL_SIZE + 1)}))
        for _ in range(2)
    ]
    await asyncio.sleep(0.2)
    try:
        status, reply = await site.post("/tokenize", {"prompt": "y" * (lanes.INLINE_SIZE + 1)})
        assert status == 200
        large.append(asyncio.ensure_future(site.post("/tokenize", {"prompt": "x" * (lanes.SMALL_SIZE + 1)})))
        await asyncio.sleep(0.2)
        status, reply = await site.post("/tokenize", {"prompt": "z" * (lanes.SMALL_SIZE + 1)})
        assert (status, reply["error"]["code"]) == (429, "overloaded")
    finally:
        release.set()
    assert [status for status, _ in await asyncio.gather(*large)] == [200, 200, 200]


async def test_a_client_leaves_a_thread_to_others() -> None:
    lanes, release, begun = Lanes(3, 2), threading.Event(), []

    def work(client: str) -> str:
        begun.append(client)
        release.wait(30)
        return client

    for size in (1, SMALL_SIZE + 1):
        waiting = [asyncio.ensure_future(lanes.run("greedy", size, lambda: work("greedy"))) for _ in range(9)]
        await asyncio.sleep(0)
        assert await lanes.run("modest", size, lambda: 7) == 7
        assert begun == ["greedy"] * (2 if size == 1 else 1)
        release.set()
        assert await asyncio.gather(*waiting) == ["greedy"] * 9
        release.clear()
        begun.clear()
    assert not lanes._held
    for lane in (lanes.small, lanes.large):
        assert not lane._running
        assert not lane._waiting


async def test_who_goes_away_is_not_worked_for() -> None:
    lanes, release, begun = Lanes(1, 1), threading.Event(), []
    waiting = [
        asyncio.ensure_future(lanes.run("a", 1, lambda i=i: begun.append(i) or release.wait(30)))
        for i in range(3)
    ]  # type: ignore[misc]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(waiting[0], waiting[2])
    assert begun == [0, 2]
    with pytest.raises(ZeroDivisionError):
        await lanes.run("a", 1, lambda: 1 // 0)


async def test_long_lists_are_encoded_in_slices() -> None:
    for count in (0, 3, 10, 11):
        found = await sliced(range(count), lambda n: {"n": n}, size=5)
        assert msgspec.json.decode(msgspec.json.encode(found)) == [{"n": n} for n in range(count)]
    assert await sliced([1, 2]) == [1, 2]


async def test_many_short_lists_are_encoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.http.lanes.SLICE", 5)
    pauses = []

    async def told() -> None:
        pauses.append(1)

    monkeypatch.setattr("sgla.http.lanes.pause", told)
    for count in (0, 1, 9, 10):
        lists = [[i, 2] for i in range(count)]
        pauses.clear()
        found = await sliced_lists(lists, lambda n: {"n": n})
        shown = [[{"n": n} for n in items] for items in lists]
        assert msgspec.json.decode(msgspec.json.encode(found)) == shown
        assert len(pauses) == count // 3


async def test_tokens_of_one_text_and_of_many(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, whether they are encoded in slices or at once."""
    bodies = [{"prompt": prompt, "return_token_strs": True} for prompt in ("abc" * 9, ["abc"] * 9, [])]
    whole = [await site.post("/tokenize", body) for body in bodies]
    monkeypatch.setattr("sgla.http.lanes.SLICE", 5)
    assert [await site.post("/tokenize", body) for body in bodies] == whole
    assert len(whole[1][1]["token_strs"]) == 9


async def test_long_texts_are_parsed_in_their_process(site: Site) -> None:
    text = "<tool_call>{" * 20_000
    body = {"text": text, "tools": [], "tool_call_parser": "hermes"}
    status, reply = await site.post("/parse_function_call", body)
    assert (status, reply) == (200, {"normal_text": text, "calls": []})


async def test_limit_of_logprobs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.http.request.work.MAX_LOGPROBS", 999)
    for wanted in ({"prompt_logprobs": 1}, {"logprobs": 1}):
        body = {"prompt": [[1] * 50] * 10, "max_tokens": 50, **wanted}
        status, reply = await site.post("/v1/completions", body)
        assert (status, reply["error"]["param"]) == (400, "logprobs")
        assert "may have 1000 logprobs, 999 is the limit" in reply["error"]["message"]


async def test_limit_of_logprobs_that_are_shown_again_and_again(serve: Serve) -> None:
    site = await serve(FakeIngress(context=1 << 17))
    most = f"{MAX_REPEATED} is the limit"
    sampling = {"max_new_tokens": MAX_REPEATED // 21 + 1}
    native = {"text": "x", "return_logprob": True, "top_logprobs_num": 20, "sampling_params": sampling}
    asked = {"input": "x", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    for route, body in (("/generate", native | {"stream": True}), ("/v1/responses", asked)):
        status, reply = await site.post(route, body)
        assert (status, reply["error"]["param"]) == (400, "logprobs")
        assert most in reply["error"]["message"]
    assert (await site.post("/generate", native))[0] == 200
    assert (await site.post("/v1/responses", asked | {"max_output_tokens": 50}))[0] == 200


async def test_a_stream_echoes_a_long_prompt_with_its_logprobs(site: Site) -> None:
    """In one event, so it may not be longer than that."""
    body = {"prompt": [5] * 400, "echo": True, "logprobs": 2, "stream": True, "max_tokens": 3}
    choices = [json.loads(payload)["choices"][0] for payload in (await site.sse(TEXT, body))[:-1]]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [401, 1, 1]
    assert len(choices[0]["logprobs"]["top_logprobs"]) == 401
    assert site.ingress.jobs[-1].prompt_logprobs == MAX_AT_ONCE
    status, reply = await site.post(TEXT, body | {"prompt": [[5] * 500] * 2, "logprobs": 20})
    assert (status, reply["error"]["param"]) == (400, "logprobs")
    assert f"{MAX_AT_ONCE} is the limit" in reply["error"]["message"]


async def test_large_answers_are_written_in_pieces(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = Pieces.write

    async def told(self: Pieces, writer: Any) -> None:
        written.append(self.size)
        await write(self, writer)

    monkeypatch.setattr(Pieces, "write", told)
    texts = ["some words " * 20] * 2000
    status, reply = await site.post("/tokenize", {"prompt": texts})
    assert status == 200
    assert len(reply["tokens"]) == len(texts)
    assert len(written) == 1
    assert written[0] > PIECE
    await site.post("/tokenize", {"prompt": texts[:9]})
    assert len(written) == 1


async def test_large_bodies_are_decoded_one_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0
    others = intake.others

    async def told(body: bytes) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await others(body)
        at_once -= 1

    monkeypatch.setattr(intake, "others", told)
    body = {"prompt": "x", "max_tokens": 1, "metadata": ["a" * 50] * 9000}
    replies = await asyncio.gather(*(site.post("/v1/completions", body) for _ in range(9)))
    assert [status for status, _ in replies] == [200] * 9
    assert most == 1


async def test_limit_of_stops(site: Site) -> None:
    body = {"prompt": "x", "stop": ["x" * 1000] * 9}
    status, reply = await site.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, "stop")
    assert "8192 characters in all" in reply["error"]["message"]


def test_what_failed_work_held_is_freed_at_once() -> None:
    """Its exception keeps the frames, with a list of millions of tokens perhaps, in a circle."""
    held: list[weakref.ref[Any]] = []

    def work() -> None:
        large = {1, 2, 3}
        held.append(weakref.ref(large))
        raise ValueError("too many tokens")

    gc.disable()
    try:
        error = lanes.attempt(work).exception()
        assert held[0]() is None
        assert error is not None
        assert error.__traceback__ is not None
    finally:
        gc.enable()

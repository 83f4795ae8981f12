"""Sessions: turns that go on from earlier ones, by their token ids."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from http_fake import BOS, FakeIngress
from http_site import Serve, Site

from sgla import clock
from sgla.errors import ContextTooLong, InvalidField, Overloaded
from sgla.http.clients import Client
from sgla.http.native import session_store
from sgla.http.native.session_store import OpenSessionRequest, Sessions, Turn
from sgla.http.request.schema import SessionParams
from sgla.messages import RowSampling
from sgla.text.prepare import check_prompt_logprobs


async def opened(site: Site, **fields: Any) -> str:
    status, name = await site.post("/open_session", {"capacity_of_str_len": 1000, **fields})
    assert status == 200
    assert isinstance(name, str)
    return name


async def turn(
    site: Site, session: str, text: Any, rid: str, after: str | None = None, **more: Any
) -> list[int]:
    """Ask for a turn; returns the whole conversation's ids, as the engine saw and answered them."""
    params = {"id": session, "rid": after, **more}
    prompt = {"text": text} if isinstance(text, str) else {"input_ids": text}
    body = {**prompt, "rid": rid, "session_params": params, "sampling_params": {"max_new_tokens": 3}}
    status, reply = await site.post("/generate", body)
    assert status == 200, reply
    assert reply["meta_info"]["id"] == rid
    return [*(site.ingress.jobs[-1].token_ids or []), *reply["output_ids"]]


async def refused(site: Site, session: str, **params: Any) -> tuple[int, str]:
    body = {"text": "x", "session_params": {"id": session, **params}}
    status, reply = await site.post("/generate", body)
    return status, reply["error"]["code"]


async def test_turns_append(site: Site) -> None:
    session = await opened(site)
    first = await turn(site, session, "ab", "1")
    assert first[:3] == [BOS, 97, 98]
    second = await turn(site, session, "c", "2", after="1")
    assert second[: len(first) + 1] == [*first, 99]
    third = await turn(site, session, [7, 8], "3", after="2")
    assert third[: len(second) + 2] == [*second, 7, 8]


async def test_what_a_session_has_counts_when_its_logprobs_are_wanted(site: Site) -> None:
    session, after = await opened(site), None
    for text in ([7, 8], "c", [9]):
        params = {"id": session, "rid": after}
        body = {"text": text} if isinstance(text, str) else {"input_ids": text}
        body |= {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 3}}
        status, reply = await site.post("/generate", body | {"session_params": params})
        assert status == 200, reply
        job, after = site.ingress.jobs[-1], reply["meta_info"]["id"]
        check_prompt_logprobs(
            len(job.token_ids or []), 1, RowSampling(prompt_logprobs=0), job.prompt_logprobs
        )


async def test_a_streaming_session_appends_by_itself(site: Site) -> None:
    session = await opened(site, streaming=True)
    first = await turn(site, session, "ab", "1")
    second = await turn(site, session, "c", "2")
    assert second[: len(first) + 1] == [*first, 99]
    third = await turn(site, session, "d", "3", after="2")
    assert third[: len(second) + 1] == [*second, 100]
    for params in ({"rid": "1"}, {"offset": 1}, {"replace": True}, {"drop_previous_output": True}):
        assert await refused(site, session, **params) == (400, "invalid_value")
    assert (await turn(site, session, "e", "4"))[: len(third) + 1] == [*third, 101]


async def test_a_streaming_session_has_one_turn_at_a_time(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    session = await opened(site, streaming=True)
    body = {"text": "x", "rid": "1", "session_params": {"id": session}}
    running = asyncio.ensure_future(site.post("/generate", body))
    while not site.ingress.jobs:
        await asyncio.sleep(0.001)
    assert await refused(site, session) == (409, "busy")
    await site.post("/abort_request", {"rid": "1"})
    await running


async def test_turns_branch(site: Site) -> None:
    session = await opened(site)
    root = await turn(site, session, "ab", "root")
    for name in ("left", "right"):
        branch = await turn(site, session, name, name, after="root")
        assert branch[: len(root) + len(name)] == [*root, *name.encode()]
    assert (await turn(site, session, "z", "other"))[:2] == [BOS, 122]


async def test_turns_are_replaced(site: Site) -> None:
    session = await opened(site)
    root = await turn(site, session, "ab", "root")
    await turn(site, session, "c", "old", after="root")
    await turn(site, session, "d", "older", after="old")
    new = await turn(site, session, "e", "new", after="root", replace=True)
    assert new[: len(root) + 1] == [*root, 101]
    for gone in ("old", "older"):
        assert await refused(site, session, rid=gone) == (400, "invalid_value")
    await turn(site, session, "f", "next", after="new")
    await turn(site, session, "g", "fresh", replace=True)
    assert await refused(site, session, rid="root") == (400, "invalid_value")


async def test_parts_of_a_turn_are_kept(site: Site) -> None:
    session = await opened(site)
    root = await turn(site, session, "ab", "root")
    cut = await turn(site, session, "c", "cut", after="root", offset=2)
    assert cut[:3] == [*root[:2], 99]
    silent = await turn(site, session, "c", "silent", after="root", drop_previous_output=True)
    assert silent[:4] == [*root[:3], 99]
    for wrong in ({"rid": "root", "offset": 99}, {"rid": "root", "offset": -1}, {"offset": 0}):
        assert await refused(site, session, **wrong) == (400, "invalid_value")


async def test_streamed_turns_are_kept_and_broken_ones_are_not(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.01))
    session = await opened(site)
    body = {
        "text": "ab",
        "stream": True,
        "sampling_params": {"max_new_tokens": 100},
        "session_params": {"id": session},
    }
    async with site.http.post("/generate", json={**body, "rid": "broken"}) as response:
        await response.content.readline()
        assert await refused(site, session, rid="broken") == (409, "busy")
    while await refused(site, session, rid="broken") == (409, "busy"):
        await asyncio.sleep(0.01)
    assert await refused(site, session, rid="broken") == (400, "invalid_value")
    await site.sse("/generate", {**body, "rid": "whole", "sampling_params": {"max_new_tokens": 2}})
    assert len(await turn(site, session, "c", "next", after="whole")) == 3 + 2 + 1 + 3


async def test_a_replaced_turn_that_breaks_leaves_its_successor(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.01))
    session = await opened(site)
    body = {"text": "ab", "stream": True, "rid": "same", "sampling_params": {"max_new_tokens": 100}}
    async with site.http.post("/generate", json={**body, "session_params": {"id": session}}) as response:
        await response.content.readline()
        await turn(site, session, "c", "other", replace=True)
        await turn(site, session, "d", "same")
    await asyncio.sleep(0.05)
    await turn(site, session, "e", "next", after="same")


async def test_sessions_end(site: Site, monkeypatch: Any) -> None:
    session = await opened(site, session_id="mine")
    assert session == "mine"
    status, _ = await site.post("/open_session", {"capacity_of_str_len": 9, "session_id": "mine"})
    assert status == 400
    assert (await site.post("/close_session", {"session_id": "mine"}))[0] == 200
    status, answer = await site.post("/close_session", {"session_id": "mine"})
    assert (status, answer["error"]["param"]) == (404, "session_id")
    assert await refused(site, "mine") == (404, "session_not_found")
    assert (await site.post("/open_session", {"capacity_of_str_len": 9, "session_id": "x" * 201}))[0] == 400
    await opened(site, session_id="old", timeout=5)
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now + 6)
    assert await refused(site, "old") == (404, "session_not_found")


async def test_sessions_are_bounded(serve: Serve) -> None:
    site = await serve(response_store=2)
    small = await opened(site, capacity_of_str_len=4)
    assert len(await turn(site, small, "ab", "1")) == 6
    assert await refused(site, small, rid="1") == (400, "invalid_value")
    await opened(site)
    assert (await site.post("/open_session", {"capacity_of_str_len": 9}))[0] == 429


async def test_what_sessions_hold_is_bounded(site: Site, monkeypatch: Any) -> None:
    """A turn costs what it adds, however long the conversation is."""
    session = await opened(site)
    whole = await turn(site, session, "x" * 400, "0")
    monkeypatch.setattr("sgla.http.native.session_store.MAX_TOKENS", 3200)
    for i in range(20):
        longer = await turn(site, session, "y", str(i + 1), after=str(i))
        assert longer[: len(whole)] == whole
        whole = longer
    assert await refused(site, session, rid="20") == (429, "overloaded")
    monkeypatch.setattr("sgla.http.native.session_store.MAX_TOKENS", 600)
    assert await refused(site, session, rid="0", replace=True) == (429, "overloaded")
    monkeypatch.setattr("sgla.http.native.session_store.MAX_TOKENS", 3400)
    await turn(site, session, "y", "21", after="20")
    await turn(site, session, "z", "new", replace=True)
    await turn(site, session, "z", "newer", after="new")


def test_the_size_of_a_session_is_kept_and_not_added_up(monkeypatch: Any) -> None:
    sessions, asked, chance = Sessions(2, 60.0), 0, random.Random(0)
    name = opened_by(sessions, "")
    session, size = sessions._get(name, ""), Turn.size

    def count(turn: Turn) -> int:
        nonlocal asked
        asked += 1
        return size(turn)

    monkeypatch.setattr(Turn, "size", count)
    open_turns = []
    for i in range(300):
        ended = [rid for rid, known in session.turns.items() if known.output is not None]
        params = SessionParams(id=name, rid=chance.choice([None, *ended[-3:]]), replace=i % 30 == 29)
        asked = 0
        open_turns.append(sessions.begin(params, str(i), [1] * chance.randrange(9), "", 1000))
        assert params.replace or asked <= 2
        if chance.random() < 0.7:
            turn = open_turns.pop(chance.randrange(len(open_turns)))
            if chance.random() < 0.7:
                turn.end([2] * chance.randrange(9))
            turn.close()
        assert session.size == sum(map(size, session.turns.values()))
        assert session.size == session.share.size == sessions._whole.size
    sessions.close(name, "")
    for turn in open_turns:
        turn.end([1])
        turn.close()
    assert (sessions._whole.size, sessions._whole.sessions, sessions._shares) == (0, {}, {})


async def test_a_session_takes_one_prompt_at_a_time(site: Site) -> None:
    session = await opened(site)
    for prompt in ({"text": ["a", "b"]}, {"text": "a", "sampling_params": {"n": 2}}):
        body = {**prompt, "session_params": {"id": session}}
        status, reply = await site.post("/generate", body)
        assert (status, reply["error"]["param"]) == (400, "session_params")
    await turn(site, session, "a", "1")
    status, _ = await site.post("/generate", {"text": "a", "rid": "1", "session_params": {"id": session}})
    assert status == 400


def turns(sessions: Sessions, name: str, owner: str, count: int, size: int = 1) -> None:
    for i in range(count):
        sessions.begin(SessionParams(id=name), f"{i}", [1] * size, owner, 1000).end([])


def opened_by(sessions: Sessions, owner: str) -> str:
    return sessions.open(OpenSessionRequest(capacity_of_str_len=1000), Client(owner, owner))


def test_a_session_has_a_limit_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "MAX_TURNS", 3)
    sessions = Sessions(2, 60.0)
    name = opened_by(sessions, "")
    turns(sessions, name, "", 3)
    with pytest.raises(InvalidField, match="3 turns"):
        sessions.begin(SessionParams(id=name), "more", [1], "", 1000)
    sessions.begin(SessionParams(id=name, replace=True), "instead", [1], "", 1000)


def test_a_turn_is_as_long_as_the_context_at_most() -> None:
    sessions = Sessions(2, 60.0)
    name = opened_by(sessions, "")
    turns(sessions, name, "", 1, size=80)
    with pytest.raises(ContextTooLong, match="100 tokens"):
        sessions.begin(SessionParams(id=name, rid="0"), "1", [1] * 21, "", 100)
    with pytest.raises(InvalidField, match="rid"):
        sessions.begin(SessionParams(id=name), "r" * 201, [1], "", 100)


def test_who_has_most_sessions_loses_the_one_least_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(6, 60.0)
    annas = [opened_by(sessions, "anna") for _ in range(6)]
    with pytest.raises(Overloaded, match="6 sessions"):
        opened_by(sessions, "anna")
    turns(sessions, annas[0], "anna", 1)
    bens = [opened_by(sessions, "ben") for _ in range(3)]
    with pytest.raises(Overloaded):
        opened_by(sessions, "ben")
    assert [name for name in annas if sessions._find(name, "anna")] == [annas[i] for i in (0, 4, 5)]
    monkeypatch.setattr(session_store, "MAX_TOKENS", 6 * (session_store.TURN + 1))
    turns(sessions, annas[4], "anna", 3)
    turns(sessions, bens[0], "ben", 2)
    assert len(sessions._shares["anna"].sessions) == 3
    turns(sessions, bens[1], "ben", 1)
    assert [name for _, name in sessions._shares["anna"].sessions] == [annas[4]]
    assert sessions._whole.size == 6 * (session_store.TURN + 1)
    assert [name for _, name in sessions._shares["ben"].sessions] == [bens[2], *bens[:2]]


async def test_sessions_of_another_key_are_not_there(serve: Serve) -> None:
    site = await serve(api_key=["anna", "ben"])
    anna, ben = ({"Authorization": f"Bearer {key}"} for key in ("anna", "ben"))
    body = {"capacity_of_str_len": 99, "session_id": "mine"}
    assert (await site.post("/open_session", body, headers=anna))[0] == 200
    for name in ("mine", "none"):
        asked = {"text": "x", "session_params": {"id": name}}
        assert (await site.post("/generate", asked, headers=ben))[0] == 404
        assert (await site.post("/close_session", {"session_id": name}, headers=ben))[0] == 404
    assert (await site.post("/open_session", body, headers=ben))[0] == 200
    for headers in (anna, ben):
        assert (await site.post("/close_session", {"session_id": "mine"}, headers=headers))[0] == 200

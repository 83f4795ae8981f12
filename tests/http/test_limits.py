"""Requests whose parts are too many to be looked at in one go: each is refused by name, soon, and the server
goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_site import Serve, Site

from sgla.errors import BadRequest
from sgla.http.native.generate import SCHEMA as GENERATE
from sgla.http.openai.functions import modern_messages
from sgla.http.request.schema import (
    MAX_CHOICES,
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    REWRITTEN,
    shown,
)
from sgla.http.responses.input import chat_messages, referred
from sgla.text import reranking
from sgla.text.template import _parsed_call

TEXT, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, ANTHROPIC, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
USER = {"role": "user", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 9000}
ITEM_PARTS = {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 9000}
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}] * 9000}
PICTURE = {"role": "user", "content": "x", "images": ["x"]}  # which is refused where a message is looked at
TOOL = {"type": "function", "function": {"name": "a"}}
LONG = "n" * 257
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "a", "content": PARTS["content"]}],
}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 1, **fields}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXT, {"prompt": [""] * 5000}, f"prompt has 5000 items; {MAX_CHOICES} is the limit"),
        (TEXT, {"prompt": [[1]] * 5000}, f"prompt has 5000 items; {MAX_CHOICES} is the limit"),
        (TEXT, {"prompt": [1] * 600_000}, "524288 values"),
        (TEXT, {"prompt": [1] * 600_000, "max_tokens": 1.0}, "524288 values"),
        (TEXT, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias has 5000 items"),
        (
            TEXT,
            {"prompt": "x", "allowed_token_ids": [1] * 200_000},
            "allowed_token_ids may list at most 131072",
        ),
        (TEXT, {"prompt": "x"} | {f"f{i}": 1 for i in range(300)}, f"301 fields; {MAX_FIELDS} is the limit"),
        (TEXT, {"prompt": "x", "cache_salt": "a" * 2000}, "cache_salt may have at most 1024 characters"),
        (TEXT, {"prompt": "x", "request_id": "a" * 2000}, "rid may have at most 1024 characters"),
        (TEXT, {"prompt": "x", "guided_choice": ["a"] * 100_000}, "guided_choice has 400001 characters"),
        (TEXT, {"prompt": "x", "guided_json": "[" * 1000}, "nested more than 128 deep"),
        (NATIVE, {"text": [""] * 5000}, "text has 5000 items"),
        (NATIVE, {"input_ids": [[1]] * 5000}, "input_ids has 5000 items"),
        (NATIVE, {"text": "x", "sampling_params": [{}] * 5000}, "sampling_params has 5000 items"),
        (NATIVE, {"text": "x", "logprob_start_len": [1] * 5000}, "logprob_start_len has 5000 items"),
        (CHAT, chat(messages=[USER] * 9000), f"messages has 9000 items; {MAX_MESSAGES} is the limit"),
        (CHAT, chat(messages=[PARTS] * 2), f"18000 parts and calls; {MAX_PARTS} is the limit"),
        (CHAT, chat(tools=[TOOL] * 2000), f"tools has 2000 items; {MAX_TOOLS} is the limit"),
        (
            CHAT,
            chat(tools=[{"type": "function", "function": {"name": LONG}}]),
            "function.name may have at most 256",
        ),
        (ANTHROPIC, chat(tools=[{"name": LONG, "input_schema": {}}]), "tools[0].name may have at most 256"),
        (
            OLLAMA,
            {"model": "fake", "messages": [USER], "tools": [{"function": {"name": LONG}}]},
            "at most 256",
        ),
        (
            RESPONSES,
            {"input": "x", "tools": [{"type": "namespace", "name": LONG, "tools": []}]},
            "tools[0].name may have at most 256 characters",
        ),
        (
            RESPONSES,
            {
                "input": "x",
                "tools": [
                    {
                        "type": "namespace",
                        "name": LONG[:200],
                        "tools": [{"type": "function", "name": LONG[:60]}],
                    }
                ],
            },
            "tools[0].tools[0].name with its namespace may have at most 256",
        ),
        (RESPONSES, {"input": [USER] * 9000}, "9000 items, the limit is 8192"),
        (RESPONSES, {"input": [ITEM_PARTS] * 2}, "18000 parts and calls"),
        (
            RESPONSES,
            {"input": "x", "tools": [{"type": "function", "name": "a"}] * 2000},
            "tools has 2000 items",
        ),
        (ANTHROPIC, chat(messages=[USER] * 9000), "messages has 9000 items"),
        (ANTHROPIC, chat(messages=[PARTS] * 2), "18000 parts and calls"),
        (ANTHROPIC, chat(messages=[RESULT] * 2), "18002 parts and calls"),
        (ANTHROPIC, chat(tools=[{"name": "a", "input_schema": {}}] * 2000), "tools has 2000 items"),
        (OLLAMA, {"model": "fake", "messages": [USER] * 9000}, "messages has 9000 items"),
        (OLLAMA, {"model": "fake", "messages": [CALLS, CALLS, PICTURE]}, "18000 parts and calls"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 5000}, "text_2 has 5000 items"),
        ("/v1/score", {"text_1": ["a"] * 5000, "text_2": "a"}, "text_1 has 5000 items"),
        ("/rerank", {"query": "a", "documents": ["a"] * 5000}, "documents has 5000 items"),
        ("/v2/embed", {"inputs": [{}] * 5000}, "inputs has 5000 items"),
    ],
)
async def test_too_many(site: Site, path: str, body: dict[str, Any], words: str) -> None:
    status, reply = await site.post(path, json.dumps(body).encode())
    assert status == 400
    error = reply["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    assert site.ingress.jobs == []


async def test_floats_as_integers_in_large_bodies(site: Site) -> None:
    ids = [5] * 50_000
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3.0, "temperature": 0.0}}
    assert (await site.post(NATIVE, body))[0] == 400  # too long for the context, not for the fields
    assert site.ingress.jobs[0].sampling.max_tokens == 3
    for many in ([5.0, -0.0, 6] * 20_000, [[5.0] * 3_000, [6.0] * 30_000]):
        assert (await site.post(NATIVE, {"input_ids": many}))[0] == 400
        wanted = many[0] if isinstance(many[0], list) else many
        assert site.ingress.jobs[-1 if wanted is many else -2].token_ids == wanted
    for wrong in ({"input_ids": [5.5] * 50_000}, {"sampling_params": [{"max_new_tokens": 3.0}] * 4000}):
        status, reply = await site.post(NATIVE, {"text": "x", **wrong})
        assert status == 400
        assert "got float; a body of this size" in reply["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"a": 1.0},
        {"a": [1.0, 2, {"b": 3.0}], "c": "4.0", "d": 1e1},
        {"temperature": 1e300, "n": 2.0},
        {"ids": [1.0, 2.5, -7.0, 0.0, 10.0, 1.05, 1e300] * 10_000, "n": 2.0},
        {"ids": [1.0] * 20_000, "more": [[1.0, None, True], [20.0]] * 10_000, "texts": ["1.0, 2.0"] * 10_000},
    ],
)
def test_a_body_with_integers_says_the_same(body: dict[str, Any]) -> None:
    for indent in (None, 1):
        pieces = list(GENERATE.rewritten(json.dumps(body, indent=indent).encode()))
        result = json.loads(b"".join(pieces))
        assert result == body
        assert not any(type(each) is float and each.is_integer() for each in result.get("ids", ())[:6])
        assert max(map(len, pieces)) < 1.1 * REWRITTEN or "texts" in body


async def test_ids_that_are_none(serve: Serve) -> None:
    site = await serve()
    for ids in ([-1], [2**31], [2**70], [5, -(2**40)]):
        for path, name in ((NATIVE, "input_ids"), (TEXT, "prompt")):
            status, reply = await site.post(path, {name: ids})
            assert (status, reply["error"]["param"]) == (400, name)


def test_results_of_functions_find_their_calls_in_linear_time() -> None:
    result = {"role": "function", "name": "f", "content": "x"}
    call = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    messages = modern_messages([*[result] * 50_000, call, result, USER, result])
    assert [message.get("tool_call_id") for message in messages[-4:]] == [
        None,
        "call_50000",
        None,
        "call_50000",
    ]
    assert messages[0]["tool_call_id"] == ""


def test_arguments_that_are_nested_without_end_stay_text() -> None:
    for text in ("[" * 100_000, '{"a":' * 500 + "1" + "}" * 500):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
        assert _parsed_call(call) is call


@pytest.mark.parametrize(("query", "item"), [("\u4e2d" * 60_000, "a"), ([5] * 30_000, [6])])
async def test_a_query_is_not_multiplied_by_its_items(serve: Serve, query: Any, item: Any) -> None:
    """What is joined counts as if it were sent."""
    site = await serve(max_body_bytes=1 << 20)
    body = {"query": query, "items": [item] * 10, "label_token_ids": [5]}
    status, reply = await site.post("/v1/score", body)
    assert (status, "--max-body-bytes" in reply["error"]["message"]) == (413, True)
    body["items"] = [item] * (MAX_CHOICES + 1)
    status, reply = await site.post("/v1/score", body)
    assert (status, reply["error"]["param"]) == (400, "items")
    assert f"{MAX_CHOICES} is the limit" in reply["error"]["message"]


@pytest.mark.parametrize("long", ["query", "instruct"])
async def test_a_query_is_not_multiplied_by_its_documents(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, long: str
) -> None:
    site = await serve(max_body_bytes=1 << 20, task="rerank")
    monkeypatch.setattr(reranking, "answer_ids", lambda tokenizer: [5, 6])
    body = {"query": "a", "documents": ["a"] * 10, long: "a" * 200_000}
    status, reply = await site.post("/rerank", body)
    assert (status, "--max-body-bytes" in reply["error"]["message"]) == (413, True)
    status, _ = await site.post("/rerank", {**body, "documents": ["a"] * (MAX_CHOICES + 1)})
    assert status == 400


async def test_what_is_joined_is_memory_of_the_request(serve: Serve) -> None:
    site = await serve(request_memory_bytes=1 << 20)
    body = {"query": "a" * 200_000, "items": ["a"] * 10, "label_token_ids": [5]}
    status, reply = await site.post("/v1/score", body)
    assert (status, "--request-memory-bytes" in reply["error"]["message"]) == (413, True)


async def test_what_all_prompts_share_is_made_once(serve: Serve) -> None:
    site = await serve()
    asked = {"max_new_tokens": 1, "json_schema": {"enum": ["a"]}, "logit_bias": {"5": 1}, "stop": ["x"]}
    assert (await site.post(NATIVE, {"text": ["a", "b"], "sampling_params": asked}))[0] == 200
    first, second = (job.sampling for job in site.ingress.jobs)
    assert first.grammar is second.grammar
    assert first.logit_bias is second.logit_bias


async def test_every_rid_has_a_limit(site: Site) -> None:
    body = {"text": ["a", "b"], "rid": ["a", "b" * 2000], "stream": True}
    status, reply = await site.post(NATIVE, body)
    assert (status, reply["error"]["param"]) == (400, "rid")


class Unread(list[Any]):
    """Is not written out."""

    def __repr__(self) -> str:
        raise AssertionError


def test_lists_in_the_place_of_names_are_not_written_out() -> None:
    long = Unread()
    assert shown(long) == "a list"
    assert modern_messages([{"role": "assistant", "tool_calls": [{"id": long}]}, USER])[1] is USER
    assert list(referred([{"type": "item_reference", "id": long}])) == [""]
    for item in ({"type": long}, {"role": "user", "content": [{"type": long}]}):
        with pytest.raises(BadRequest, match="a list"):
            chat_messages(None, [item])


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "mcp", "server_label": [1]}]},
        {"tools": [{"type": [1]}]},
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": {}}]}]},
        {"tool_choice": {"type": "mcp", "server_label": [1]}},
        {"input": [{"type": "item_reference", "id": [1]}]},
        {"text": {"format": {"type": [1]}}},
    ],
)
async def test_lists_in_the_place_of_names(site: Site, fields: dict[str, Any]) -> None:
    status, reply = await site.post(RESPONSES, {"input": "x", **fields})
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")

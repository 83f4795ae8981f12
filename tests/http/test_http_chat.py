"""/v1/chat/completions through the openai client, with strict validation of every response."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from http_fake import FakeIngress, expected_text
from http_site import Site

from sgla.defaults import GIVEN, Defaults

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def answer(site: Site, steps: int, child: int = 0) -> str:
    job = site.ingress.jobs[-1]
    return expected_text(job, site.ingress.prompt(job), child, steps)


async def test_chat(site: Site) -> None:
    reply = await site.client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=7)
    assert reply.choices[0].message.content == answer(site, 7)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].logprobs is None
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    prompt = len(site.ingress.prompt(site.ingress.jobs[-1]))
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (
        prompt,
        7,
        prompt + 7,
    )
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    site.ingress.check()


async def test_stream_equals_whole(site: Site) -> None:
    whole = await site.client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=20, seed=5, n=3
    )
    stream = await site.client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=20,
        seed=5,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts = {0: "", 1: "", 2: ""}
    finishes: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        if choice.delta.role is not None:
            assert texts[choice.index] == ""
            assert not finishes[choice.index]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            assert choice.delta.content is None
            finishes[choice.index].append(choice.finish_reason)
    assert [texts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
    assert len(set(texts.values())) == 3
    assert all(reasons == ["length"] for reasons in finishes.values())
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert sum(1 for chunk in chunks[:-1] if chunk.choices[0].delta.role == "assistant") == 3


async def test_stream_bytes(site: Site) -> None:
    payloads = await site.sse("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True})
    assert payloads[-1] == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"].keys() for chunk in chunks] == [
        {"role", "content"},
        {"content"},
        {"content"},
        set(),
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_needs_usage(site: Site) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": options}
    for payload in (await site.sse("/v1/chat/completions", body))[:-1]:
        assert "usage" not in json.loads(payload)


async def test_fields_of_vllm_are_there_unasked(site: Site) -> None:
    _, chat = await site.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    (choice,) = chat["choices"]
    assert [chat[name] for name in ("prompt_logprobs", "prompt_token_ids")] == [None, None]
    assert (choice["token_ids"], choice["message"]["reasoning"]) == (None, None)
    _, text = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    (choice,) = text["choices"]
    assert [choice[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parts", [False, True])
async def test_echo_begins_with_the_message_that_is_continued(site: Site, stream: bool, parts: bool) -> None:
    content: Any = [{"type": "text", "text": "I"}, {"type": "text", "text": "am"}] if parts else "I\nam"
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    body = {"messages": messages, "max_tokens": 3, "continue_final_message": True, "n": 2, "stream": stream}
    for echo, asked, begins in ((True, messages, "I\nam"), (False, messages, ""), (True, MESSAGES, "")):
        more = {"echo": echo, "messages": asked, "continue_final_message": asked is messages}
        if stream:
            texts = {0: "", 1: ""}
            for payload in (await site.sse("/v1/chat/completions", {**body, **more}))[:-1]:
                (choice,) = json.loads(payload)["choices"]
                texts[choice["index"]] += choice["delta"].get("content", "")
        else:
            _, reply = await site.post("/v1/chat/completions", {**body, **more})
            texts = {choice["index"]: choice["message"]["content"] for choice in reply["choices"]}
        assert texts == {i: begins + answer(site, 3, i) for i in (0, 1)}


async def test_a_search_is_refused(site: Site) -> None:
    status, reply = await site.post("/v1/chat/completions", {"messages": MESSAGES, "web_search_options": {}})
    assert (status, reply["error"]["param"]) == (400, "web_search_options")


async def test_continuous_usage(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": options}
    chunks = [json.loads(p) for p in (await site.sse("/v1/chat/completions", body))[:-1]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3, 3]
    assert all("total_tokens" in chunk["usage"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(site: Site, stream: bool) -> None:
    create = site.client.chat.completions.create
    asked = {"model": "fake", "messages": MESSAGES, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = [chunk async for chunk in await create(**asked, stream=True)]
        parts = [c.choices[0] for c in chunks if c.choices[0].logprobs is not None]
        text = "".join(part.delta.content for part in parts)
        entries = [entry for part in parts for entry in part.logprobs.content]
    else:
        choice = (await create(**asked)).choices[0]
        text, entries = choice.message.content, choice.logprobs.content
    assert len(entries) == 12
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text == answer(site, 12)
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in entries)


async def test_token_ids(site: Site) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "return_token_ids": True}
    _, whole = await site.post("/v1/chat/completions", body)
    choice = whole["choices"][0]
    prompt = site.ingress.prompt(site.ingress.jobs[-1])
    assert whole["prompt_token_ids"] == prompt
    assert site.ingress.tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    payloads = await site.sse("/v1/chat/completions", body | {"stream": True})
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [prompt]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for c in choices for token in c.get("token_ids", [])] == choice["token_ids"]


async def test_stop_fields(site: Site) -> None:
    _, body = await site.post(
        "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stop": ["", "END"]}
    )
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", "END", "END")
    assert site.ingress.jobs[-1].sampling.stop == ["END"]


async def test_request_reaches_the_engine(site: Site) -> None:
    body = {
        "model": "fake-alias",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "42"},
            {"role": "assistant", "content": "so"},
        ],
        "max_tokens": 2,
        "max_completion_tokens": 3,
        "temperature": None,
        "top_p": 0.5,
        "logit_bias": {"7": -100},
        "seed": -3,
        "min_tokens": 1,
        "stop_token_ids": [5],
        "priority": 4,
        "prompt_cache_retention": "24h",
        "nvext": {"agent_hints": {"priority": 9, "osl": 3}, "annotations": []},
        "cache_salt": "tenant",
        "continue_final_message": True,
        "reasoning_effort": "none",
        "chat_template_kwargs": {"a": 1},
        "timeout": 5,
        "user": "u",
        "metadata": {},
        "tools": None,
        "response_format": {"type": "text"},
    }
    status, reply = await site.post("/v1/chat/completions", body)
    assert status == 200
    assert reply["model"] == "fake-alias"
    job = site.ingress.jobs[-1]
    assert job.messages == body["messages"]
    assert (job.add_generation_prompt, job.continue_final_message) == (False, True)
    assert job.template_kwargs == {"a": 1, "reasoning_effort": "none", "enable_thinking": False}
    assert (job.priority, job.namespace, job.cache_ttl) == (4, "tenant", 86400)
    assert job.deadline is not None
    sampling = job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (3, 0.6, 50, 0.5)
    assert (sampling.logit_bias, sampling.seed, sampling.min_tokens) == ({7: -100}, -3, 1)
    assert sampling.stop_token_ids == [5]


@pytest.mark.parametrize(
    ("fields", "ttl", "priority"),
    [
        ({"cache_control": {"type": "ephemeral"}}, 300, 0),
        ({"nvext": {"cache_control": {"ttl": "2h"}, "agent_hints": {"priority": 3}}}, 7200, 3),
        ({"nvext": {"cache_control": {"ttl": 90}}, "cache_ttl": 7}, 7, 0),
        ({"cache_control": {"type": "ephemeral", "ttl": "5 minutes"}}, None, 0),
        ({"nvext": {"cache_control": {"ttl": "200h"}}}, None, 0),
    ],
)
async def test_others_words_for_how_long_a_prefix_is_kept(
    site: Site, fields: dict[str, Any], ttl: float | None, priority: int
) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    status, reply = await site.post("/v1/chat/completions", body | fields)
    if ttl is None:
        assert (status, reply["error"]["param"]) == (400, "cache_control.ttl")
        return
    assert status == 200
    assert (site.ingress.jobs[-1].cache_ttl, site.ingress.jobs[-1].priority) == (ttl, priority)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"enable_thinking": False}, False),
        ({"thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": True, "reasoning_effort": "none"}, True),
        ({"thinking": False, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, True),
    ],
)
async def test_thinking_is_told_to_the_template(site: Site, fields: dict[str, Any], wanted: bool) -> None:
    status, _ = await site.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert status == 200
    kwargs = site.ingress.jobs[-1].template_kwargs
    assert (kwargs["enable_thinking"], kwargs["thinking"]) == (wanted, wanted)


@pytest.mark.parametrize(("where", "short"), [("generation_config.json", 16), (GIVEN, 5)])
async def test_max_tokens_may_have_a_default(site: Site, where: str, short: int) -> None:
    """That of the model's file is for chats; the user's is for the routes that make a few tokens, too.
    Neither is refused for a prompt that leaves less room."""
    site.ingress.default_sampling = Defaults({"max_tokens": 5}, {"max_tokens": where})
    assert (await site.post("/v1/chat/completions", {"messages": MESSAGES}))[0] == 200
    assert (await site.post("/v1/completions", {"prompt": "a"}))[0] == 200
    assert (await site.post("/generate", {"text": "a"}))[0] == 200
    assert (await site.post("/v1/completions", {"prompt": "a", "max_tokens": 2}))[0] == 200
    jobs = site.ingress.jobs[-4:]
    assert [job.sampling.max_tokens for job in jobs] == [5, short, 128 if short == 16 else 5, 2]
    assert [job.clip for job in jobs] == [True, True, True, False]


@pytest.mark.parametrize(
    ("path", "more", "penalty"),
    [
        ("/v1/chat/completions", {}, 0.2),
        ("/v1/chat/completions", {"frequency_penalty": 0}, 0),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, 0),
        ("/v1/chat/completions", {"structured_outputs": {"choice": ["a", "b"]}}, 0),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "none"}, 0),
        ("/v1/messages", {}, 0.2),
        ("/v1/responses", {"input": "Hi"}, 0.2),
        ("/api/chat", {"stream": False}, 0.2),
        ("/api/chat", {"stream": False, "format": "json"}, 0),
        ("/v1/completions", {"prompt": "a"}, 0),
        ("/generate", {"text": "a"}, 0),
    ],
)
async def test_a_default_may_hold_for_chats_in_words_alone(
    site: Site, path: str, more: dict[str, Any], penalty: float
) -> None:
    site.ingress.default_sampling = Defaults(talks={"frequency_penalty": 0.2})
    chat = {"messages": MESSAGES} if {"input", "prompt", "text"}.isdisjoint(more) else {}
    limit = {"/v1/responses": "max_output_tokens", "/api/chat": "keep_alive"}.get(path, "max_tokens")
    limits = {} if path == "/generate" else {limit: 1}
    status, answer = await site.post(path, {"model": "fake"} | chat | limits | more)
    assert status == 200, answer
    assert site.ingress.jobs[-1].sampling.frequency_penalty == penalty


async def test_tools_with_choice_none_are_shown_to_the_model(site: Site) -> None:
    tools = [TOOL]
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": tools}
    assert (await site.post("/v1/chat/completions", body | {"tool_choice": "none"}))[0] == 200
    assert site.ingress.jobs[-1].tools == tools
    with pytest.raises(openai.BadRequestError) as caught:
        await site.client.chat.completions.create(model="fake", messages=MESSAGES, tools=tools)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")


async def test_late_refusal_keeps_its_status_in_a_stream(serve) -> None:  # type: ignore[no-untyped-def]
    site = await serve(FakeIngress(context=32))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 32 tokens") as caught:
        await site.client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x" * 50}], stream=True
        )
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.response.headers["x-should-retry"] == "false"
    site.ingress.check()

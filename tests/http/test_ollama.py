"""Ollama's API: lines of JSON, calls with objects as arguments, its own options and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fake import ScriptedIngress, expected_text
from http_site import Serve, Site

from sgla.messages import Pooling

USER = [{"role": "user", "content": "hi"}]
QWEN = "<tool_call><think></think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def lines(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    async with site.http.post(path, json={"model": "fake", **body}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_chats_stream_by_default(site: Site) -> None:
    streamed = await lines(site, "/api/chat", messages=USER, options={"num_predict": 5, "temperature": 0})
    text = "".join(line["message"]["content"] for line in streamed)
    job = site.ingress.jobs[-1]
    assert text == expected_text(job, site.ingress.prompt(job), 0, 5)
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    last = streamed[-1]
    assert (last["done_reason"], last["eval_count"]) == ("length", 5)
    assert last["prompt_eval_count"] == len(site.ingress.prompt(job))
    assert last["total_duration"] >= last["eval_duration"] > 0
    body = {
        "model": "fake:latest",
        "messages": USER,
        "stream": False,
        "options": {"num_predict": 5, "temperature": 0},
    }
    status, whole = await site.post("/api/chat", body)
    assert (status, whole["message"]["content"], whole["done"]) == (200, text, True)
    assert whole["eval_duration"] > 1, "the time from the first token to the last"
    assert whole["total_duration"] >= whole["eval_duration"] + whole["prompt_eval_duration"] - 1
    site.ingress.check()


async def test_options_are_sampling_parameters(site: Site) -> None:
    options = {
        "num_predict": -1,
        "temperature": 0.5,
        "top_k": 7,
        "repeat_penalty": 1.2,
        "seed": 4,
        "stop": ["x"],
    }
    await lines(site, "/api/chat", messages=USER, options=options | {"num_ctx": 99}, format="json")
    sampling = site.ingress.jobs[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (None, 0.5, 7)
    assert (sampling.repetition_penalty, sampling.seed, sampling.stop) == (1.2, 4, ["x"])
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "json_object"
    await lines(site, "/api/generate", prompt="x", format={"type": "object"}, think=False)
    job = site.ingress.jobs[-1]
    assert job.sampling.grammar is not None
    assert job.sampling.grammar.kind == "json_schema"
    assert job.template_kwargs["enable_thinking"] is False


@pytest.mark.parametrize("penalty", [-1, 0, 5e-324, 3])
async def test_a_penalty_that_no_logit_bears_is_refused(site: Site, penalty: float) -> None:
    body = {"model": "fake", "prompt": "x", "options": {"repeat_penalty": penalty}}
    status, answer = await site.post("/api/generate", body)
    assert status == 400
    assert answer["error"].startswith("options.repeat_penalty must be between 0.01 and 2, got")


async def test_texts_go_through_the_template_unless_they_are_raw(site: Site) -> None:
    streamed = await lines(site, "/api/generate", prompt="x", system="be kind", options={"num_predict": 2})
    assert all(isinstance(line["response"], str) for line in streamed)
    assert [m["role"] for m in site.ingress.jobs[-1].messages or []] == ["system", "user"]
    await lines(site, "/api/generate", prompt="x", raw=True)
    assert site.ingress.jobs[-1].text == "x"
    await lines(site, "/api/generate", prompt="x", suffix="y")
    assert (site.ingress.jobs[-1].text, site.ingress.jobs[-1].suffix) == ("x", "y")


@pytest.mark.parametrize("cut", [1, 5, 1000])
async def test_thoughts_and_calls(serve: Serve, cut: int) -> None:
    site = await serve(ScriptedIngress(f"<think>Hm.</think>Look:\n{CALL}\n{CALL}", QWEN, cut))
    streamed = await lines(site, "/api/chat", messages=USER, tools=TOOLS)
    _, whole = await site.post(
        "/api/chat", {"model": "fake", "messages": USER, "tools": TOOLS, "stream": False}
    )
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert whole["message"]["tool_calls"] == [call, call]
    assert (whole["message"]["content"], whole["message"]["thinking"]) == ("Look:", "Hm.")
    messages = [line["message"] for line in streamed]
    assert [each for message in messages for each in message.get("tool_calls", [])] == [call, call]
    assert "".join(message["content"] for message in messages) == "Look:"
    assert "".join(message.get("thinking", "") for message in messages) == "Hm."


async def test_calls_and_results_go_back(site: Site) -> None:
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_name": "f"},
    ]
    await lines(site, "/api/chat", messages=messages)
    _, asked, answered = site.ingress.jobs[-1].messages or []
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert (answered["role"], answered["name"]) == ("tool", "f")


async def test_a_request_without_a_prompt_loads_the_model(site: Site) -> None:
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        status, reply = await site.post(path, {"model": "fake", **body})
        assert (status, reply["done"], reply["done_reason"]) == (200, True, "load")
    assert site.ingress.jobs == []


async def test_models_and_errors(site: Site) -> None:
    facts, model = site.ingress.facts, site.ingress.model
    assert facts is not None
    facts.ledger = {"weights": 98_000_000, "kv": 2_000_000}
    _, tags = await site.get("/api/tags")
    assert [(each["name"], each["size"]) for each in tags["models"]] == [
        ("fake", 98_000_000),
        ("fake-alias", 98_000_000),
    ]
    _, running = await site.get("/api/ps")
    assert [each["context_length"] for each in running["models"]] == [4096, 4096]
    assert [each["size_vram"] for each in running["models"]] == [0, 0]
    assert set(running["models"][0]) > {"name", "model", "size", "digest", "details", "expires_at"}
    _, shown = await site.post("/api/show", {"model": "fake"})
    details = shown["details"]
    assert tags["models"][0]["details"] == running["models"][0]["details"] == details
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"] == {
        "general.architecture": "fake",
        "general.parameter_count": 134_479_872,
        "fake.block_count": 30,
        "fake.context_length": 4096,
        "fake.embedding_length": 576,
        "fake.vocab_size": 512,
    }
    assert (details["family"], details["parameter_size"]) == ("fake", "134.5M")
    assert details["quantization_level"] == facts.dtype
    facts.device, facts.pooling = "cuda", Pooling(task="embed", kind="cls", size=576)
    site.ingress.model = model._replace(quantization="Q4_1", parameters=7_615_616_512)
    _, shown = await site.post("/api/show", {"model": "fake"})
    assert (shown["details"]["quantization_level"], shown["details"]["parameter_size"]) == ("Q4_1", "7.6B")
    assert shown["capabilities"] == ["embedding"]
    _, running = await site.get("/api/ps")
    assert running["models"][0]["size_vram"] == 100_000_000
    site.ingress.phase = "load"
    for answer in (await site.get("/api/ps"), await site.post("/api/show", {"model": "fake"})):
        assert answer[0] == 503
    site.ingress.phase = "ready"
    for path, body, expected in (
        ("/api/chat", {"model": "other", "messages": USER}, 404),
        ("/api/show", {"model": "other"}, 404),
        ("/api/chat", {"messages": USER}, 400),
        ("/api/chat", {"model": "fake", "messages": [{**USER[0], "images": ["x"]}]}, 400),
        ("/api/generate", {"model": "fake", "prompt": "x", "format": "yaml"}, 400),
    ):
        status, reply = await site.post(path, body)
        assert status == expected
        assert isinstance(reply["error"], str)

"""Routes that clients of the peers look for, in front of the fake engine; those for vectors are in
test_vectors."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from http_fake import FakeIngress, ScriptedIngress
from http_site import Serve, Site

from sgla.http.openai import render
from sgla.http.openai.render import preparer

USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 4}


# prompts in token ids


async def test_a_rendered_chat_is_the_prompt(site: Site) -> None:
    body = {**CHAT, "temperature": 0.5, "stop": "x", "cache_salt": "s", "request_id": "me"}
    status, reply = await site.post("/v1/chat/completions/render", body)
    assert status == 200
    assert not site.ingress.jobs
    _, tokens = await site.post("/tokenize", {"messages": USER})
    assert reply["token_ids"] == tokens["tokens"]
    assert (reply["model"], reply["cache_salt"], reply["stream"]) == ("fake", "s", False)
    assert reply["request_id"].startswith("me")
    sampling = reply["sampling_params"]
    assert (sampling["temperature"], sampling["stop"], sampling["max_tokens"]) == (0.5, ["x"], 4)
    _, open_end = await site.post("/v1/chat/completions/render", {"messages": USER})
    assert open_end["sampling_params"]["max_tokens"] == 4096 - len(reply["token_ids"])


async def test_rendered_completions_are_a_list(site: Site) -> None:
    status, reply = await site.post("/v1/completions/render", {"prompt": ["a", "bc"], "stream": True})
    assert status == 200
    assert [each["token_ids"][1:] for each in reply] == [[97], [98, 99]]
    assert all(each["stream"] for each in reply)
    _, ids = await site.post("/v1/completions/render", {"prompt": [[1, 2, 3]], "truncate_prompt_tokens": 2})
    assert ids[0]["token_ids"] == [2, 3]


async def test_what_prompts_repeat_is_written_while_it_is_sent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in one go: their ids are few, and what stands beside them is long."""
    prepared = []
    monkeypatch.setattr(render, "preparer", lambda server: prepared.append(server) or preparer(server))
    body = {"prompt": ["x"] * 64, "logit_bias": {str(i): 1 for i in range(500)}}
    async with site.http.post("/v1/completions/render", json=body) as response:
        assert response.headers.get("Transfer-Encoding") == "chunked"
        reply = await response.json()
    assert [len(each["sampling_params"]["logit_bias"]) for each in reply] == [500] * 64
    assert len(prepared) == 1  # so that the parameters are checked once


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [600]}, "prompt"),
        ("completions", {"prompt": ["x" * 1000] * 1100}, "prompt"),
        ("completions", {"prompt": ["x"] * 1024, "logit_bias": {str(i): 1.5 for i in range(4096)}}, "prompt"),
    ],
)
async def test_what_cannot_be_rendered_is_refused(site: Site, path: str, body: Any, param: str) -> None:
    status, reply = await site.post(f"/v1/{path}/render", body)
    assert (status, reply["error"]["param"]) == (400, param)


# conversations


async def test_input_tokens_are_those_of_the_prompt(site: Site) -> None:
    first = await site.client.responses.create(model="fake", input="one", max_output_tokens=2)
    asked: dict[str, Any] = {"model": "fake", "input": "two", "previous_response_id": first.id}
    counted = await site.client.responses.input_tokens.count(**asked, instructions="kind")
    assert len(site.ingress.jobs) == 1
    second = await site.client.responses.create(**asked, instructions="kind", max_output_tokens=1)
    # The fake engine writes a token in front; a chat's prompt has only what its template writes.
    assert counted.input_tokens == second.usage.input_tokens - 1
    alone = await site.client.responses.input_tokens.count(model="fake", previous_response_id=first.id)
    assert alone.input_tokens > 0
    with pytest.raises(openai.BadRequestError):
        await site.client.responses.input_tokens.count(model="fake")


@pytest.mark.parametrize(
    ("path", "named"), [("/v1/chat/completions/render", "messages"), ("/v1/responses/input_tokens", "input")]
)
async def test_work_is_as_large_as_what_was_sent(site: Site, path: str, named: str) -> None:
    """Whether its length was said or not, packed or not; and as the stored conversation that is gone on
    from."""
    sizes: list[int] = []
    run = site.ingress.lanes.run

    def counted(client: str, size: int, work: Any) -> Any:
        sizes.append(size)
        return run(client, size, work)

    site.ingress.lanes.run = counted
    body = json.dumps({named: [{"role": "user", "content": "a" * 1000}]}).encode()

    async def chunked() -> AsyncIterator[bytes]:
        yield body

    packed = {"Content-Encoding": "gzip"}
    for data, headers in ((body, {}), (chunked(), {}), (gzip.compress(body), packed)):
        async with site.http.post(path, data=data, headers=headers) as response:
            assert response.status == 200
    assert sizes == [len(body)] * 3
    if named == "input":
        first = await site.client.responses.create(model="fake", input="b" * 3000, max_output_tokens=2)
        await site.client.responses.input_tokens.count(previous_response_id=first.id, input="a")
        assert sizes[-1] > 3000


async def test_a_compacted_conversation_goes_on(serve: Serve) -> None:
    site = await serve(ScriptedIngress("They said hi.", ""))
    items: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"},
    ]
    # OpenAI lists the messages of the user too, for which the client has no type in an output.
    compacted = await site.lenient.responses.compact(model="fake", input=items, instructions="kind")
    (job,) = site.ingress.jobs
    assert [message["role"] for message in job.messages or []] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert (job.drop_turns, job.sampling.max_tokens) == (True, 1024)
    *kept, item = compacted.output
    assert [(each.role, each.content[0].text) for each in kept] == [("user", "hi"), ("user", "and?")]  # type: ignore[union-attr]
    assert item.type == "compaction"
    assert compacted.usage.output_tokens > 0
    behind = [*(each.to_dict() for each in compacted.output), {"role": "user", "content": "go on"}]
    await site.client.responses.create(model="fake", input=behind)  # type: ignore[arg-type]
    messages = site.ingress.jobs[-1].messages or []
    assert [message["content"] for message in messages] == [
        "hi",
        "and?",
        "This is a summary of the conversation so far:\n\nThey said hi.",
        "go on",
    ]


async def test_a_compaction_of_another_make_is_refused(site: Site) -> None:
    item = {"type": "compaction", "encrypted_content": "gAAAA"}
    status, reply = await site.post("/v1/responses", {"input": [item]})
    assert (status, reply["error"]["param"]) == (400, "input")
    assert "input[0].encrypted_content" in reply["error"]["message"]


# SageMaker


async def test_invocations_are_told_apart(site: Site) -> None:
    for body, kind in ((CHAT, "chat.completion"), ({"prompt": "x"}, "text_completion")):
        status, reply = await site.post("/invocations", body)
        assert (status, reply["object"]) == (200, kind)
    payloads = await site.sse("/invocations", {**CHAT, "stream": True})
    assert payloads[-1] == "[DONE]"
    async with site.http.post("/invocations", json={**CHAT, "odd": 1}) as response:
        assert response.headers["x-ignored-fields"] == "odd"


async def test_invocations_take_every_field_of_their_route(site: Site) -> None:
    status, reply = await site.post("/invocations", {"prompt": "x", "echo": True, "max_tokens": 1})
    assert (status, reply["choices"][0]["text"][:1]) == (200, "x")
    tool = {"type": "function", "function": {"name": "look"}}
    status, reply = await site.post("/invocations", {**CHAT, "tools": [tool], "tool_choice": "required"})
    assert (status, reply["object"]) == (200, "chat.completion")


async def test_invocations_are_counted_before_they_are_told_apart(site: Site) -> None:
    body = b'{"0":0' + b',"1":0' * 70_000 + b"}"
    status, reply = await site.post("/invocations", body)
    assert (status, reply["error"]["code"]) == (400, "request_too_complex")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": "x"}, "unsupported_task"),
        ({"task": "embed", "input": "x"}, "unsupported_task"),
        ({"query": "x", "documents": ["y"]}, "unsupported_task"),
        ({"text_1": "x", "text_2": "y"}, "unsupported_task"),
        ({"hello": 1}, "bad_request"),
        (b"{", "bad_request"),
        (b"", "bad_request"),
    ],
)
async def test_wrong_invocations_are_refused(site: Site, body: Any, code: str) -> None:
    status, reply = await site.post("/invocations", body)
    assert (status, reply["error"]["code"]) == (400, code)
    assert isinstance(site.ingress, FakeIngress)
    assert not site.ingress.jobs

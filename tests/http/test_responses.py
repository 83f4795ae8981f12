"""/v1/responses through the openai client, and its translation to chats."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from http_fake import FakeIngress, ScriptedIngress, expected_text, make_event
from http_site import Serve, Site

from sgla.errors import BadRequest, WorkerDied
from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.protocol import Vocabulary
from sgla.grammar.sandbox import compile_grammar
from sgla.http.answer.collect import Choice
from sgla.http.responses.answer import Answer, ResponseStream
from sgla.http.responses.input import RESPONSES, ToolName, chat_request, check_fields, input_items, resolved
from sgla.http.responses.output import OutputItems, free_text
from sgla.http.server import SERVER
from sgla.messages import Event, TokenLogprob, Usage
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece

USER = {"role": "user", "content": "hi"}


def answer(site: Site, steps: int) -> str:
    job = site.ingress.jobs[-1]
    return expected_text(job, site.ingress.prompt(job), 0, steps)


TEXT = "x" * 600_000


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    "large",
    [
        {"metadata": {"a": TEXT, "b": TEXT}},
        {"instructions": TEXT + TEXT},
        {"metadata": {"a": TEXT}, "instructions": TEXT},
    ],
)
async def test_what_a_response_repeats_is_bounded(site: Site, stored: bool, large: dict[str, Any]) -> None:
    """Each of its events has all of it."""
    status, answer = await site.post("/v1/responses", {"input": "x", "background": stored, **large})
    assert (status, "the limit; send less" in answer["error"]["message"]) == (413, True)
    assert not site.ingress.jobs
    assert not site.app[SERVER].memory.used
    assert (await site.post("/v1/responses", {"input": "x", "metadata": {"a": TEXT}}))[0] == 200


async def test_response(site: Site) -> None:
    response = await site.client.responses.create(
        model="fake", input="hi", instructions="be kind", max_output_tokens=7, metadata={"a": "b"}
    )
    assert response.output_text == answer(site, 7)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.model, response.instructions, response.metadata) == ("fake", "be kind", {"a": "b"})
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert response.id.startswith("resp_")
    prompt = len(site.ingress.prompt(site.ingress.jobs[-1]))
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (prompt, 7, prompt + 7)
    assert usage.input_tokens_details.cached_tokens == 3
    assert site.ingress.jobs[-1].messages == [{"role": "system", "content": "be kind"}, USER]
    site.ingress.check()


async def test_stream_equals_whole(site: Site) -> None:
    asked: dict[str, Any] = {"model": "fake", "input": [USER], "extra_body": {"stop": "x"}}
    whole = await site.client.responses.create(**asked)
    stream = await site.client.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert "".join(event.delta for event in deltas) == final.output_text == whole.output_text
    assert events[-2].item == final.output[0]
    assert final.usage == whole.usage
    assert whole.status == final.status == "completed"
    assert final.id == events[0].response.id != whole.id
    assert (await site.client.responses.retrieve(final.id)) == final


async def test_the_clients_own_stream_helper(site: Site) -> None:
    async with site.client.responses.stream(
        model="fake", input="x", max_output_tokens=5, extra_body={"stop": "x"}
    ) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == final.output_text == answer(site, 5)


async def test_the_conversation_goes_on(site: Site) -> None:
    first = await site.client.responses.create(
        model="fake", input="one", max_output_tokens=3, instructions="a"
    )
    second = await site.client.responses.create(
        model="fake", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    )
    assert site.ingress.jobs[-1].messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
    ]
    assert second.previous_response_id == first.id
    await site.client.responses.create(
        model="fake", input=[{"type": "item_reference", "id": first.output[0].id}, USER]
    )
    assert site.ingress.jobs[-1].messages[0] == {"role": "assistant", "content": first.output_text}
    listed = await site.client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in listed.data] == ["two"]


async def test_what_is_not_stored_is_not_found(serve: Serve) -> None:
    site = await serve(response_store=2)
    create = site.client.responses.create
    kept = [await create(model="fake", input="x", max_output_tokens=1) for _ in range(3)]
    secret = await create(model="fake", input="x", max_output_tokens=1, store=False)
    for gone in (kept[0].id, secret.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="fake", input="y", previous_response_id=gone)
        assert missing.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            await site.client.responses.retrieve(gone)
    assert (secret.store, kept[2].store) == (False, True)
    await site.client.responses.delete(kept[2].id)
    with pytest.raises(openai.NotFoundError):
        await site.client.responses.retrieve(kept[2].id)
    assert (await site.client.responses.retrieve(kept[1].id)).id == kept[1].id


async def test_background_and_cancel(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.005))
    create, retrieve = site.client.responses.create, site.client.responses.retrieve
    started = await create(model="fake", input="x", background=True, max_output_tokens=60)
    assert started.status == "queued"
    with pytest.raises(openai.ConflictError):
        await create(model="fake", input="y", previous_response_id=started.id)
    while (done := await retrieve(started.id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.005)
    assert (done.status, done.usage.output_tokens) == ("incomplete", 60)
    endless = await create(model="fake", input="x", background=True, max_output_tokens=200)
    cancelled = await site.client.responses.cancel(endless.id)
    assert (cancelled.id, cancelled.status) == (endless.id, "cancelled")
    assert (await site.client.responses.cancel(done.id)).status == "incomplete"
    site.ingress.check()


async def test_a_background_response_is_queued_until_its_first_token(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    started = await site.client.responses.create(model="fake", input="x", background=True)
    (job,) = site.ingress.jobs
    for step, status in ((None, "queued"), (0, "in_progress"), (1, "incomplete")):
        if step is not None:
            site.ingress.push(job.rid, make_event(job, site.ingress.prompt(job), 0, step, last=step == 1))
            await asyncio.sleep(0.01)
        assert (await site.client.responses.retrieve(started.id)).status == status


async def test_cancelling_a_stream_ends_it(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.005))
    stream = await site.client.responses.create(model="fake", input="x", stream=True)
    events = []
    async for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and len(events) == 6:
            await site.client.responses.cancel(events[0].response.id)
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    site.ingress.check()


async def test_a_left_stream_is_cancelled(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.01))
    stream = await site.client.responses.create(model="fake", input="x", stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    for _ in range(100):
        if (await site.client.responses.retrieve(first.response.id)).status == "cancelled":
            return
        await asyncio.sleep(0.01)
    raise AssertionError("still in progress")


async def test_errors(site: Site) -> None:
    create = site.client.responses.create
    for wrong in (
        {"input": []},
        {"input": [{"type": "martian"}]},
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": [{"type": "item_reference", "id": "msg_none"}]},
        {"input": [{"type": "reasoning", "content": 5}]},
        {"input": [{"type": "reasoning", "summary": "thought"}]},
        {"tools": [{"type": "custom", "name": "patch", "format": "text"}]},
        {"tools": [{"type": "custom", "name": "patch", "format": [None]}]},
        {"text": {"format": {"type": "yaml"}}},
        {"truncation": "middle"},
        {"conversation": {}},
        {"conversation": "conv_1", "previous_response_id": "resp_1"},
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "web_search"}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]},
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            await site.client.post(
                "/responses", body={"model": "fake", "input": "x", **wrong}, cast_to=object
            )
        assert (bad.value.param or "").partition("[")[0] in (next(iter(wrong)), "messages")
    with pytest.raises(openai.BadRequestError) as long:
        await create(model="fake", input="x" * 5000, stream=True)
    assert long.value.code == "context_length_exceeded"
    assert len(site.ingress.open_jobs) == 0


async def test_an_error_after_the_headers_is_an_event(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True))
    stream = await site.client.responses.create(model="fake", input="x", stream=True)
    rid = site.ingress.jobs[-1].rid
    site.ingress.push(rid, WorkerDied("gone").rejected(rid))
    events = [event async for event in stream]
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert (events[-1].response.error.code, events[-1].response.error.message) == ("server_error", "gone")


HERMES = "<think></think> <tool_call>"  # enough of a chat template to know the family by
SPOKEN = (
    "<think>What is there?</think>I look.\n<tool_call>\n"
    '{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "patch", "arguments": {"input": "*** x\\n"}}\n</tool_call>'
)
TOOLS: Any = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
]


@pytest.mark.parametrize("cut", [1, 4, 1000])
async def test_an_agents_loop(serve: Serve, cut: int) -> None:
    site = await serve(ScriptedIngress(SPOKEN, HERMES, cut))
    asked: dict[str, Any] = {"model": "fake", "tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    history: list[Any] = [{"role": "user", "content": "fix it"}]
    whole = await site.client.responses.create(input=history, store=False, **asked)
    stream = await site.client.responses.create(input=history, store=False, stream=True, **asked)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for response in (whole, events[-1].response):
        reasoning, message, call, custom = response.output
        assert reasoning.content[0].text == "What is there?"
        assert message.content[0].text == "I look."
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "shell",
            {"command": "ls"},
        )
        assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "*** x\n")
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert response.status == "completed"
    history += [item.model_dump(exclude_none=True) for item in events[-1].response.output]
    history += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"},
        {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
    ]
    await site.client.responses.create(input=history, store=False, **asked)
    user, assistant, *results = site.ingress.jobs[-1].messages
    assert assistant["reasoning_content"] == "What is there?"
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["shell", "patch"]
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in assistant["tool_calls"]]


# the translation


def translated(**body: Any) -> Any:
    sent = json.dumps({"input": "hi", **body}).encode()
    fields, ignored = RESPONSES.typed(sent), RESPONSES.ignored(sent)
    assert ignored == []
    check_fields(fields)
    return chat_request(fields, resolved(input_items(fields), lambda uid: None))


def test_a_coding_agents_turn_becomes_a_chat() -> None:
    chat = translated(
        instructions="You code.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": "ls"}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** \u00e9"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "ok"}],
            },
            {"type": "message", "role": "assistant", "content": "Done."},
            {"role": "user", "content": "thanks"},
        ],
        tools=[
            {
                "type": "function",
                "name": "shell",
                "description": "d",
                "parameters": {"type": "object"},
                "strict": False,
            },
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
        ],
        tool_choice={"type": "function", "name": "shell"},
        reasoning={"effort": "high", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        store=False,
        text={"verbosity": "low", "format": {"type": "text"}},
        parallel_tool_calls=True,
        prompt_cache_key="k",
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}},
        {
            "id": "c2",
            "type": "function",
            "function": {"name": "patch", "arguments": '{"input":"*** \u00e9"}'},
        },
    ]
    assert chat.messages == [
        {"role": "system", "content": "You code.\nrules"},
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "thanks"},
    ]
    assert [tool["function"]["name"] for tool in chat.tools] == ["shell", "patch"]
    assert chat.tools[1]["function"]["parameters"]["required"] == ["input"]
    assert chat.tool_choice == {"type": "function", "function": {"name": "shell"}}
    assert chat.reasoning_effort == "high"


async def test_a_response_may_go_on_without_input(site: Site) -> None:
    _, first = await site.post("/v1/responses", {"input": "hi", "max_output_tokens": 4})
    for more in ({"previous_response_id": first["id"]}, {"instructions": "Greet."}):
        assert (await site.post("/v1/responses", {"max_output_tokens": 4, **more}))[0] == 200
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        for nothing in ({}, {"input": None}, {"input": []}):
            status, reply = await site.post(path, nothing)
            assert (status, reply["error"]["param"]) == (400, "input")


def test_formats_of_text() -> None:
    schema = {"type": "object", "properties": {}}
    chat = translated(text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
    inner = {"name": "n", "schema": schema, "strict": True}
    assert chat.response_format == {"type": "json_schema", "json_schema": inner}
    assert translated(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}


def test_allowed_tools() -> None:
    tools = [{"type": "function", "name": name, "parameters": {}} for name in "ab"]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    chat = translated(tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in chat.tools] == ["b"]
    assert chat.tool_choice == "required"


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "file_search"}, "tool_choice must be"),
        ({"type": "allowed_tools", "mode": "auto"}, "a list of tools"),
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "a"}]}, "needs a mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "each function's name"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "a"}, {"name": "c"}]},
            "'c', which is not among the tools",
        ),
    ],
)
def test_wrong_choices_of_tools_are_named(choice: dict[str, Any], words: str) -> None:
    tools = [{"type": "function", "name": "a", "parameters": {}}]
    with pytest.raises(BadRequest, match="tool_choice") as caught:
        translated(tools=tools, tool_choice=choice)
    assert words in caught.value.message


# the answer's items


class Scripted:
    """A reader whose pieces are given."""

    reasoning_tokens = 2

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = list(pieces)

    def read(self, event: Event | Choice) -> list[Piece]:
        count = len(self.pieces) if event.finish else 1
        read, self.pieces = self.pieces[:count], self.pieces[count:]
        return read


SCRIPT = (
    Piece(REASONING, "let"),
    Piece(REASONING, " me"),
    Piece(CONTENT, "I"),
    Piece(CONTENT, " look."),
    Piece(CALL, "shell", "call_1"),
    Piece(ARGUMENTS, '{"command":'),
    Piece(ARGUMENTS, ' "ls"}'),
    Piece(CALL, "patch"),
    Piece(ARGUMENTS, '{"input": '),
    Piece(ARGUMENTS, '"*** x"}'),
)


def scripted(**body: Any) -> Answer:
    tools = [{"type": "custom", "name": "patch"}]
    fields = RESPONSES.typed(json.dumps({"input": "x", "tools": tools, **body}).encode())
    return Answer(fields, Scripted(*SCRIPT), True)


def event(text: str, finish: str | None = None) -> Event:
    return Event(rid="r", index=0, text=text, tokens=[1], finish=finish, usage=Usage(10, 3, 4))


def parse(raw: bytes) -> list[dict[str, Any]]:
    blocks = [block.split("\n") for block in raw.decode().removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    return events


def test_items_of_reasoning_text_and_calls() -> None:
    answer = scripted(include=["reasoning.encrypted_content"])
    stream = ResponseStream(answer)
    raw = stream.begin() + b"".join(stream.encode(event("x")) for _ in SCRIPT[:-1])
    events = parse(raw + stream.encode(event("", "stop")))
    items = events[-1]["response"]["output"]
    reasoning, message, call, custom = items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me"}]
    assert message["content"] == [
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    ]
    assert (call["name"], call["call_id"], call["arguments"]) == ("shell", "call_1", '{"command": "ls"}')
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** x")
    assert custom["call_id"].startswith("call_")
    assert {item["status"] for item in items} == {"completed"}
    for i, item in enumerate(items):
        mine = [event for event in events if event.get("output_index") == i]
        assert (mine[0]["type"], mine[-1]["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        assert mine[-1]["item"] == item
        assert mine[0]["item"]["status"] == "in_progress"
        assert all(event["item_id"] == item["id"] for event in mine[1:-1])
        joined = "".join(event["delta"] for event in mine if event["type"].endswith("delta"))
        assert joined == ["let me", "I look.", '{"command": "ls"}', "*** x"][i]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    kept = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    assert translated(input=[kept, USER]).messages[0]["reasoning_content"] == "let me"


def test_an_answer_that_is_cut_off_has_an_incomplete_item() -> None:
    answer = scripted()
    for _ in SCRIPT[:6]:
        answer.take(event("x"))
    answer._reader.pieces.clear()
    answer.take(event("", "length"))
    assert [item["status"] for item in answer.response["output"]] == ["completed", "completed", "incomplete"]
    assert answer.response["output"][2]["arguments"] == '{"command":'


# in the background


async def test_a_stream_in_the_background_goes_on_without_its_client(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.005))
    create, retrieve = site.client.responses.create, site.client.responses.retrieve
    stream = await create(model="fake", input="x", background=True, stream=True, max_output_tokens=30)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 8:
            break
    await stream.close()
    response = seen[0].response
    again = await retrieve(response.id, stream=True, starting_after=seen[-1].sequence_number)
    events = [*seen, *[event async for event in again]]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert events[-1].type == "response.incomplete"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer(site, 30)
    replayed = [event async for event in await retrieve(response.id, stream=True)]
    assert [event.to_dict() for event in replayed[8:]] == [event.to_dict() for event in events[8:]]
    site.ingress.check()


async def test_a_stream_in_the_background_can_be_cancelled(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.01))
    stream = await site.client.responses.create(
        model="fake", input="x", background=True, stream=True, max_output_tokens=200
    )
    first = await anext(aiter(stream))
    ended = await site.client.responses.cancel(first.response.id)
    assert ended.status == "cancelled"
    events = [event async for event in stream]
    assert events[-1].response.status == "cancelled"
    site.ingress.check()


async def test_only_recorded_responses_can_be_streamed_again(site: Site) -> None:
    response = await site.client.responses.create(model="fake", input="x", max_output_tokens=2)
    assert (await site.get(f"/v1/responses/{response.id}?stream=true"))[0] == 400
    stream = await site.client.responses.create(
        model="fake", input="x", background=True, stream=True, max_output_tokens=2
    )
    (first, *_) = [event async for event in stream]
    path = f"/v1/responses/{first.response.id}?stream=true&starting_after="
    for wrong in ("x", "-2", "1e3"):
        assert (await site.get(path + wrong))[0] == 400


async def test_the_oldest_turns_may_be_dropped(site: Site) -> None:
    response = await site.client.responses.create(model="fake", input="x", truncation="auto")
    assert response.truncation == "auto"
    assert site.ingress.jobs[-1].drop_turns
    await site.client.responses.create(model="fake", input="x")
    assert not site.ingress.jobs[-1].drop_turns


# logprobs


@pytest.mark.parametrize("asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
async def test_logprobs_come_with_the_text(site: Site, asked: dict[str, Any]) -> None:
    whole = await site.client.responses.create(model="fake", input="x", max_output_tokens=9, **asked)
    logprobs = whole.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == whole.output_text
    assert {len(entry.top_logprobs) for entry in logprobs} == {asked.get("top_logprobs", 0)}
    stream = await site.client.responses.create(
        model="fake", input="x", max_output_tokens=9, stream=True, **asked
    )
    events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [
        entry.token for entry in logprobs
    ]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert len(done.logprobs) == len(logprobs)


@pytest.mark.parametrize("cut", [1, 3, 100])
async def test_reasoning_has_no_logprobs(serve: Serve, cut: int) -> None:
    site = await serve(Graded("<think>so so</think>Paris", "<think></think>", cut))
    for stream in (False, True):
        body = {
            "input": "x",
            "top_logprobs": 0,
            "include": ["message.output_text.logprobs"],
            "stream": stream,
        }
        if stream:
            async with site.http.post("/v1/responses", json=body) as reply:
                last = (await reply.text()).rstrip().rpartition("data: ")[2]
            response = json.loads(last)["response"]
        else:
            _, response = await site.post("/v1/responses", body)
        thought, said = response["output"]
        assert "logprobs" not in thought["content"][0]
        tokens = [entry["token"] for entry in said["content"][0]["logprobs"]]
        assert "".join(tokens) == "Paris"


class Graded(ScriptedIngress):
    """Every token has a logprob."""

    def push(self, rid: str, message: Any) -> None:
        if isinstance(message, Event):
            message.logprobs = [TokenLogprob(token, -1.0, 1) for token in message.tokens]
        super().push(rid, message)


async def test_an_answer_is_taken_as_it_comes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one would hold up the loop if it were read in one go."""
    lengths: list[int] = []
    take = Answer.take

    def watched(answer: Answer, event: Event) -> Any:
        lengths.append(len(event.text))
        return take(answer, event)

    monkeypatch.setattr(Answer, "take", watched)
    site = await serve(ScriptedIngress("word " * 1000, "", cut=50))
    status, reply = await site.post("/v1/responses", {"input": "x"})
    assert (status, reply["output"][0]["content"][0]["text"]) == (200, "word " * 1000)
    assert lengths == [50] * 100


async def test_a_bug_in_an_answer_reaches_nobody_else(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(answer: Answer, event: Event) -> Any:
        raise ZeroDivisionError

    site = await serve()
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "take", broken)
        assert (await site.post("/v1/responses", {"input": "x"}))[0] == 500
        body = {"input": "x", "background": True, "stream": True}
        async with site.http.post("/v1/responses", json=body) as response:
            assert b"response.queued" in await response.read()
    assert (await site.post("/v1/responses", {"input": "x"}))[0] == 200
    site.ingress.check()


LARK = 'start: "say " WORD LINE\nWORD: /[a-z]+/\nLINE: "\\n\\"" /.+/ "\\""'


def grammar_tool(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "speak", "format": form}


CRM: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "What we know of customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds one.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "note"},
    ],
}
IN_NAMESPACE = (
    '<tool_call>\n{"name": "crm__find", "arguments": {"id": 1}}\n</tool_call>\n<tool_call>\n'
    '{"name": "find", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "crm__note", "arguments": {"input": "x"}}\n</tool_call>'
)


async def test_tools_of_a_namespace(serve: Serve) -> None:
    """As Codex sends its own and those of MCP servers. The model knows them by one name, the client by
    two."""
    site = await serve(ScriptedIngress(IN_NAMESPACE, HERMES))
    find = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    asked: dict[str, Any] = {"model": "fake", "tools": [CRM, find]}
    whole = await site.client.responses.create(input="x", **asked)
    stream = await site.client.responses.create(input="x", stream=True, **asked)
    events = [event async for event in stream]
    for response in (whole, events[-1].response):
        calls = [(call.type, call.namespace, call.name) for call in response.output]
        assert calls == [
            ("function_call", "crm", "find"),
            ("function_call", None, "find"),
            ("custom_tool_call", "crm", "note"),
        ]
    told = [tool["function"] for tool in site.ingress.jobs[-1].tools]
    assert [tool["name"] for tool in told] == ["crm__find", "crm__note", "find"]
    assert told[0]["description"] == "What we know of customers.\n\nFinds one."
    history = [item.model_dump(exclude_none=True) for item in whole.output]
    await site.client.responses.create(input=[{"role": "user", "content": "x"}, *history], **asked)
    calls = site.ingress.jobs[-1].messages[1]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["crm__find", "find", "crm__note"]


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        ([CRM | {"tools": [{"type": "web_search"}]}], "tools[0].tools[0]"),
        ([CRM | {"tools": None}], "tools[0].tools"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([CRM, {"type": "function", "name": "crm__find"}], "tools[1]"),
    ],
)
async def test_namespaces_that_are_refused(site: Site, tools: list[Any], path: str) -> None:
    status, reply = await site.post("/v1/responses", {"input": "x", "tools": tools})
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert reply["error"]["message"].startswith(path)


def test_allowed_tools_of_a_namespace() -> None:
    def names(*allowed: dict[str, str]) -> list[str]:
        choice = {"type": "allowed_tools", "mode": "auto", "tools": list(allowed)}
        body = {"input": "x", "tools": [CRM, *TOOLS], "tool_choice": choice}
        fields = RESPONSES.typed(json.dumps(body).encode())
        chat = chat_request(fields, input_items(fields))
        return [tool["function"]["name"] for tool in chat.tools or []]

    assert names({"type": "function", "namespace": "crm", "name": "find"}) == ["crm__find"]
    assert names({"type": "namespace", "name": "crm"}) == ["crm__find", "crm__note"]


async def test_a_custom_tool_with_a_grammar(serve: Serve) -> None:
    """Text of a Lark grammar stands between tags, as it is; that of an expression in JSON."""
    said = 'say hi\n"x"'
    texts = {
        "lark": f'<tool_call>\n{{"name": "speak", "arguments": <input>\n{said}\n</input>}}\n</tool_call>',
        "regex": '<tool_call>\n{"name": "speak", "arguments": {"input": "a+b"}}\n</tool_call>',
    }
    for choice in ("auto", "required"):
        for syntax, definition, given in (("lark", LARK, said), ("regex", "a\\+b|c", "a+b")):
            ingress = ScriptedIngress(texts[syntax], HERMES, 3)
            assert ingress.facts is not None
            ingress.facts.grammars = True
            site = await serve(ingress)
            response = await site.client.responses.create(
                model="fake",
                input="x",
                tools=[grammar_tool(syntax, definition)],  # type: ignore[list-item]
                tool_choice=choice,  # type: ignore[arg-type]
            )
            assert response.output[-1].input == given  # type: ignore[union-attr]
            grammar = ingress.jobs[-1].sampling.grammar
            assert grammar is not None
            answer = compile_grammar(BYTES, {}, grammar)
            assert answer.error is None
            outputs = [texts[syntax], texts[syntax].replace("say hi", "say 1").replace("a+b", "b")]
            assert [takes(answer.source, output) for output in outputs] == [True, False]


def test_a_cut_call_of_a_custom_tool_has_its_text_alone() -> None:
    text = 'say "é\\n\n\U0001f600" /\tend'
    escaped = '"' + "".join(f"\\u{u:04x}" for u in (0xE9, 0xD83D, 0xDE00, 0x22, 0x41)) + '"'
    for written in (json.dumps(text), json.dumps(text, ensure_ascii=False), escaped, '"a\nb"'):
        whole = json.loads(written, strict=False)
        for before in ('{"input": ', ' {\n"input":'):
            arguments = f"{before}{written}}}"
            shown = []
            for end in range(len(arguments) + 1):
                output = OutputItems({"speak": ToolName("speak", custom=True)})
                output.take([Piece(CALL, "speak", "call_1"), Piece(ARGUMENTS, arguments[:end])])
                delta, done, _ = output.close("incomplete")
                shown.append(output.items[0]["input"])
                assert delta["delta"] == done["input"] == shown[-1]
                assert whole.startswith(shown[-1])
                assert len(shown) < 2 or len(shown[-2]) <= len(shown[-1]) <= len(shown[-2]) + 1
            assert shown[0] == ""
            assert shown[-1] == shown[-3] == whole
    assert free_text('{"other": "x') == '{"other": "x'


async def test_what_nobody_knows_is_not_included(site: Site) -> None:
    for streamed in (False, True):
        status, reply = await site.post(
            "/v1/responses",
            {"input": "x", "include": ["reasoning.encrypted_content", "all"], "stream": streamed},
        )
        assert (status, reply["error"]["param"]) == (400, "include")
        assert "'all' is not one of message.output_text.logprobs, reasoning" in reply["error"]["message"]


async def test_an_image_is_refused_where_it_stands(site: Site) -> None:
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}]
    status, reply = await site.post("/v1/responses", {"input": [{"role": "user", "content": parts}]})
    assert (status, reply["error"]["param"]) == (400, "input[0].content[1]")
    assert reply["error"]["message"].startswith("input[0].content[1]: this model takes no images")


async def test_tools_of_mcp_servers_need_a_flag(site: Site) -> None:
    body = {"input": "x", "tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]}
    status, reply = await site.post("/v1/responses", body)
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert reply["error"]["message"].startswith("tools[0]: ")
    assert "--tool-server" in reply["error"]["message"]


async def test_a_grammar_that_nothing_can_honour_is_refused(serve: Serve) -> None:
    body = {"input": "x", "tools": [grammar_tool("lark", LARK)]}
    site = await serve(ScriptedIngress("x", "<|python_tag|>"))
    status, reply = await site.post("/v1/responses", body)
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert "use tool_choice required" in reply["error"]["message"]
    body["tools"] = [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "abnf"}}]
    status, reply = await site.post("/v1/responses", body)
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert "tools[0].format" in reply["error"]["message"]


BYTES = load_tokenizer(Vocabulary([bytes([i]) for i in range(256)] + [b"</s>"], [256], [256]))


def takes(source: str, text: str) -> bool:
    return make_matcher(BYTES, source).validate_tokens(list(text.encode())) == len(text.encode())

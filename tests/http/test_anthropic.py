"""/v1/messages through the anthropic client, and its translation to chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from http_fake import FakeIngress, ScriptedIngress, expected_text
from http_site import Serve, Site

from sgla.errors import BadRequest
from sgla.http.answer.collect import Choice
from sgla.http.anthropic.input import MESSAGES, chat_request
from sgla.http.anthropic.messages import Answer, MessageStream
from sgla.messages import Event, Thinking, Usage
from sgla.text.tools.cursor import ARGUMENTS, CALL, CONTENT, REASONING, Piece

if TYPE_CHECKING:
    import anthropic

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", autouse=True)
def published() -> None:
    """Thousands of modules, which only the process that runs these tests imports."""
    global anthropic
    import anthropic


@pytest.fixture
async def client(site: Site) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with make_client(site) as client:
        yield client


def make_client(site: Site, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=site.url,
        api_key=key,
        max_retries=0,
        timeout=10,
        http_client=anthropic.DefaultAsyncHttpxClient(verify=False),  # reading certificates takes long
        _strict_response_validation=True,
    )


def answer(site: Site, steps: int) -> str:
    job = site.ingress.jobs[-1]
    return expected_text(job, site.ingress.prompt(job), 0, steps)


async def test_message(site: Site, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model="fake", messages=USER, max_tokens=7, system="be kind")
    assert [(block.type, block.text) for block in message.content] == [("text", answer(site, 7))]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("max_tokens", None, "fake")
    assert message.id.startswith("msg_")
    prompt = len(site.ingress.prompt(site.ingress.jobs[-1]))
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (prompt - 3, 3, 7)
    assert site.ingress.jobs[-1].messages == [{"role": "system", "content": "be kind"}, *USER]
    assert message._request_id
    site.ingress.check()


async def test_stream_equals_whole(site: Site, client: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": USER, "max_tokens": 20}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        assert "".join([text async for text in stream.text_stream]) == whole.content[0].text
        final = await stream.get_final_message()
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


async def test_order_of_the_events(site: Site) -> None:
    async with site.http.post(
        "/v1/messages", json={"model": "fake", "messages": USER, "max_tokens": 5, "stream": True}
    ) as response:
        assert response.content_type == "text/event-stream"
        events = parse(await response.read())
    names = [name for name, _ in events]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(data["type"] == name for name, data in events)
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 5


def parse(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of a complete stream, which has nothing else."""
    assert raw.endswith(b"\n\n")
    blocks = [block.split("\n") for block in raw.decode().removesuffix("\n\n").split("\n\n")]
    assert all(len(lines) == 2 for lines in blocks), blocks
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


async def test_stop_sequences_and_sampling(site: Site, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(
        model="fake",
        messages=USER,
        max_tokens=4,
        stop_sequences=["END", "x"],
        extra_body={"top_k": 7, "top_p": 0.5, "temperature": 0.25},
        metadata={"user_id": "u"},
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    sampling = site.ingress.jobs[-1].sampling
    assert (sampling.stop, sampling.top_k, sampling.top_p, sampling.temperature) == (
        ["END", "x"],
        7,
        0.5,
        0.25,
    )


async def test_an_answer_ends_with_the_context(serve: Serve) -> None:
    site = await serve(FakeIngress(context=30))
    async with make_client(site) as client:
        message = await client.messages.create(model="fake", messages=USER, max_tokens=1000)
        prompt = len(site.ingress.prompt(site.ingress.jobs[-1]))
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.output_tokens == 30 - prompt
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 30 tokens"):
            await client.messages.create(
                model="fake", messages=[{"role": "user", "content": "x" * 50}], max_tokens=1
            )


async def test_errors(serve: Serve) -> None:
    site = await serve(api_key=["secret"])
    async with make_client(site, "secret") as client, make_client(site, "wrong") as stranger:
        assert await client.messages.create(model="fake", messages=USER, max_tokens=1)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await stranger.messages.create(model="fake", messages=USER, max_tokens=1)
        assert refused.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="other", messages=USER, max_tokens=1)
        assert missing.value.body["error"]["type"] == "not_found_error"
        assert missing.value.body["request_id"] == missing.value.request_id
        for wrong in (
            {"max_tokens": 0},
            {"messages": []},
            {"n": 2},
            {"tool_choice": {"type": "maybe"}},
            {"tool_choice": {}},
            {"thinking": {}},
        ):
            body = {"model": "fake", "messages": USER, "max_tokens": 1, **wrong}
            with pytest.raises(anthropic.BadRequestError) as bad:
                await client.post("/v1/messages", body=body, cast_to=object)
            assert bad.value.body["error"]["type"] == "invalid_request_error"
            assert next(iter(wrong)) in bad.value.body["error"]["message"]
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is required"):
            await client.post("/v1/messages", body={"model": "fake", "messages": USER}, cast_to=object)
        site.ingress.phase = "load"
        with pytest.raises(anthropic.OverloadedError) as loading:
            await client.messages.create(model="fake", messages=USER, max_tokens=1)
        assert loading.value.body["error"]["type"] == "overloaded_error"


async def test_an_abort_ends_the_stream_with_an_error(serve: Serve) -> None:
    site = await serve(FakeIngress(pace=0.01))
    async with make_client(site) as client:
        stream = await client.messages.create(model="fake", messages=USER, max_tokens=200, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="aborted"):  # noqa: PT012
            async for event in stream:
                if event.type == "content_block_delta":
                    await site.post("/abort_request", {"abort_all": True})
    site.ingress.check()


async def test_claude_names_mean_the_first_model(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model="claude-haiku-4-5", messages=USER, max_tokens=1)
    assert message.model == "fake"


async def test_count_tokens_is_the_prompt(site: Site, client: anthropic.AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": USER, "system": "kind"}
    counted = await client.messages.count_tokens(**asked)
    message = await client.messages.create(**asked, max_tokens=1)
    used = message.usage.input_tokens + message.usage.cache_read_input_tokens
    # The fake engine writes a token in front; a chat's prompt has only what its template writes.
    assert counted.input_tokens == used - 1
    assert len(site.ingress.jobs) == 1


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_tools_of_anthropics_own_are_refused(site: Site, path: str) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]
    body = {"model": "fake", "messages": USER, "max_tokens": 1, "tools": tools}
    status, reply = await site.post(path, body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert "tools[0]" in reply["error"]["message"]
    assert "web_search_20250305" in reply["error"]["message"]


async def test_models_in_anthropics_shape(site: Site, client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list()
    assert [(model.id, model.display_name, model.max_input_tokens) for model in page.data] == [
        (name, name, 4096) for name in ("fake", "fake-alias")
    ]
    assert (page.first_id, page.last_id, page.has_more) == ("fake", "fake-alias", False)
    assert [model.id async for model in client.models.list(limit=1)] == ["fake", "fake-alias"]
    assert [model.id async for model in client.models.list(before_id="fake-alias")] == ["fake"]
    assert (await client.models.retrieve("fake-alias")).id == "fake-alias"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("none")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        await client.models.list(after_id="none")
    _, plain = await site.get("/v1/models")
    assert plain["object"] == "list"


HERMES = "<think></think> <tool_call>"  # enough of a chat template to know the family by
SPOKEN = (
    "<think>Which city?</think>I look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "time", "arguments": {}}\n</tool_call>'
)
TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]


@pytest.mark.parametrize("cut", [1, 4, 1000])
async def test_thinking_and_tool_use(serve: Serve, cut: int) -> None:
    site = await serve(ScriptedIngress(SPOKEN, HERMES, cut))
    asked: dict[str, Any] = {
        "model": "fake",
        "messages": USER,
        "max_tokens": 500,
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
    }
    async with make_client(site) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            thinking, text, first, second = message.content
            assert (thinking.type, thinking.thinking) == ("thinking", "Which city?")
            assert (text.type, text.text) == ("text", "I look.")
            assert (first.name, first.input) == ("weather", {"city": "K\u00f6ln"})
            assert (second.name, second.input) == ("time", {})
            assert first.id.startswith("toolu_")
            assert first.id != second.id
            assert message.stop_reason == "tool_use"
        results: Any = [{"type": "tool_result", "tool_use_id": first.id, "content": "rain"}]
        turns = [*USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        assert await client.messages.create(**{**asked, "messages": turns})
    assert [message["role"] for message in site.ingress.jobs[-1].messages] == ["user", "assistant", "tool"]
    assert site.ingress.jobs[-1].template_kwargs["enable_thinking"] is True


async def test_thinking_that_is_not_shown(serve: Serve) -> None:
    site = await serve(ScriptedIngress(SPOKEN, HERMES))
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    asked: dict[str, Any] = {"model": "fake", "messages": USER, "max_tokens": 2000, "thinking": thinking}
    async with make_client(site) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert (message.content[0].type, message.content[0].thinking) == ("thinking", "")
        assert message.content[0].signature
        assert message.content[1].text.startswith("I look.")
    limit = Thinking(tokens=1024, open="<think>", close="</think>", wish=True)
    assert [job.sampling.thinking for job in site.ingress.jobs] == [limit, limit]


async def test_one_tool_at_a_time(serve: Serve) -> None:
    site = await serve(ScriptedIngress(SPOKEN, HERMES))
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    async with make_client(site) as client:
        message = await client.messages.create(
            model="fake", messages=USER, max_tokens=500, tools=TOOLS, tool_choice=choice
        )
    assert [block.name for block in message.content if block.type == "tool_use"] == ["weather"]


# the translation


def translated(**body: Any) -> Any:
    sent = json.dumps({"max_tokens": 5, "messages": USER, **body}).encode()
    fields, ignored = MESSAGES.typed(sent), MESSAGES.ignored(sent)
    assert ignored == []
    return chat_request(fields)


def test_the_billing_line_does_not_reach_the_prompt() -> None:
    def chat(nonce: str) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2.1.37.{nonce}; cc_entrypoint=cli; cch={nonce};"
        return translated(
            system=[
                {"type": "text", "text": line},
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
            ]
        ).messages, translated(system=f"{line}\nYou are Claude Code.").messages

    assert chat("a1b2c")[0] == chat("zzzzz")[0] == chat("a")[1]
    assert chat("a")[0] == [{"role": "system", "content": "You are Claude Code."}, *USER]


def test_the_longest_cache_control_counts() -> None:
    def kept(ttl: str | None, **more: Any) -> float | None:
        text = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": ttl}}
        control = translated(system=[text, {"type": "text", "text": "t"}], **more).cache_control
        return control and control.seconds

    result = {"type": "tool_result", "tool_use_id": "toolu_1", "cache_control": {"type": "ephemeral"}}
    assert kept(None) == 300
    assert kept("1h", cache_control={"type": "ephemeral"}) == 3600
    assert kept("1m", messages=[{"role": "user", "content": [result]}]) == 300
    assert translated(system="s").cache_control is None


def test_a_tool_turn_becomes_a_chat() -> None:
    chat = translated(
        system="s",
        messages=[
            {"role": "system", "content": "more"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "weather?"}, {"type": "text", "text": "now"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "K\u00f6ln"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        tools=[{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 2000},
    )
    function = {"name": "weather", "arguments": '{"city":"K\u00f6ln"}'}
    assert chat.messages == [
        {"role": "system", "content": "s\nmore"},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}, {"type": "text", "text": "now"}]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain", "name": "weather"},
        {"role": "user", "content": "and?"},
    ]
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
        }
    ]
    assert chat.tool_choice == "required"
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert chat.continue_final_message is False


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any) -> None:
    assert translated(tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_output_formats(where: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    chat = translated(**{where: {"format": form, "effort": "low"} if where == "output_config" else form})
    assert chat.response_format["json_schema"]["schema"] == {"type": "object"}
    assert chat.reasoning_effort == ("low" if where == "output_config" else None)


def test_prefill_and_documents() -> None:
    chat = translated(messages=[*USER, {"role": "assistant", "content": "Once"}])
    assert chat.continue_final_message is True
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    chat = translated(
        messages=[{"role": "user", "content": [{"type": "document", "title": "T", "source": source}]}]
    )
    assert [part["text"] for part in chat.messages[0]["content"]] == ["T", "body"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "user", "content": [{"type": "martian"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
            ]
        },
        {"tools": [{"name": "f"}]},
        {"tool_choice": {"type": "tool"}},
        {"mcp_servers": [{"url": "x"}]},
        {"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}},
        {"stop_sequences": ["x"] * 65},
    ],
)
def test_wrong_bodies_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as error:
        translated(**wrong)
    assert next(iter(wrong)) in error.value.message


# the answer's blocks


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
    Piece(CALL, "weather", "toolu_1"),
    Piece(ARGUMENTS, '{"city":'),
    Piece(ARGUMENTS, ' "Bonn"}'),
    Piece(CALL, "time", "toolu_2"),
    Piece(CALL, "cut", "toolu_3"),
    Piece(ARGUMENTS, '{"a'),
)


def make_answer() -> Answer:
    return Answer("msg_1", "fake", MESSAGES.typed(b'{"max_tokens": 9, "messages": []}'), Scripted(*SCRIPT))


def event(text: str, finish: str | None = None) -> Event:
    return Event(rid="r", index=0, text=text, finish=finish, usage=Usage(10, 3, 4))


def test_blocks_of_thinking_text_and_calls() -> None:
    stream = MessageStream(make_answer())
    raw = b"".join(stream.encode(event("x")) for _ in SCRIPT[:-2]) + stream.encode(event("", "stop"))
    events = parse(raw)
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2, 3, 4]
    built = [data["content_block"] for name, data in events if name == "content_block_start"]
    for name, data in events:
        if name == "content_block_delta":
            apply(built[data["index"]], data["delta"])
    assert built == [
        {"type": "thinking", "thinking": "let me", "signature": built[0]["signature"]},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": '{"city": "Bonn"}'},
        {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
        {"type": "tool_use", "id": "toolu_3", "name": "cut", "input": '{"a'},
    ]
    assert built[0]["signature"]
    opened = [name for name, _ in events if name in ("content_block_start", "content_block_stop")]
    assert opened == ["content_block_start", "content_block_stop"] * 5
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


def apply(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["input"] = (block["input"] or "") + delta["partial_json"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        key = delta["type"].removesuffix("_delta")
        block[key] += delta[key]


def test_whole_message_has_the_same_blocks() -> None:
    answer = make_answer()
    choice = Choice(0)
    choice.add(event("x", "stop"))
    content = answer.whole(choice)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
    assert [block["input"] for block in content[2:]] == [{"city": "Bonn"}, {}, {"INVALID_JSON": '{"a'}]

"""Tool calls and reasoning in chats, through the openai client; the fake engine writes what a model would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from http_fake import BOS, FakeIngress, FakeTemplate, FakeTokenizer
from http_site import Serve, Site
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from sgla.http.answer.reading import Reading
from sgla.http.request.schema import ChatRequest
from sgla.http.server import SERVER
from sgla.messages import Event, Job, Usage

MESSAGES: Any = [{"role": "user", "content": "weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "time")
]
QWEN = "<tool_call><think></think>"
ARGUMENTS = {"city": "Köln 😀", "days": 2}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>"  # noqa: E501
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


class Template(FakeTemplate):
    def __init__(self, source: str, opens: bool) -> None:
        self.source = source
        self.opens = opens

    def render(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        return super().render(messages, *args, **kwargs) + ("<think>\n" if self.opens else "")


class Writer(FakeIngress):
    """Writes ``text`` in pieces of ``size`` characters, one event each; a byte is a token."""

    def __init__(self, text: str, source: str = QWEN, opens: bool = False, size: int = 3) -> None:
        super().__init__()
        self.template = Template(source, opens)
        self.text = text
        self.size = size
        self.finish = "stop"

    async def _run(self, job: Job) -> None:
        prompt = self.prompt(job)
        count = 0
        for child in range(job.sampling.n):
            for at in range(0, len(self.text), self.size):
                part = self.text[at : at + self.size]
                count += len(part.encode())
                last = at + self.size >= len(self.text)
                self.push(
                    job.rid,
                    Event(
                        rid=job.rid,
                        index=job.index_base + child,
                        text=part,
                        tokens=list(part.encode()),
                        prompt_tokens=prompt if at == 0 else None,
                        finish=self.finish if last else None,
                        usage=Usage(len(prompt), count, 0),
                    ),
                )


async def ask(site: Site, **options: Any) -> ChatCompletion:
    return await site.client.chat.completions.create(
        model="fake", messages=MESSAGES, **({"tools": TOOLS} | options)
    )


async def chunks_of(site: Site, **options: Any) -> list[Any]:
    return [chunk async for chunk in await ask(site, stream=True, **options)]  # type: ignore[attr-defined]


def put_together(chunks: list[Any]) -> dict[str, Any]:
    """A message as the client's users build it up from deltas, which must come as OpenAI sends them."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            assert finish is None
            finish = choice.finish_reason
            delta = choice.delta
            if delta.content:
                message["content"] = (message["content"] or "") + delta.content
            if reasoning := getattr(delta, "reasoning_content", None):
                assert delta.reasoning == reasoning
                message["reasoning_content"] = (message["reasoning_content"] or "") + reasoning
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert (call.index, call.type) == (len(message["tool_calls"]), "function")
                    assert (call.function.arguments, bool(call.function.name)) == ("", True)
                    message["tool_calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert (call.index, call.type) == (len(message["tool_calls"]) - 1, None)
                    assert call.function.name is None
                    message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return message | {"finish": finish}


def taken_apart(message: ChatCompletionMessage, finish: str) -> dict[str, Any]:
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}  # type: ignore[union-attr]
        for call in message.tool_calls or []
    ]
    reasoning = getattr(message, "reasoning_content", None)
    assert getattr(message, "reasoning", None) == reasoning
    return {"content": message.content, "reasoning_content": reasoning, "tool_calls": calls, "finish": finish}


async def both(
    serve: Serve, ingress: Callable[[], Writer], config: Any = None, **options: Any
) -> dict[str, Any]:
    """The message, which must be the same streamed and whole."""
    site = await serve(ingress(), **(config or {}))
    reply = await ask(site, **options)
    whole = taken_apart(reply.choices[0].message, reply.choices[0].finish_reason)
    streamed = put_together(await chunks_of(site, **options))
    for message in (whole, streamed):
        for call in message["tool_calls"]:
            assert call.pop("id").startswith("call_")
    assert streamed == whole
    site.ingress.check()
    return whole


@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_calls(serve: Serve, size: int) -> None:
    text = f"<think>\nLet me see.\n</think>\n\nOne moment.\n{CALL}\n{SECOND}"
    message = await both(serve, lambda: Writer(text, size=size))
    assert message == {
        "content": "One moment.",
        "reasoning_content": "Let me see.",
        "tool_calls": [
            {"name": "weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)},
            {"name": "time", "arguments": "{}"},
        ],
        "finish": "tool_calls",
    }


async def test_a_call_alone_has_no_content(serve: Serve) -> None:
    message = await both(serve, lambda: Writer("\n" + CALL))
    assert (message["content"], message["finish"]) == (None, "tool_calls")


async def test_one_call_at_a_time(serve: Serve) -> None:
    message = await both(serve, lambda: Writer(CALL + SECOND), parallel_tool_calls=False)
    assert [call["name"] for call in message["tool_calls"]] == ["weather"]


async def test_what_only_looks_like_a_call(serve: Serve) -> None:
    text = "Write <tool_call>\nlike this\n</tool_call>"
    message = await both(serve, lambda: Writer(text))
    assert (message["content"], message["tool_calls"], message["finish"]) == (text, [], "stop")


async def test_calls_are_counted(serve: Serve) -> None:
    site = await serve(Writer(CALL + SECOND))
    await ask(site, n=2)
    await chunks_of(site)
    site.ingress.text = "No call."  # type: ignore[attr-defined]
    await ask(site)
    await ask(site, tool_choice="none")
    assert (site.metrics.tool_outputs, site.metrics.tool_calls) == ({"tool_call": 3, "no_tool_call": 1}, 6)


async def test_call_cut_off(serve: Serve) -> None:
    site = await serve(Writer(CALL[:60]))
    site.ingress.finish = "length"  # type: ignore[attr-defined]
    message = put_together(await chunks_of(site))
    assert message["finish"] == "length"
    assert message["tool_calls"][0]["arguments"].startswith('{"city": "K')


async def test_ids_of_calls_are_unique(serve: Serve) -> None:
    site = await serve(Writer(CALL + SECOND))
    replies = [await ask(site, n=2) for _ in range(2)]
    ids = [
        call.id for reply in replies for choice in reply.choices for call in choice.message.tool_calls or []
    ]
    assert len(set(ids)) == len(ids) == 8


async def test_ids_as_the_family_has_them(serve: Serve) -> None:
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:3<|tool_call_argument_begin|>{}"
    site = await serve(Writer(kimi, source="<|tool_calls_section_begin|>"))
    assert (await ask(site)).choices[0].message.tool_calls[0].id == "functions.time:3"  # type: ignore[index]
    site = await serve(Writer('[TOOL_CALLS][{"name": "time", "arguments": {}}]', source="[TOOL_CALLS]"))
    made = (await ask(site)).choices[0].message.tool_calls[0].id  # type: ignore[index]
    assert len(made) == 9
    assert made.isalnum()


async def test_choices_stream_side_by_side(serve: Serve) -> None:
    site = await serve(Writer(CALL))
    chunks = await chunks_of(site, n=2)
    for index in range(2):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].choices[0].delta.role == "assistant"
        assert json.loads(put_together(own)["tool_calls"][0]["arguments"]) == ARGUMENTS


async def test_first_chunks_byte_by_byte(serve: Serve) -> None:
    site = await serve(Writer(SECOND, size=1000))
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True}
    payloads = [json.loads(p) for p in (await site.sse("/v1/chat/completions", body))[:-1]]
    role, begin, arguments, end = (payload["choices"][0] for payload in payloads)
    assert role["delta"] == {"role": "assistant", "content": ""}
    call = begin["delta"]["tool_calls"][0]
    assert call.keys() == {"index", "id", "type", "function"}
    assert call["function"] == {"name": "time", "arguments": ""}
    assert arguments["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


# reasoning

THOUGHT = "<think>\nHm, 42? 😀\n</think>\n\nYes."


@pytest.mark.parametrize("opens", [False, True])
async def test_reasoning(serve: Serve, opens: bool) -> None:
    text = THOUGHT.removeprefix("<think>\n") if opens else THOUGHT
    message = await both(serve, lambda: Writer(text, opens=opens), tools=openai.NOT_GIVEN)
    assert (message["reasoning_content"], message["content"]) == ("Hm, 42? 😀", "Yes.")
    assert message["finish"] == "stop"


async def test_unclosed_reasoning_has_no_content(serve: Serve) -> None:
    message = await both(serve, lambda: Writer("on and on", opens=True))
    assert (message["reasoning_content"], message["content"]) == ("on and on", None)


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_usage_counts_reasoning(serve: Serve, size: int) -> None:
    site = await serve(Writer(THOUGHT, size=size))
    expected = len(THOUGHT.removesuffix("\n\nYes.").encode())
    usage = (await ask(site)).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == expected
    chunks = await chunks_of(site, stream_options={"include_usage": True})
    assert chunks[-1].usage == usage


async def test_reasoning_left_in_the_content(serve: Serve) -> None:
    message = await both(serve, lambda: Writer(THOUGHT + SECOND), extra_body={"separate_reasoning": False})
    assert (message["reasoning_content"], message["content"]) == (None, THOUGHT)
    assert len(message["tool_calls"]) == 1


async def test_reasoning_left_out(serve: Serve) -> None:
    message = await both(serve, lambda: Writer(THOUGHT), extra_body={"include_reasoning": False})
    assert (message["reasoning_content"], message["content"]) == (None, "Yes.")


async def test_reasoning_in_one_piece(serve: Serve) -> None:
    site = await serve(Writer(THOUGHT))
    chunks = await chunks_of(site, extra_body={"stream_reasoning": False})
    pieces = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert list(filter(None, pieces)) == ["Hm, 42? 😀"]
    assert put_together(chunks)["content"] == "Yes."


async def test_continued_reasoning(serve: Serve) -> None:
    site = await serve(Writer("then 42\n</think>\n\nYes."))
    history = [*MESSAGES, {"role": "assistant", "content": "<think>\nfirst this, "}]
    reply = await site.client.chat.completions.create(
        model="fake", messages=history, extra_body={"continue_final_message": True}
    )
    assert reply.choices[0].message.reasoning_content == "then 42"  # type: ignore[attr-defined]


async def test_tokens_go_with_the_text(serve: Serve) -> None:
    """Nothing is lost and nothing comes twice, whatever the parser holds back."""
    site = await serve(Writer(THOUGHT + CALL, size=1))
    chunks = await chunks_of(site, extra_body={"return_token_ids": True})
    tokens = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert bytes(tokens).decode() == THOUGHT + CALL


# settings and refusals


async def test_parsers_can_be_named_and_switched_off(serve: Serve) -> None:
    text = "<think>hm</think>[TOOL_CALLS]time[ARGS]{}"
    settings = {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    site = await serve(Writer(text), **settings)
    message = (await ask(site)).choices[0].message
    assert message.content == "<think>hm</think>"
    assert message.tool_calls[0].function.name == "time"  # type: ignore[index,union-attr]


@pytest.mark.parametrize(("source", "settings"), [("no tools", {}), (QWEN, {"tool_call_parser": "none"})])
async def test_tools_whose_calls_could_not_be_read(serve: Serve, source: str, settings: Any) -> None:
    site = await serve(Writer("hi", source=source), **settings)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
        await ask(site)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
    assert (await ask(site, tool_choice="none")).choices[0].message.content == "hi"


async def test_tools_that_a_template_does_not_show_are_told_where_calls_are_read_as_told(
    serve: Serve,
) -> None:
    trusting: dict[str, Any] = {"trust_request_chat_template": True}
    silent = {"extra_body": {"chat_template": "{# silent of calls #}"}}
    site = await serve(Writer("hi", source=QWEN), **trusting)
    assert (await ask(site, **silent)).choices[0].message.content == "hi"
    site = await serve(Writer("hi", source="[TOOL_CALLS]{{ tools }}"), **trusting)
    assert (await ask(site)).choices[0].message.content == "hi"
    assert (await ask(site, tool_choice="none", **silent)).choices[0].message.content == "hi"
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="shows no tools") as caught:
            await ask(site, tool_choice=choice, **silent)
        assert caught.value.param == "tools"


async def test_where_there_is_no_template_the_tools_are_not_to_blame(serve: Serve) -> None:
    """What is opened then is refused for want of a template, and that says what to do."""
    site = await serve(Writer("hi"))
    site.ingress.template = None
    for choice in ("auto", "required"):
        fields = ChatRequest(messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        assert Reading(site.app[SERVER], fields).tools == TOOLS


async def test_calls_are_text_when_none_are_wanted(serve: Serve) -> None:
    message = await both(serve, lambda: Writer(CALL), tool_choice="none")
    assert (message["content"], message["tool_calls"], message["finish"]) == (CALL, [], "stop")


# calls that must be

NAMED: Any = {"type": "function", "function": {"name": "time"}}


async def constraint(serve: Serve, **options: Any) -> tuple[Any, Any]:
    """The grammar that the engine gets, and its structural tag."""
    ingress = Writer(CALL, source=options.pop("source", QWEN))
    ingress.facts.grammars = options.pop("grammars", True)  # type: ignore[union-attr]
    await ask(await serve(ingress), **options)
    grammar = ingress.jobs[-1].sampling.grammar
    return grammar, grammar and json.loads(grammar.text).get("format")


async def test_required_and_named_calls_are_constrained(serve: Serve) -> None:
    grammar, spec = await constraint(serve, tool_choice="required")
    assert (grammar.kind, grammar.after, grammar.opener) == ("structural_tag", ("</think>",), "<think>")
    (calls,) = spec["elements"]
    assert [tag["begin"] for tag in calls["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("weather", "time")
    ]
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, False)
    assert calls["tags"][0]["content"]["json_schema"] == TOOLS[0]["function"]["parameters"]
    _, spec = await constraint(serve, tool_choice=NAMED)
    assert len(spec["elements"][0]["tags"]) == 1
    assert spec["elements"][0]["stop_after_first"]
    _, spec = await constraint(serve, tool_choice="required", parallel_tool_calls=False)
    assert spec["elements"][0]["stop_after_first"]
    assert (await constraint(serve))[0] is None


async def test_calls_that_must_be_are_read_in_any_model(serve: Serve) -> None:
    """What no template tells is JSON; without tools in the template, between the tags that the model is told
    of."""
    text = '{"name": "time", "parameters": {"x": 1}}'
    message = await both(serve, lambda: Writer(text, source="no tools"), tool_choice=NAMED)
    assert message["tool_calls"] == [{"name": "time", "arguments": '{"x": 1}'}]
    thought = "<think>\nhm\n</think>\n\n"
    message = await both(serve, lambda: Writer(thought + SECOND, source="<think></think>"), tool_choice=NAMED)
    assert (message["reasoning_content"], len(message["tool_calls"]), message["content"]) == ("hm", 1, None)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_a_model_that_knows_no_tools_calls_them(serve: Serve, choice: Any) -> None:
    message = await both(
        serve,
        lambda: Writer(f"{CALL}\n{SECOND}", source="plain"),
        tool_choice=choice,
        parallel_tool_calls=True,
    )
    assert [call["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert message["content"] is None
    _, spec = await constraint(serve, source="plain", tool_choice=choice)
    assert spec["type"] == ("triggered_tags" if choice == "auto" else "sequence")


@pytest.mark.parametrize("length", range(1, len(CALL), 7))
async def test_a_call_that_is_cut_is_no_content(serve: Serve, length: int) -> None:
    writer = Writer(CALL[:length])
    writer.finish = "length"
    site = await serve(writer)
    for choice in ("required", "auto"):
        if choice == "auto" and length < len("<tool_call>"):  # may be text
            continue
        (whole,) = (await ask(site, tool_choice=choice)).choices
        streamed = put_together(await chunks_of(site, tool_choice=choice))
        assert (whole.finish_reason, whole.message.content or "", streamed["content"]) == ("length", "", None)


async def test_models_that_are_told_of_tools_call_one_unless_more_are_asked_for(serve: Serve) -> None:
    """As llama.cpp has it for templates without tools: such models call on until they are cut."""
    for wish, calls in ((None, 1), (True, 2), (False, 1)):
        asked = {} if wish is None else {"parallel_tool_calls": wish}
        message = await both(serve, lambda: Writer(CALL + SECOND, source="plain"), **asked)
        assert len(message["tool_calls"]) == calls
        for choice, at in (("required", lambda spec: spec["elements"][0]), ("auto", lambda spec: spec)):
            _, spec = await constraint(serve, source="plain", tool_choice=choice, **asked)
            assert at(spec)["stop_after_first"] == (calls == 1)


async def test_harmony_is_constrained_as_a_whole(serve: Serve) -> None:
    grammar, spec = await constraint(serve, tool_choice="required", source="<|channel|>")
    assert grammar.after == ()
    assert spec["elements"][0]["type"] == "or"


async def test_an_answer_in_a_format_or_a_call(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar, spec = await constraint(serve, response_format=form)
    assert (spec["type"], spec["elements"][1]) == ("or", {"type": "json_schema", "json_schema": schema})
    assert grammar.param == "response_format"
    grammar, _ = await constraint(serve, response_format=form, tool_choice="none")
    assert grammar.kind == "json_schema"
    _, spec = await constraint(serve, response_format=form, tool_choice="required")
    assert spec["type"] == "sequence"


async def test_strict_tools_constrain_calls_where_grammars_can(serve: Serve) -> None:
    function = {**TOOLS[0]["function"], "strict": True}
    tools = [{"type": "function", "function": function}, TOOLS[1]]
    _, spec = await constraint(serve, tools=tools)
    assert (spec["type"], spec["triggers"], len(spec["tags"])) == ("triggered_tags", ["<tool_call>"], 2)
    assert (await constraint(serve, tools=tools, grammars=False))[0] is None


MULTIPLIED = {
    "type": "object",
    "properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(50)},
    "$defs": {"d": {"const": "x" * 20_000}},
}
FUNCTION = {"name": "f", "parameters": MULTIPLIED}
ASKED = {"messages": MESSAGES, "max_tokens": 1, "tools": [{"type": "function", "function": FUNCTION}]}
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**ASKED, "tool_choice": "required"}),
        ("/v1/chat/completions", {**ASKED, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("/v1/chat/completions", {**ASKED, "tools": STRICT}),
        ("/v1/chat/completions", {**ASKED, "response_format": FORM}),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
        ),
        (
            "/v1/messages",
            {
                "messages": MESSAGES,
                "max_tokens": 1,
                "tools": [{"name": "f", "input_schema": MULTIPLIED}],
                "tool_choice": {"type": "any"},
            },
        ),
        ("/api/chat", {"model": "fake", **ASKED, "format": {"type": "object"}}),
    ],
)
async def test_schemas_of_tools_that_are_too_large_in_a_grammar(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    ingress = Writer("hi")
    ingress.facts.grammars = True  # type: ignore[union-attr]
    site = await serve(ingress, tool_call_parser="qwen3_coder")
    status, reply = await site.post(path, body)
    assert (status, "tools: the grammar of their calls" in json.dumps(reply)) == (400, True)
    assert ingress.jobs == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1]},
        {"properties": {"a": {}}, "required": 5},
        {"properties": {"a": {"type": "string", "format": []}}},
        {"properties": {"a": {"type": "string", "anyOf": 5}}},
    ],
)
async def test_schemas_of_tools_that_are_none(serve: Serve, parameters: Any) -> None:
    site = await serve(Writer("hi"), tool_call_parser="qwen3_coder")
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError, match="tools: the JSON Schema of 'f"):
        await ask(site, tools=tools, tool_choice="required")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "function", "function": {"name": "other"}}, "'other', which is not among the tools"),
        ({"type": "function"}, "must give each function's name"),
        ({"type": "allowed_tools"}, "allowed_tools needs a mode"),
        ("sometimes", "other than none, auto, required, a function or allowed_tools"),
    ],
)
async def test_wrong_choices(serve: Serve, choice: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await ask(await serve(Writer("hi")), tool_choice=choice)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({}, r"tools\[0\] must be"),
        ({"type": "function", "function": {}}, r"tools\[0\].function.name"),
        (
            {"type": "function", "function": {"name": "f", "parameters": []}},
            r"tools\[0\].function.parameters",
        ),
    ],
)
async def test_wrong_tools(serve: Serve, tool: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await ask(await serve(Writer("hi")), tools=[tool])


async def test_special_tokens_that_are_tags_stay_in_the_text(serve: Serve) -> None:
    class Tokenizer(FakeTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return b"<tool_call>" if token == BOS else super().token_bytes(token)

    async def skips(tokenizer: FakeTokenizer, **options: Any) -> bool:
        ingress = Writer("hi")
        ingress.tokenizer = tokenizer
        await ask(await serve(ingress), **options)
        return ingress.jobs[-1].sampling.skip_special_tokens

    assert await skips(FakeTokenizer())
    assert not await skips(Tokenizer())
    assert await skips(Tokenizer(), tool_choice="none", extra_body={"separate_reasoning": False})


# the parsers by themselves


async def test_parse_function_call(serve: Serve) -> None:
    site = await serve(Writer("hi"))
    body = {"text": "So: " + CALL, "tools": TOOLS, "tool_call_parser": "qwen25"}
    expected = {
        "normal_text": "So:",
        "calls": [
            {"tool_index": 0, "name": "weather", "parameters": json.dumps(ARGUMENTS, ensure_ascii=False)}
        ],
    }
    assert await site.post("/parse_function_call", body) == (200, expected)
    del body["tool_call_parser"]
    assert await site.post("/parse_function_call", body) == (200, expected)
    status, reply = await site.post("/parse_function_call", body | {"tool_call_parser": "x"})
    assert (status, reply["error"]["param"]) == (400, "tool_call_parser")


async def test_separate_reasoning(serve: Serve) -> None:
    site = await serve(Writer("hi"))
    for text in ("<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"):
        body = {"text": text, "reasoning_parser": "deepseek-r1"}
        assert await site.post("/separate_reasoning", body) == (200, {"reasoning_text": "hm", "text": "yes"})
    assert (await site.post("/separate_reasoning", {"text": "yes"}))[1] == {
        "reasoning_text": "",
        "text": "yes",
    }
    assert (await site.post("/separate_reasoning", {"text": "a", "reasoning_parser": "none"}))[0] == 400

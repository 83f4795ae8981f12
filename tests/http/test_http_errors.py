"""Everything a client can get wrong: status, body, headers. Never a 5xx, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import aiohttp.web
import openai
import pytest
from examples import examples
from http_fake import FakeIngress
from http_site import Serve, Site
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgla.errors import Overloaded
from sgla.http.request.schema import UNSUPPORTED, CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}


def check_error(body: Any) -> dict[str, Any]:
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {}, "messages", "messages is required"),
        (CHAT, {"messages": []}, "messages", "at least one"),
        (CHAT, {"messages": "hi"}, "messages", "messages: expected array, got str"),
        (CHAT, {"messages": [5]}, "messages", "messages[0]: expected object"),
        (
            CHAT,
            {"messages": [{"role": "king", "content": ""}]},
            "messages",
            "messages[0].role must be one of",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "messages[0].content is required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content must be"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages",
            "content[0].text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "",
        ),
        (CHAT, HI | {"temperature": "hot"}, "temperature", "temperature: expected float, got str"),
        (CHAT, HI | {"response_format": {}}, "response_format", "got null"),
        (CHAT, HI | {"moderation": {"model": "m"}}, "moderation", "/v1/moderations"),
        (CHAT, HI | {"temperature": -0.1}, "temperature", "temperature must be at least 0, got -0.1"),
        (CHAT, HI | {"top_p": 0}, "top_p", "top_p must be greater than 0 and at most 1, got 0"),
        (CHAT, HI | {"top_p": 1.01}, "top_p", "at most 1"),
        (CHAT, HI | {"min_p": 2}, "min_p", "between 0 and 1"),
        (CHAT, HI | {"presence_penalty": -2.5}, "presence_penalty", "between -2 and 2"),
        (CHAT, HI | {"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 2"),
        (CHAT, HI | {"repetition_penalty": 1e-45}, "repetition_penalty", "between 0.01 and 2"),
        (CHAT, HI | {"top_k": -2}, "top_k", "top_k must be between -1 and"),
        (CHAT, HI | {"n": 0}, "n", "between 1 and 128"),
        (CHAT, HI | {"n": 129}, "n", "between 1 and 128"),
        (CHAT, HI | {"n": True}, "n", "expected int, got bool"),
        (CHAT, HI | {"seed": 2**63}, "seed", "seed must be"),
        (CHAT, HI | {"max_tokens": 0}, "max_tokens", "max_tokens must be between 1 and"),
        (CHAT, HI | {"max_tokens": -5}, "max_tokens", "max_tokens must be between 1 and"),
        (TEXT, PROMPT | {"max_tokens": -5}, "max_tokens", "max_tokens must be between 0 and"),
        (TEXT, PROMPT | {"max_tokens": 0}, "max_tokens", "it needs echo: true"),
        (
            CHAT,
            HI | {"early_stopping": "x"},
            "early_stopping",
            "early_stopping must be true, false or never, got 'x'",
        ),
        (
            CHAT,
            HI | {"thinking": {"type": "on"}},
            "thinking",
            "thinking.type must be adaptive, disabled or enabled, got 'on'",
        ),
        (
            "/v1/responses",
            {"input": "x", "reasoning": {"effort": "enormous"}},
            "reasoning",
            "reasoning.effort must be one of none",
        ),
        ("/v1/responses", {"input": [{"type": "x"}]}, "input", "input[0] is not supported"),
        (
            CHAT,
            HI | {"max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be between 1 and",
        ),
        (CHAT, HI | {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHAT, HI | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        (CHAT, HI | {"logprobs": 3}, "logprobs", "expected bool"),
        (CHAT, HI | {"stop": ["x"] * 65}, "stop", "at most 64 strings, got 65"),
        (CHAT, HI | {"stop": ["x"] * 5000}, "stop", "at most 64"),
        (CHAT, HI | {"stop": "x" * 2000}, "stop", "1024"),
        (CHAT, HI | {"stop": [1]}, "stop", "stop[0]: expected str"),
        (CHAT, HI | {"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
        (CHAT, HI | {"logit_bias": {"a": 1}}, "logit_bias", "keys must be token ids"),
        (CHAT, HI | {"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
        (CHAT, HI | {"stream_options": {}}, "stream_options", "stream: true"),
        (CHAT, HI | {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, HI | {"tools": [{"type": "web_search"}]}, "tools", "no tool of type 'web_search'"),
        (CHAT, HI | {"reasoning_effort": "enormous"}, "reasoning_effort", "must be one of"),
        (CHAT, HI | {"continue_final_message": True}, "continue_final_message", "assistant"),
        (CHAT, HI | {"add_special_tokens": True}, "add_special_tokens", "not supported"),
        (
            CHAT,
            HI | {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "may not set messages",
        ),
        (CHAT, HI | {"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ("/tokenize", HI | {"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        (CHAT, HI | {"chat_template_kwargs": {"self": 1, "tools": 2}}, "chat_template_kwargs", "self, tools"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages",
            "tool_calls[0].function.name",
        ),
        (CHAT, HI | {"timeout": 0}, "timeout", "greater than 0"),
        (CHAT, HI | {"modalities": ["text", "audio"]}, "modalities", "not supported"),
        (CHAT, HI | {"response_format": {"type": "xml"}}, "response_format", "got 'xml'"),
        (CHAT, HI | {"response_format": {"type": "json_schema"}}, "response_format", "a JSON Schema"),
        (
            CHAT,
            HI | {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "json and regex",
        ),
        (CHAT, HI | {"structured_outputs": {"xml": 1}}, "structured_outputs", "with 'xml'"),
        (CHAT, HI | {"regex": "a", "guided_choice": ["b"]}, "regex", "exclude each other"),
        (TEXT, {}, "prompt", "prompt is required"),
        (TEXT, {"prompt": None}, "prompt", "prompt: expected"),
        (TEXT, {"prompt": []}, "prompt", "empty"),
        (TEXT, {"prompt": [[]]}, "prompt", "empty"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "a list of strings"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt", "a list of strings"),
        (TEXT, {"prompt": [1.5]}, "prompt", "prompt[0]"),
        (TEXT, {"prompt": [-1]}, "prompt", "at least 0"),
        (TEXT, {"prompt": [2**40]}, "prompt", "vocabulary"),
        (TEXT, {"prompt": ["x"] * 4097}, "prompt", "4096 is the limit"),
        (TEXT, PROMPT | {"logprobs": 21}, "logprobs", "between 0 and 20"),
        (TEXT, PROMPT | {"lora_path": "x"}, "lora_path", "this server has no adapters"),
        (
            "/v1/responses",
            {"input": "x", "return_hidden_states": True},
            "return_hidden_states",
            "--task embed",
        ),
        ("/tokenize", {}, "prompt", "either prompt or messages"),
        ("/detokenize", {"tokens": [512]}, "tokens", "between 0 and 511"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens", "list of id lists"),
    ],
)
async def test_field_errors(site: Site, path: str, body: dict[str, Any], param: str, words: str) -> None:
    status, reply = await site.post(path, body)
    error = check_error(reply)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]
    assert not site.ingress.jobs


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "expected object, got array"),
        (b'"x"', "expected object"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature: number out of range"),
        (b'{"prompt": "x", "seed": %b}' % (b"9" * 5000), "seed: integer value out of range"),
        (b'{"prompt": "\xff\xfe"}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"a\xff": 1, "prompt": "x"}', "not valid UTF-8"),
        (b'{"prompt": "x", "guided_json": 1e999}', "out of range"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
        (b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b', "prompt": "x"}', "nested more than 128 deep"),
    ],
)
async def test_bad_bodies(site: Site, body: bytes, words: str) -> None:
    status, reply = await site.post(TEXT, body)
    assert status == 400
    assert words in check_error(reply)["message"]
    assert (await site.post(TEXT, PROMPT))[0] == 200


# What texts have is unsupported elsewhere.
@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - set(CompletionRequest.__struct_fields__)))
async def test_unsupported_fields_are_named(site: Site, name: str) -> None:
    for value in UNSUPPORTED[name]:
        assert (await site.post(TEXT, PROMPT | {name: value}))[0] == 200
    status, reply = await site.post(TEXT, PROMPT | {name: {"asks": "something"}})
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (400, "unsupported_parameter", name)


async def test_unknown_fields_are_told(site: Site) -> None:
    names = {"foo": 1, "b.a-r_2": None, "bad\r\nname": 2, "user": "me", "store": True, "access_programs": {}}
    async with site.http.post(TEXT, json=PROMPT | names) as response:
        assert response.status == 200
        assert response.headers["x-ignored-fields"] == "foo, b.a-r_2"
    async with site.http.post("/generate", json={"text": "a", "sampling_params": {"inner": 1}}) as response:
        assert response.headers["x-ignored-fields"] == "inner"
    async with site.http.post(TEXT, json=PROMPT) as response:
        assert "x-ignored-fields" not in response.headers


async def test_too_large(serve: Serve) -> None:
    """Refused by Content-Length at once; without one, as soon as the limit is passed, though the body goes on
    for ever."""
    site = await serve(max_body_bytes=100_000)
    assert (await site.post(TEXT, b" " * 99_990 + b"{}"))[0] == 400

    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{")
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()

    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(110):
        writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b" 413 " in head.splitlines()[0]
    assert b"x-should-retry: false" in head
    writer.close()


async def test_broken_transfer(site: Site) -> None:
    async with site.http.post(TEXT, data=b"not gzip", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
        check_error(await response.json())
    assert (await site.post(TEXT, PROMPT))[0] == 200


async def test_models_by_name(site: Site) -> None:
    for name in ("", None, "fake", "fake-alias"):
        status, reply = await site.post(TEXT, PROMPT | {"model": name})
        assert (status, reply["model"]) == (200, name or "fake")
    with pytest.raises(openai.NotFoundError) as caught:
        await site.client.completions.create(model="gpt-4", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_what_is_made_elsewhere_is_refused_by_name(site: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/images/generations makes pictures") as caught:
        await site.client.images.generate(prompt="a cat", model="fake")
    assert caught.value.code == "unsupported_task"
    for path in ("/v1/audio/speech", "/v1/videos", "/v1/images/edits"):
        status, reply = await site.post(path, {})
        assert (status, check_error(reply)["code"]) == (400, "unsupported_task")


async def test_routes_and_methods(site: Site) -> None:
    status, reply = await site.get("/v1/nothing")
    assert (status, check_error(reply)["code"]) == (404, "not_found")
    async with site.http.get(TEXT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert check_error(await response.json())["code"] == "method_not_allowed"
    for path in ("/v1/models/", "//v1//models", "/v1/models//"):
        async with site.http.get(site.url + path) as response:
            assert response.status == 200
    assert (await site.post(site.url + "//v1//completions/", PROMPT))[0] == 200
    async with site.http.head("/v1/models") as response:
        assert response.status == 200
        assert await response.read() == b""


async def test_the_framework_does_not_look_for_routes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its way takes 12 ms for a path of 8,000 slashes, of anybody."""

    async def resolve(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(aiohttp.web.UrlDispatcher, "resolve", resolve)
    for path, expected in (("/health", 200), ("//health//", 200), ("/" * 8000 + "nowhere", 404)):
        async with site.http.get(site.url + path) as response:
            assert response.status == expected


async def test_cors(site: Site) -> None:
    asked = {"Origin": "http://a", "Access-Control-Request-Headers": "authorization,x-foo"}
    async with site.http.options(CHAT, headers=asked) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-foo"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    async with site.http.post(CHAT, json=HI | {"stream": True}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_request_ids(site: Site) -> None:
    async with site.http.post(TEXT, json=PROMPT, headers={"X-Request-Id": "abc-1"}) as response:
        assert response.headers["x-request-id"] == "abc-1"
    for bad in ("a b", "\u00e9", "x" * 300):
        async with site.http.get("/version", headers={"X-Request-Id": bad}) as response:
            assert response.headers["x-request-id"].isalnum()
    async with site.http.get("/nothing") as response:
        assert response.headers["x-request-id"]
    same = [site.post(TEXT, PROMPT | {"rid": "twice"}) for _ in range(2)]
    assert [status for status, _ in await asyncio.gather(*same)] == [200, 200]


async def test_authorization(serve: Serve) -> None:
    site = await serve(key="secret", api_key=["secret"])
    assert (await site.client.models.list()).data[0].id == "fake"
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer s\u00e9"},
        {"Authorization": "secret"},
    ):
        status, reply = await site.post(TEXT, PROMPT, headers=header)
        assert (status, check_error(reply)["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/health/live", "/health/ready", "/metrics"):
        async with site.http.get(path) as response:
            assert response.status == 200
    with pytest.raises(openai.AuthenticationError):
        await site.client.with_options(api_key="no").models.list()


async def test_not_ready(serve: Serve) -> None:
    """The application listens before there is a model."""
    ingress = FakeIngress()
    ingress.phase, ingress.tokenizer, ingress.template, ingress.facts = "load", None, None, None
    ingress.stats = lambda: None  # type: ignore[method-assign]
    site = await serve(ingress)
    for path in (CHAT, TEXT, "/generate", "/tokenize", "/detokenize", "/flush_cache"):
        async with site.http.post(path, json={}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "2"
            assert "x-should-retry" not in response.headers
            error = check_error(await response.json())
            assert error["code"] == "model_loading"
            assert "load" in error["message"]
    assert (await site.get("/v1/models"))[0] == 503
    assert (await site.get("/health/live"))[0] == 200
    assert (await site.get("/health/ready")) == (503, (await site.get("/health"))[1])
    assert (await site.get("/health"))[1]["phase"] == "load"
    async with site.http.get("/metrics") as response:
        assert response.status == 200
    assert (await site.get("/get_server_info"))[0] == 200
    ingress.phase = "dead"
    assert (await site.get("/health/live"))[0] == 503


async def test_overload(serve: Serve) -> None:
    class Full(FakeIngress):
        def open_all(self, jobs: Any, extra: bool = False) -> None:
            raise Overloaded("full", retry_after=2.5)

    ingress = Full(manual=True)
    site = await serve(ingress)
    async with site.http.post(TEXT, json={"prompt": ["a", "b"]}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "3"
        assert check_error(await response.json())["type"] == "rate_limit_error"
    ingress.check()


async def test_a_bug_is_a_500_with_the_right_body(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    ingress = FakeIngress()
    ingress.tokenizer.encode = None
    site = await serve(ingress)
    status, reply = await site.post("/tokenize", {"prompt": "secret text"})
    assert (status, check_error(reply)["type"]) == (500, "server_error")
    assert "secret text" not in caplog.text


short = st.text(max_size=8)
switch = st.booleans() | st.none()
ids = st.lists(st.integers(0, 511), min_size=1, max_size=4)
part = st.fixed_dictionaries({"type": st.just("text"), "text": short})
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
message = st.fixed_dictionaries(
    {"role": roles, "content": short | st.lists(part, max_size=2)}, optional={"name": short}
)
SAMPLING = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2) | st.none(),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 50),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": short | st.lists(short, max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=2),
    "stop_token_ids": ids,
    "min_tokens": st.integers(0, 4),
    "ignore_eos": switch,
}
COMMON = {
    "stream": switch,
    "timeout": st.floats(1, 9),
    "cache_salt": short,
    "model": st.sampled_from([None, "", "fake"]),
}
OPENAI = SAMPLING | COMMON | {"max_tokens": st.integers(0, 6), "return_token_ids": switch, "rid": short}
PLAUSIBLE = {
    CHAT: st.fixed_dictionaries(
        {"messages": st.lists(message, min_size=1, max_size=3)},
        optional=OPENAI
        | {"logprobs": switch, "chat_template_kwargs": st.dictionaries(short, short, max_size=2)},
    ),
    TEXT: st.fixed_dictionaries(
        {
            "prompt": short
            | ids
            | st.lists(short, min_size=1, max_size=3)
            | st.lists(ids, min_size=1, max_size=3)
        },
        optional=OPENAI | {"echo": switch, "logprobs": st.integers(0, 3)},
    ),
    "/generate": st.fixed_dictionaries(
        {"sampling_params": st.fixed_dictionaries({"max_new_tokens": st.integers(0, 5)}, optional=SAMPLING)},
        optional=COMMON
        | {
            "text": short | st.lists(short, min_size=1, max_size=2),
            "input_ids": ids,
            "return_logprob": switch,
        }
        | {"logprob_start_len": st.integers(-1, 4), "top_logprobs_num": st.integers(0, 2), "rid": short},
    ),
    "/tokenize": st.fixed_dictionaries(
        {}, optional={"prompt": short, "messages": st.lists(message), "return_token_strs": switch}
    ),
    "/detokenize": st.fixed_dictionaries({"tokens": ids | st.lists(ids, max_size=2)}),
    "/abort_request": st.fixed_dictionaries({}, optional={"rid": short, "abort_all": switch}),
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | short,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short, inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(
    {
        *OPENAI,
        "messages",
        "prompt",
        "text",
        "input_ids",
        "sampling_params",
        "tokens",
        "tools",
        "best_of",
        "echo",
    }
)
wrong = st.dictionaries(st.sampled_from(FIELDS), anything, max_size=1)
requests = st.sampled_from(sorted(PLAUSIBLE)).flatmap(
    lambda path: st.tuples(st.just(path), PLAUSIBLE[path], wrong).map(
        lambda found: (found[0], found[1] | found[2])
    )
)


@pytest.fixture(scope="module")
def shared_loop() -> Any:
    with asyncio.Runner() as runner:
        yield runner


def test_fuzz(shared_loop: asyncio.Runner) -> None:
    """No body gives a 5xx or leaves a request open."""

    async def start() -> Any:
        from aiohttp import web

        from sgla.config import Config
        from sgla.http.app import make_app
        from sgla.http.connections import Runner
        from sgla.observe.metrics import Metrics

        ingress = FakeIngress()
        runner = Runner(make_app(ingress, Config(), Metrics("m")))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return ingress, runner, aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}")

    ingress, runner, session = shared_loop.run(start())

    async def send(path: str, data: bytes) -> None:
        async with session.post(path, data=data) as response:
            body = await response.read()
        assert response.status < 500
        if response.status != 200:
            check_error(json.loads(body))
        ingress.check()

    @settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
    @given(requests)
    def objects(found: tuple[str, Any]) -> None:
        shared_loop.run(send(found[0], json.dumps(found[1]).encode()))

    @settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        path=st.sampled_from([CHAT, TEXT, "/generate"]), cut=st.integers(0, 60), junk=st.binary(max_size=6)
    )
    def garbage(path: str, cut: int, junk: bytes) -> None:
        whole = json.dumps(HI | PROMPT | {"stop": ["a"]}).encode()
        shared_loop.run(send(path, whole[:cut] + junk + whole[cut:]))

    try:
        objects()
        garbage()
    finally:
        shared_loop.run(session.close())
        shared_loop.run(runner.cleanup())

"""/openapi.json: every route is described, and the server does what the description says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import aiohttp
import jsonschema_rs
import msgspec
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.http.app import ROUTES
from sgla.http.middleware import SECRET
from sgla.http.openapi import document
from sgla.http.operation import OPERATIONS
from sgla.http.request.schema import RANGES, range_of


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return document(ROUTES)


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


STREAMS = ("text/event-stream", "application/x-ndjson")


def fits(described: dict[str, Any], shape: dict[str, Any], answer: Any) -> None:
    jsonschema_rs.validator_for({**shape, "components": described["components"]}).validate(answer)


def test_every_route_is_described(described: dict[str, Any]) -> None:
    handlers = {handler for methods in ROUTES.values() for handler in methods.values()}
    assert handlers == OPERATIONS.keys()
    assert described["paths"].keys() == ROUTES.keys()
    assert len({operation["operationId"] for _, _, operation in operations(described)}) == sum(
        map(len, ROUTES.values())
    )


def test_references_resolve_and_schemas_are_valid(described: dict[str, Any]) -> None:
    shapes = described["components"]["schemas"]

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in shapes
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(described)
    for shape in shapes.values():
        jsonschema_rs.meta.validate({**shape, "$schema": "https://json-schema.org/draft/2020-12/schema"})


async def test_bodies_are_read_where_they_are_described(site: Site, described: dict[str, Any]) -> None:
    """A body that no struct can be made of is refused by exactly the routes that are described to have
    one."""
    for path, method, operation in operations(described):
        if method not in ("post", "put") or path[1:] in SECRET:
            continue
        url = path.replace("{id}", "x")
        async with site.http.request(method, url, data=b"[]") as response:
            assert (response.status == 400) == ("requestBody" in operation), path
        if "requestBody" in operation:
            async with site.http.request(method, url, data=b"") as response:
                assert (response.status == 400) == operation["requestBody"]["required"], path


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "ChatRequest": CHAT,
    "CompletionRequest": {"prompt": "x"},
    "InvocationRequest": CHAT,
    "ResponsesRequest": {"input": "x"},
    "MessagesRequest": CHAT,
    "CountTokensRequest": CHAT,
    "GenerateRequest": {"text": ["x", "y"]},
    "OllamaChatRequest": {**CHAT, "model": "fake"},
    "OllamaGenerateRequest": {"prompt": "x", "model": "fake"},
    "OllamaShowRequest": {"model": "fake"},
    "OpenSessionRequest": {"capacity_of_str_len": 9},
    "TokenizeRequest": {"messages": CHAT["messages"]},
    "DetokenizeRequest": {"tokens": [[97], [98]]},
    "ParseCallRequest": {"text": "x", "tool_call_parser": "hermes", "tools": []},
    "SeparateRequest": {"text": "x", "reasoning_parser": "qwen3"},
    "AbortRequest": {"rid": "x"},
    "PauseRequest": {},
}


def body_name(operation: dict[str, Any]) -> str:
    """Of the struct that an operation's body is described by; "" without one."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return str(content["schema"]["$ref"]).rpartition("/")[2] if content else ""


async def test_streams_are_where_they_are_described(site: Site, described: dict[str, Any]) -> None:
    streaming = 0
    for path, method, operation in operations(described):
        others = [media for media in operation["responses"]["200"]["content"] if media in STREAMS]
        if not others or not body_name(operation):
            continue
        for stream, media in ((True, others[0]), (False, "application/json")):
            body = {**BODIES[body_name(operation)], "stream": stream}
            async with site.http.request(method, path, json=body) as response:
                assert (response.status, response.content_type) == (200, media), path
        streaming += 1
    assert streaming >= 7


async def test_answers_are_as_described(site: Site, described: dict[str, Any]) -> None:
    """Those of a model that generates; the routes for vectors have theirs checked in test_vectors."""
    checked = set()
    for path, method, operation in operations(described):
        name = body_name(operation)
        content = operation["responses"]["200"]["content"]
        if "{id}" in path or "application/json" not in content or (method != "get" and name not in BODIES):
            continue
        body = {"json": {**BODIES[name], "stream": False}} if name else {}
        async with site.http.request(method, path, **body) as response:
            assert response.status == 200, (path, await response.text())
            fits(described, content["application/json"]["schema"], await response.json())
        checked.add(path)
    assert len(checked) > 35


async def test_files_and_batches_are_as_described(site: Site, described: dict[str, Any]) -> None:
    def check(path: str, method: str, answer: Any) -> None:
        content = described["paths"][path][method]["responses"]["200"]["content"]
        fits(described, content["application/json"]["schema"], answer)

    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"no request", filename="in.jsonl")
    async with site.http.post("/v1/files", data=form) as response:
        file = await response.json()
    check("/v1/files", "post", file)
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await site.post("/v1/batches", asked))[1]
    check("/v1/batches", "post", batch)
    while batch["status"] != "failed":
        batch = (await site.get(f"/v1/batches/{batch['id']}"))[1]
    check("/v1/batches/{id}", "get", batch)
    assert "errors" in batch
    for path in ("/v1/files", "/v1/batches"):
        check(path, "get", (await site.get(path))[1])
    async with site.http.delete(f"/v1/files/{file['id']}") as response:
        check("/v1/files/{id}", "delete", await response.json())


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "n"])
async def test_ranges_are_those_that_are_checked(site: Site, described: dict[str, Any], name: str) -> None:
    shape = described["components"]["schemas"]["CompletionRequest"]["properties"][name]
    valid = jsonschema_rs.validator_for(shape).is_valid
    allowed = RANGES[name]
    for value in (allowed.low, allowed.low - 1, allowed.high, (allowed.high or 10) + 1):
        if value is None:
            continue
        number = int(value) if name in ("seed", "n") else value
        status, _ = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 1, name: number})
        assert (status == 200) == valid(number), number


# Numbers that are checked where they are used, or clipped, or without effect.
WITHOUT_RANGE = {
    *("budget_tokens", "keep_alive", "label_token_ids", "logprobs", "lora_int_id", "master_port", "offset"),
    *("max_pattern_size", "min_count", "min_pattern_size", "output_dimension", "rank_offset", "seconds"),
    *("num_batch", "num_ctx", "num_gpu", "num_keep", "num_predict", "num_thread", "repeat_last_n"),
    *("truncate_size", "world_size"),
}


def structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """What a value of this type is made of."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from structs(inner)
    for inner in get_args(hint):
        yield from structs(inner)


def test_every_number_of_a_body_has_a_range() -> None:
    kinds = {kind for operation in OPERATIONS.values() for kind in structs(operation.body)}
    for kind in kinds:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if {hint, *get_args(hint)} & {int, float} and name not in WITHOUT_RANGE:
                assert range_of(kind.__name__, name), f"{kind.__name__}.{name}"


async def test_health_answers_503_as_described(serve: Serve, described: dict[str, Any]) -> None:
    ingress = FakeIngress()
    ingress.phase = "load"
    site = await serve(ingress)
    for path, _, operation in operations(described):
        if "503" in operation["responses"] and path not in ("/", "/health/live"):
            assert (await site.get(path))[0] == 503


async def test_the_description_is_served(site: Site, described: dict[str, Any]) -> None:
    status, reply = await site.get("/openapi.json")
    assert status == 200
    assert reply["paths"].keys() == described["paths"].keys()
    model = reply["components"]["schemas"]["ChatRequest"]["properties"]["model"]
    assert {"type": "string", "enum": ["fake", "fake-alias", ""]} in model["anyOf"]


async def test_the_description_is_made_once_and_beside_the_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def made(table: Any, names: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"openapi": "3.1.0"}

    monkeypatch.setattr("sgla.http.openapi.document", made)
    site = await serve()
    answers = await asyncio.gather(*(site.get("/openapi.json") for _ in range(3)))
    assert {status for status, _ in answers} == {200}
    (thread,) = threads
    assert thread is not threading.main_thread()


async def test_messages_and_tools_are_refused_as_described(site: Site, described: dict[str, Any]) -> None:
    shape = described["components"]["schemas"]["ChatRequest"]["properties"]
    valid = {name: jsonschema_rs.validator_for(shape[name]).is_valid for name in ("messages", "tools")}
    message = CHAT["messages"][0]
    for wrong in ({}, {"role": "nobody"}, {**message, "content": 3}, {**message, "content": [{"text": "x"}]}):
        assert not valid["messages"]([wrong])
        assert (await site.post("/v1/chat/completions", {"messages": [wrong]}))[0] == 400
    for tool in ({}, {"type": "x"}, {"function": {"name": ""}}, {"function": {"name": "f", "parameters": 3}}):
        assert not valid["tools"]([tool])
        assert (await site.post("/v1/chat/completions", {**CHAT, "tools": [tool]}))[0] == 400
    assert valid["messages"]([{**message, "content": [{"type": "text", "text": "x"}]}])

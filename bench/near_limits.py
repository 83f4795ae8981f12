"""Attacks just below the limits of ``docs/operating.md``: what is not refused is what costs.

``ATTACKS`` is by the server that they are for: ``--executor fake`` where a model on a CPU would take minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from hostile import (
    CHAT,
    KEY,
    OTHER,
    RESPONSES,
    TEXT,
    Attack,
    Outcome,
    Target,
    exchange,
    head,
    listed,
    one,
    request,
    send,
    write,
)
from process import tree

NATIVE = "/generate"
SHORT = 6.0  # seconds that a client waits whose answer would take the model too long

Body = Callable[[Target], Any]


def words(count: int) -> str:
    """About ``count`` characters of text."""
    return "words of some text, " * (count // 20)


# JSON


def ids(value: bytes, more: bytes = b"") -> Body:
    return lambda target: b'{"prompt":' + listed(target.many(524_000), value) + more + b"}"


def kwargs(count: int, item: bytes) -> Body:
    """Anything that the template is given."""

    def body(target: Target) -> bytes:
        return (
            b'{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":'
            + listed(target.many(count), item)
            + b"}}"
        )

    return body


def messages(count: int, message: bytes) -> Body:
    return lambda target: b'{"max_tokens":1,"messages":' + listed(target.many(count), message) + b"}"


PART = b'{"type":"text","text":"a"}'
PARTS = b'{"role":"user","content":' + listed(2, PART) + b"}"
EMPTY_CALL = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}'


def items(target: Target) -> bytes:
    part = b'{"type":"input_text","text":"a"}'
    return (
        b'{"max_output_tokens":1,"input":'
        + listed(target.many(8192), b'{"role":"user","content":' + listed(1, part) + b"}")
        + b"}"
    )


def long_name(target: Target) -> dict[str, Any]:
    """Of a model, with as many places where that of an adapter might begin."""
    return {"model": ":" * target.many(15 << 20), "prompt": "a", "max_tokens": 1}


def unknown_fields(target: Target) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1} | {f"field_{i}": i for i in range(target.many(250))}


def million_fields(target: Target) -> bytes:
    return b"{" + b",".join([b'"0":0'] * target.many(1_700_000)) + b"}"


def unknown_sampling(target: Target) -> dict[str, Any]:
    fields = {f"field_{i}": i for i in range(250)}
    count = target.many(256)
    return {"text": ["a"] * count, "sampling_params": [{"max_new_tokens": 1} | fields] * count}


def backslashes(target: Target) -> bytes:
    return b'{"max_tokens":1,"prompt":"' + rb"\u00e9" * target.many(2_097_000) + b'"}'


def tiny_chunks(target: Target) -> list[bytes]:
    """A body in chunks of one byte."""
    body = b'{"prompt":"' + b"a" * target.many(1_000_000) + b'","max_tokens":1}'
    start = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % each for each in body)
    return [f"{start}Transfer-Encoding: chunked\r\n\r\n".encode(), chunks, b"0\r\n\r\n"]


async def chunked(target: Target) -> Outcome:
    status, _ = await exchange(target, tiny_chunks(target))
    return Outcome(Counter({status: 1}))


async def content_type(target: Target) -> Outcome:
    """That of a form, with parameters without end."""
    value = "multipart/form-data; boundary=b" + '; a="\\\\"' * target.many(800)
    start = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    return await send(target, f"{start}Content-Type: {value}\r\nContent-Length: 1\r\n\r\nx".encode())


async def fragments(target: Target) -> Outcome:
    """A message of a /v1/realtime session in two million parts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    await write(writer, [head("/v1/realtime", 0, KEY, "GET", upgrade)])
    status = int((await reader.readline()).split()[1])
    first, next_ = b"\x01\x80\0\0\0\0", b"\x00\x80\0\0\0\0"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHORT):
            await write(writer, [first, *[next_ * 10_000] * target.many(200)])
    writer.close()
    return Outcome(Counter({status: 1}))


def repetitive(target: Target) -> dict[str, Any]:
    """Outputs of one token, in which patterns are looked for that do not come so often."""
    patterns = {"max_pattern_size": 512, "min_count": 100_000}
    more = {"logit_bias": {"7": 100}, "ignore_eos": True, "repetition_detection": patterns}
    return {"prompt": "a", "n": target.many(128), "max_tokens": target.many(2000), **more}


async def headers(target: Target) -> Outcome:
    """Requests whose headers together come near 64 KB, in many lines and in few, one behind the other on a
    connection."""
    many = "".join(f"x-{i}: a\r\n" for i in range(target.many(6000)))
    few = "".join(f"x-{i}: {'a' * 8000}\r\n" for i in range(target.many(7)))
    answers = [send(target, head("/version", 0, KEY, "GET", more)) for more in (many, few) for _ in range(20)]
    outcome = Outcome()
    for found in await asyncio.gather(*answers):
        outcome.statuses += found.statuses
    return outcome


async def slashes(target: Target) -> Outcome:
    """Paths of nothing else, many at once and without a key."""
    return await send(target, *[head("/" * 8000 + "nowhere", 0, "wrong", "GET")] * target.many(100))


async def refused(target: Target) -> Outcome:
    """Many at once without a key."""
    return await send(target, *[head("/v1/models", 0, "wrong", "GET")] * target.many(1500))


# Prompts and choices


def new_grammar(target: Target) -> dict[str, Any]:
    grammar = f"a{{1,9}}|{time.monotonic_ns()}"
    return {"prompt": ["a"] * target.many(4096), "max_tokens": 1, "regex": grammar}


def prompts(target: Target) -> dict[str, Any]:
    return {"prompt": [f"{i} {words(40)}" for i in range(target.many(4096))], "max_tokens": 1}


def native_prompts(target: Target) -> dict[str, Any]:
    count = target.many(4096)
    return {
        "text": [f"{i} text" for i in range(count)],
        "rid": [f"{i} ".ljust(1024, "r") for i in range(count)],
        "sampling_params": [{"max_new_tokens": 1, "stop": ["a", "b"]}] * count,
        "return_logprob": [True] * count,
        "top_logprobs_num": [2] * count,
    }


def native_biases(target: Target) -> dict[str, Any]:
    bias = {str(i): 1 for i in range(4096)}
    return {"text": ["a"] * 15, "sampling_params": [{"max_new_tokens": 1, "logit_bias": bias}] * 15}


def biased(count: int) -> Body:
    """``count`` prompts with n = 128, each choice with all the biases that there may be."""

    def body(target: Target) -> dict[str, Any]:
        bias = {str(i): i % 100 for i in range(target.many(4096))}
        return {"prompt": ["a"] * count, "n": 128, "max_tokens": 2, "logit_bias": bias}

    return body


def allowed(count: int) -> Body:
    def body(target: Target) -> dict[str, Any]:
        named = [i % 49_000 for i in range(target.many(131_072))]
        return {"prompt": ["a"] * count, "n": 128, "max_tokens": 2, "allowed_token_ids": named}

    return body


def stops(target: Target) -> dict[str, Any]:
    listed_stops = [f"{i:03}" + "ab" * 62 for i in range(target.many(64))]
    return {"prompt": ["a"] * 32, "n": 128, "max_tokens": 2, "stop": listed_stops}


def regex_streams(target: Target) -> dict[str, Any]:
    more = {"stop": [f"{i:03}" + "ab" * 60 for i in range(target.many(64))], "stop_regex": "(a?){250}b"}
    return {"prompt": "a", "n": 128, "max_tokens": 16, "stream": True, **more}


async def cut_prompts(target: Target) -> Outcome:
    body = {"prompt": [words(130_000)] * target.many(100), "truncate_prompt_tokens": 1, "max_tokens": 1}
    return await send(target, *[request(TEXT, body)] * 4, patience=2 * SHORT)


def prompt_logprobs(target: Target) -> dict[str, Any]:
    prompt = [[5 + i % 1000 for i in range(8191)]] * target.many(6)
    return {"prompt": prompt, "prompt_logprobs": 20, "max_tokens": 0, "echo": True}


def logprobs(target: Target) -> dict[str, Any]:
    return {"prompt": "a", "n": 128, "max_tokens": target.many(390), "logprobs": 20, "ignore_eos": True}


def logprob_streams(target: Target) -> dict[str, Any]:
    return {**logprobs(target), "stream": True}


def scored(target: Target) -> dict[str, Any]:
    """The query stands before each item."""
    return {"query": words(8 << 20), "items": ["a"] * target.many(100), "label_token_ids": [5]}


def scored_near(target: Target) -> dict[str, Any]:
    labels = list(range(512))
    return {
        "query": words(target.many(160_000)),
        "items": ["a"] * 100,
        "label_token_ids": labels,
        "truncate_prompt_tokens": 8,
    }


def strings(field: str, more: dict[str, Any]) -> Body:
    return lambda target: {**more, field: ["a"] * target.many(262_000)}


# Tools and grammars


def tools(choice: str) -> Body:
    def body(target: Target) -> dict[str, Any]:
        properties = {f"p{i}": {"type": "string", "enum": ["a", "b"]} for i in range(8)}
        functions = [
            {
                "name": f"function_{i}_{time.monotonic_ns()}",
                "parameters": {"type": "object", "properties": properties},
            }
            for i in range(target.many(1024))
        ]
        return {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": choice,
            "max_tokens": 1,
        }

    return body


def forced(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A call that must be, with arguments that a family of ``ELEMENTS`` writes as elements."""
    parameters = {"type": "object", "properties": properties, **more}
    return {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
        "max_tokens": 1,
    }


def required(target: Target) -> dict[str, Any]:
    """Names that are no argument's, looked through for each argument."""
    names = [f"q{i}" for i in range(target.many(170_000))]
    return forced({f"p{i}": {"type": "integer"} for i in range(target.many(28_000))}, required=names)


def definitions(target: Target) -> dict[str, Any]:
    """That each argument refers to."""
    text = {"description": "x" * target.many(15_000_000)}
    references = {f"p{i}": {"$ref": "#/$defs/d"} for i in range(target.many(2000))}
    return forced(references, **{"$defs": {"d": text}})


def pattern(count: int) -> Body:
    def body(target: Target) -> dict[str, Any]:
        return forced({"a": {"type": "string", "pattern": f"^({'|' * target.many(count)})"}})

    return body


def values(target: Target) -> dict[str, Any]:
    return forced({"a": {"enum": [f"{i}" for i in range(target.many(200_000))]}})


def arguments(target: Target) -> dict[str, Any]:
    return forced({f"p{i}": {"type": "integer", "minimum": i} for i in range(target.many(1100))})


def ollama_calls(target: Target) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": {}}}] * target.many(21_000)
    return {"model": "demo", "stream": False, "messages": [{"role": "assistant", "tool_calls": calls}]}


def regex(target: Target) -> dict[str, Any]:
    pattern = "|".join(f"{i}" for i in range(target.many(38_000)))
    return {"prompt": "a", "max_tokens": 1, "regex": pattern[:262_000]}


def ebnf(target: Target) -> dict[str, Any]:
    rules = "".join(f'r{i} ::= "{i}" r{i + 1}\n' for i in range(target.many(9000)))
    return {"prompt": "a", "max_tokens": 1, "ebnf": f"root ::= r0\n{rules}"[:262_000]}


def schema(target: Target) -> dict[str, Any]:
    form = {"enum": [f"{i}" for i in range(target.many(28_000))]}
    return {"prompt": "a", "max_tokens": 1, "json_schema": json.dumps(form)}


async def grammars(target: Target) -> Outcome:
    """As many as may wait, each as long as it may be, then their clients leave."""
    now = time.monotonic_ns()
    bodies = [
        {"prompt": "a", "max_tokens": 1, "regex": f"{now + i}" + "(ab|cd)" * target.many(37_000)}
        for i in range(64)
    ]
    return await send(
        target, *(request(TEXT, body) for body in bodies), patience=SHORT * min(1, 5 * target.scale)
    )


# Texts


def tokenized(target: Target) -> dict[str, Any]:
    return {"prompt": words(target.many(1_048_000)), "return_token_strs": True}


def many_texts(target: Target) -> dict[str, Any]:
    return {"prompt": [words(120)] * target.many(8192), "return_token_strs": True}


def detokenized(target: Target) -> bytes:
    return b'{"tokens":' + listed(target.many(262_000), b"1234") + b"}"


def many_lists(target: Target) -> bytes:
    return b'{"tokens":' + listed(target.many(8192), listed(31, b"1234")) + b"}"


def long_message(target: Target) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": words(target.many(15 << 20))}]}


def long_prompt(target: Target) -> dict[str, Any]:
    return {"max_tokens": 1, "prompt": words(target.many(15 << 20))}


def reasoning(target: Target) -> dict[str, Any]:
    return {"text": "<think>" * target.many(2 << 20), "reasoning_parser": "qwen3"}


def call(target: Target) -> dict[str, Any]:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call>' * target.many(80_000)
    return {"text": text, "tool_call_parser": "hermes"}


async def background(target: Target) -> Outcome:
    """Responses that are stored with all they came with; then they are deleted, since what is stored takes
    memory."""
    metadata = {"a": "m" * target.many(1_048_000)}
    body = {"input": "a", "background": True, "max_output_tokens": 64, "metadata": metadata}
    answers = await asyncio.gather(*(exchange(target, request(RESPONSES, body)) for _ in range(60)))
    found = [
        answer.split(b'"id":"')[1].split(b'"')[0].decode() for _, answer in answers if b'"id":"' in answer
    ]
    for uid in found:
        await exchange(target, head(f"{RESPONSES}/{uid}", 0, KEY, "DELETE"))
    return Outcome(Counter(status for status, _ in answers))


def texts(field: str, more: dict[str, Any] | None = None) -> Body:
    def body(target: Target) -> dict[str, Any]:
        return {field: [f"{i} {words(40)}" for i in range(target.many(4095))]} | (more or {})

    return body


def pairs(target: Target) -> dict[str, Any]:
    left = [f"{i}" for i in range(target.many(2048))]
    return {"text_1": left, "text_2": left}


def many_schemas(target: Target) -> dict[str, Any]:
    """A large schema for each prompt of a request."""
    count = target.many(56)
    texts = {f"p{i}": {"type": "string", "format": f"f{i}"} for i in range(5000)}
    schema = json.dumps({"type": "object", "properties": texts})
    return {"text": ["a"] * count, "sampling_params": [{"max_new_tokens": 1, "json_schema": schema}] * count}


def flood(frame: str | bytes) -> Attack:
    """20,000 frames of a /v1/realtime session, as fast as they can be written: texts, or pings."""

    async def attack(target: Target) -> Outcome:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as client,
            client.ws_connect(f"ws://127.0.0.1:{target.port}/v1/realtime", autoclose=False) as socket,
        ):
            reading = asyncio.ensure_future(drain(socket))
            for _ in range(target.many(20_000)):
                await (socket.send_str(frame) if isinstance(frame, str) else socket.ping(frame))
            await asyncio.wait([reading], timeout=3)
            reading.cancel()
        return Outcome(Counter({101: 1}))

    return attack


async def drain(socket: aiohttp.ClientWebSocketResponse) -> None:
    async for _ in socket:
        pass


# Workers and connections


def workers(pid: int) -> list[int]:
    found = []
    for child in tree(pid):
        with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
            if b"sgla.executor.child" in file.read():
                found.append(child)
    return found


async def stopped_worker(target: Target) -> Outcome:
    """Commands for a worker that stands still, and streams that wait for it; then it goes on."""
    stream = {"prompt": [5, 6, 7], "max_tokens": 8, "stream": True}
    pids = workers(target.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    outcome = Outcome()
    waiting = asyncio.ensure_future(
        send(target, *[request(TEXT, stream)] * target.many(50), patience=SHORT / 2)
    )
    try:
        for _ in range(9):
            commands = [request("/start_profile", {})] * target.many(100)
            found = await send(target, *commands, patience=SHORT / 12)
            outcome.statuses += found.statuses
        outcome.statuses += (await waiting).statuses
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    found = await send(target, request(TEXT, {"prompt": "a", "max_tokens": 1}, OTHER))
    outcome.more["other"] = dict(found.statuses)
    return outcome


async def lingering(target: Target) -> Outcome:
    """Connections that send a body that was refused, slowly, and another client that wants /health."""
    held = []
    for _ in range(target.many(72)):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            await write(writer, [head("/nowhere", 1 << 30, "wrong")])
            held.append(writer)
    outcome = Outcome()
    for _ in range(20):
        for writer in held:
            if not writer.transport.is_closing():
                await write(writer, [b"a"])
        status, _ = await exchange(target, head("/health", 0, OTHER, "GET"), 5.0)
        outcome.statuses[status] += 1
        await asyncio.sleep(0.1)
    for writer in held:
        writer.close()
    return outcome


PLAIN: dict[str, Attack] = {
    "524k ids of 10 digits, max_tokens 1.0": one(TEXT, ids(b"2147483647", b',"max_tokens":1.0')),
    "524k ids in lists of 128": one(
        TEXT,
        lambda target: b'{"max_tokens":1,"prompt":' + listed(target.many(4000), listed(128, b"49000")) + b"}",
        patience=SHORT,
    ),
    "524k values for the template": one(CHAT, kwargs(523_000, b"1.5")),
    "262k strings for the template": one(CHAT, kwargs(262_000, b'"a"')),
    "65k objects for the template": one(CHAT, kwargs(65_000, b"{}")),
    "60k message objects": one(CHAT, messages(60_000, b'{"role":"user"}')),
    "4,096 messages, 8,192 parts": one(CHAT, messages(4096, PARTS)),
    "8,192 parts, /v1/messages": one("/v1/messages", messages(4096, PARTS)),
    "4,096 messages with calls": one(CHAT, messages(4096, EMPTY_CALL)),
    "8,192 items": one(RESPONSES, items),
    "a name of colons": one(TEXT, long_name),
    "unknown fields": one(TEXT, unknown_fields, copies=20),
    "1.7M fields, /invocations": one("/invocations", million_fields),
    "unknown sampling fields": one(NATIVE, unknown_sampling),
    "2M backslashes": one(TEXT, backslashes),
    "headers of 64 KB": headers,
    "paths of 8,000 slashes": slashes,
    "1,500 without a key": refused,
    "1M chunks of one byte": chunked,
    "type of 8 KB": content_type,
    "message of 15 MiB": one(CHAT, long_message),
    "prompt of 15 MiB": one(TEXT, long_prompt, copies=4),
    "4 x 100 prompts of 130k characters": cut_prompts,
    "4,096 prompts, new grammar": one(TEXT, new_grammar, patience=2 * SHORT),
    "4,096 prompts": one(TEXT, prompts, patience=SHORT),
    "n 128, 4,096 biases": one(TEXT, biased(1)),
    "n 128, 131,072 allowed ids": one(TEXT, allowed(1)),
    "15 x 4,096 biases": one(NATIVE, native_biases),
    "n 128, stop_regex, streamed": one(TEXT, regex_streams),
    "score, 262k texts": one("/v1/score", strings("text_2", {"text_1": "a"})),
    "rerank, 262k documents": one("/rerank", strings("documents", {"query": "a"})),
    "21,000 calls, /api/chat": one("/api/chat", ollama_calls),
    "score, 8 MiB x 100": one("/v1/score", scored),
    "score, 160 kB x 100": one("/v1/score", scored_near, patience=SHORT),
    "1,024 tools": one(CHAT, tools("auto")),
    "1,024 tools, required": one(CHAT, tools("required")),
    "regex of 262,000": one(TEXT, regex),
    "EBNF of 262,000": one(TEXT, ebnf),
    "schema of 262,000": one(TEXT, schema),
    "64 grammars of 262,000": grammars,
    "tokenize 1M characters": one("/tokenize", tokenized, copies=2),
    "tokenize 1M characters, 3M tokens": one(
        "/tokenize", lambda target: {"prompt": "\ufdfa" * target.many(1_000_000)}
    ),
    "tokenize 8,192 texts": one("/tokenize", many_texts),
    "detokenize 262k ids": one("/detokenize", detokenized),
    "detokenize 8,192 lists": one("/detokenize", many_lists),
    "reasoning of 15 MB": one("/separate_reasoning", reasoning),
    "80k calls": one("/parse_function_call", call),
    "60 background responses": background,
    "56 schemas of 230 KB": one(NATIVE, many_schemas, patience=SHORT),
    "realtime, 20,000 events": flood("{}"),
    "realtime, 20,000 pings": flood(b"x"),
    "realtime, 2M fragments": fragments,
}
FAKE: dict[str, Attack] = {
    "stopped worker": stopped_worker,
    "4,096 prompts, no model": one(TEXT, prompts),
    "4,096 prompts, new grammar, no model": one(TEXT, new_grammar),
    "4,096 native prompts, no model": one(NATIVE, native_prompts),
    "4,096 choices, 4,096 biases": one(TEXT, biased(32)),
    "4,096 choices, 131,072 allowed ids": one(TEXT, allowed(32)),
    "4,096 choices, 64 stops": one(TEXT, stops),
    "n 128, patterns of 512": one(TEXT, repetitive, patience=SHORT),
    "1M prompt logprobs": one(TEXT, prompt_logprobs),
    "1M logprobs": one(TEXT, logprobs),
    "1M logprobs, streamed": one(TEXT, logprob_streams),
}
VECTORS: dict[str, Attack] = {
    "4,096 embeddings": one("/v1/embeddings", texts("input")),
    "4,096 documents": one("/v1/rerank", texts("documents", {"query": "a"})),
    "2,048 pairs": one("/v1/score", pairs),
}
TOOLS = Path(__file__).with_name("tools.jinja")
WRITTEN = ["--tool-call-parser", "qwen3_coder", "--chat-template", str(TOOLS)]  # calls as elements
ELEMENTS: dict[str, Attack] = {
    "28k arguments, 170k required": one(CHAT, required),
    "2,000 references to 15 MB": one(CHAT, definitions),
    "pattern of 10M bars": one(CHAT, pattern(10_000_000)),
    "pattern of 261,000 bars": one(CHAT, pattern(261_000), patience=SHORT),
    "200k values of an argument": one(CHAT, values),
    "1,100 arguments": one(CHAT, arguments, patience=SHORT),
}
FEW: dict[str, Attack] = {"72 lingering connections": lingering}

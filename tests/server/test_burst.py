"""More requests at once than there is room for: each is answered in full, or refused before its first
byte."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from local_server import Local, local_server
from server_process import serving

STREAMS = 1400  # of which 1,024 may wait
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
RESPONSE = {"input": "hi", "max_output_tokens": 16}
ROUTES: dict[str, tuple[str, dict[str, Any], int]] = {  # path, body, choices
    "chat": ("/v1/chat/completions", CHAT, 1),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 3}, 3),
    "whole": ("/v1/chat/completions", {**CHAT, "stream": False}, 1),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 8, "stream": True}, 2),
    "native": ("/generate", {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 8}}, 1),
    "anthropic": ("/v1/messages", CHAT, 1),
    "ollama": ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 8}}, 1),
    "responses": ("/v1/responses", {**RESPONSE, "stream": True}, 1),
    "background": ("/v1/responses", {**RESPONSE, "background": True}, 1),
    "background stream": ("/v1/responses", {**RESPONSE, "background": True, "stream": True}, 1),
}
ENDS = ("data: [DONE]\n\n", '"message_stop"}\n\n', '"done":true', "response.completed", "response.incomplete")
ERRORS = ('"error":{', '"error":"', "event: error", "response.failed")


def judged(status: int, retry_after: str | None, text: str) -> str:
    """complete | refused | what is wrong with the answer."""
    if status == 429:
        return "refused" if retry_after else "refused without Retry-After"
    if status != 200 or any(error in text for error in ERRORS):
        return f"broken: {status} {text[-300:]}"
    if text.startswith("{") and '"object":' in text:  # in one piece
        return "complete"
    return "complete" if any(end in text for end in ENDS) else "cut"


@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_refused_is_refused_before_its_first_byte(tiny_model: Path, route: str) -> None:
    """No row has a slot while the server is paused, so all that it admits waits."""
    path, body, choices = ROUTES[route]
    room, asked = {"max_running_requests": 3, "max_queued_requests": 9}, 20
    async with local_server(
        model=str(tiny_model), served_model_name=["tiny"], sampling_defaults="openai", **room
    ) as local:
        local.system.ingress.pause(True)
        answers = [asyncio.ensure_future(ask(local, path, body)) for _ in range(asked)]
        while sum(answer.done() for answer in answers) < asked - 12 // choices:
            await asyncio.sleep(0.01)
        local.system.ingress.pause(False)
        found = Counter(await asyncio.gather(*answers))
        assert found == {"complete": 12 // choices, "refused": asked - 12 // choices}
        stats = local.system.ingress.stats()
        assert stats is not None
        assert stats.rejected == asked - 12 // choices
        while local.system.ingress.open_requests:  # in the background
            await asyncio.sleep(0.01)


async def ask(local: Local, path: str, body: dict[str, Any]) -> str:
    async with local.client.post(path, json=body) as response:
        text = await response.text()
        return judged(response.status, response.headers.get("Retry-After"), text)


async def test_a_request_larger_than_all_room_is_served_alone(tiny_model: Path) -> None:
    """Refusing it as overload would make its client try for ever."""
    async with local_server(
        model=str(tiny_model), max_running_requests=2, max_queued_requests=2, sampling_defaults="openai"
    ) as local:
        body = {"prompt": ["a"] * 10, "max_tokens": 2}
        status, text = await local.post("/v1/completions", body)
        assert (status, len(json.loads(text)["choices"])) == (200, 10)


@pytest.mark.parametrize("open_bytes", [1 << 20, 100])
async def test_beside_a_request_larger_than_all_room_others_find_their_part(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, open_bytes: int
) -> None:
    """More choices than there are places, or longer prompts than there is memory for; its client has no
    more."""
    monkeypatch.setattr("sgla.actors.ingress.OPEN_BYTES", open_bytes)
    room = {"max_running_requests": 4, "max_queued_requests": 12}
    async with local_server(model=str(tiny_model), api_key=["noisy", "quiet"], **room) as local:
        ingress = local.system.ingress
        ingress.pause(True)

        async def ask(key: str, prompts: int) -> int:
            body = {"prompt": [[5, 6, 7]] * prompts, "max_tokens": 2, "ignore_eos": True}
            return (await local.post("/v1/completions", body, Authorization=f"Bearer {key}"))[0]

        large = asyncio.ensure_future(ask("noisy", 40))
        while ingress.open_requests < 40:
            await asyncio.sleep(0.001)
        assert await ask("noisy", 1) == 429
        quiet = asyncio.ensure_future(ask("quiet", 1))
        while ingress.open_requests < 41 and not quiet.done():
            await asyncio.sleep(0.001)
        ingress.pause(False)
        assert [await large, await quiet] == [200, 200]
        assert (ingress._capacity, ingress._more_bytes) == (16, 0)


async def test_a_client_that_takes_all_room_keeps_nobody_out(tiny_model: Path) -> None:
    """It has all places; then others with little open have an eighth more, and are served in turn with it."""
    room = {"max_running_requests": 4, "max_queued_requests": 20}
    async with local_server(model=str(tiny_model), api_key=["noisy", "quiet"], **room) as local:
        local.system.ingress.pause(True)
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True}

        async def asking(key: str) -> str:
            status, _ = await local.post("/v1/completions", body, Authorization=f"Bearer {key}")
            ended.append((key, status))
            return key

        ended: list[tuple[str, int]] = []
        answers = []
        for key, count, admitted in (("noisy", 26, 24), ("quiet", 4, 27), ("noisy", 1, 27)):
            answers += [asyncio.ensure_future(asking(key)) for _ in range(count)]
            while local.system.ingress.open_requests < admitted or len(ended) < len(answers) - admitted:
                await asyncio.sleep(0.01)
        assert ended == [("noisy", 429), ("noisy", 429), ("quiet", 429), ("noisy", 429)]
        local.system.ingress.pause(False)
        await asyncio.gather(*answers)
        assert [key for key, _ in ended[4:18]].count("quiet") == 3
        assert all(status == 200 for _, status in ended[4:])
        assert not local.system.ingress._held_by


def test_more_streams_than_may_wait(tiny_model: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("the system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        check_streams(tiny_model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_streams(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), "--executor", "fake") as server:
        found = asyncio.run(burst(server.port, STREAMS, {**CHAT, "temperature": 0, "ignore_eos": True}))
        assert found["complete"] + found["refused"] == STREAMS, found
        assert found["complete"] >= 1024  # as many as may wait, at least
        assert sum(server.stats()["finished"].values()) == found["complete"]


async def burst(port: int, count: int, body: dict[str, Any]) -> Counter[str]:
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"  # noqa: E501
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        raw = (await reader.read()).decode()
        writer.close()
        headers, _, text = raw.partition("\r\n\r\n")
        if "chunked" in headers and not text.endswith("\r\n0\r\n\r\n"):
            return "cut"
        retry_after = "yes" if "\r\nRetry-After: " in headers else None
        return judged(int(headers.split()[1]), retry_after, text)

    return Counter(await asyncio.gather(*(one() for _ in range(count))))


async def test_a_stream_that_is_long_in_preparation_is_refused_before_its_first_byte(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a grammar waits for others and is then refused."""
    async with local_server(model=str(tiny_model), sampling_defaults="openai") as local:
        tokenize = local.system._tokenize
        assert tokenize is not None
        prepared, release = tokenize._prepared, threading.Event()

        def late(*job: Any) -> Any:
            release.wait(10)
            return prepared(*job)

        monkeypatch.setattr(tokenize, "_prepared", late)
        long = {"prompt": "x" * 20_000, "max_tokens": 8, "stream": True}  # longer than the context: 4096
        answer = asyncio.ensure_future(local.post("/v1/completions", long))
        await asyncio.sleep(0.5)
        assert not answer.done()
        release.set()
        status, text = await answer
        assert status == 400
        assert json.loads(text)["error"]["code"] == "context_length_exceeded"

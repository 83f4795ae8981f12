"""Pictures of all APIs and from all sources become the same pictures of a job."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from http_fake import FakeIngress
from http_site import Serve, Site, served
from PIL import Image

from sgla.http.server import SERVER
from sgla.media.picture import Picture
from sgla.messages import Job


def file_of(color: str, size: tuple[int, int] = (3, 2)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def picture_of(color: str, size: tuple[int, int] = (3, 2)) -> Picture:
    return Picture.of(size[1], size[0], Image.new("RGB", size, color).tobytes())


RED, BLUE = file_of("red"), file_of("blue", (1, 4))
PICTURES = [picture_of("red"), picture_of("blue", (1, 4))]
BASE64 = [base64.b64encode(data).decode() for data in (RED, BLUE)]
DATA = [f"data:image/png;base64,{text}" for text in BASE64]
PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image"},
    {"type": "text", "text": "b"},
    {"type": "image"},
    {"type": "text", "text": "c"},
]


def seeing() -> FakeIngress:
    """A model that takes pictures."""
    ingress = FakeIngress()
    assert ingress.facts is not None
    ingress.facts.media = {"image": "<image>"}
    return ingress


@pytest.fixture
async def site(serve: Serve, tmp_path: Path) -> Site:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "red.png").write_bytes(RED)
    return await serve(seeing(), allowed_media_path=str(tmp_path / "in"), allow_private_media=True)


async def job_of(site: Site, path: str, body: Any) -> Job:
    status, answer = await site.post(path, {"model": "fake", **body})
    assert status == 200, answer
    return site.ingress.jobs[-1]


def chat(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}], "max_tokens": 1}


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "image_url": (
        "/v1/chat/completions",
        chat(
            text("a"),
            {"type": "image_url", "image_url": {"url": DATA[0], "detail": "high"}},
            text("b"),
            {"type": "image_url", "image_url": DATA[1]},
            text("c"),
        ),
    ),
    "image": (
        "/v1/chat/completions",
        chat(
            text("a"),
            {"type": "image", "image": BASE64[0]},
            text("b"),
            {"type": "input_image", "image_url": DATA[1]},
            text("c"),
        ),
    ),
    "responses": (
        "/v1/responses",
        {
            "max_output_tokens": 1,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": DATA[0], "detail": "low"},
                        {"type": "input_text", "text": "b"},
                        {"type": "input_image", "image_url": DATA[1]},
                        {"type": "input_text", "text": "c"},
                    ],
                }
            ],
        },
    ),
    "anthropic": (
        "/v1/messages",
        chat(
            text("a"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64[0]}},
            text("b"),
            {"type": "image", "source": {"type": "url", "url": DATA[1]}},
            text("c"),
        ),
    ),
}


@pytest.mark.parametrize("name", CHATS)
async def test_parts_keep_their_order(site: Site, name: str) -> None:
    job = await job_of(site, *CHATS[name])
    assert job.messages is not None
    assert job.messages[-1]["content"] == PARTS
    assert job.pictures == PICTURES


async def test_pictures_that_tools_return(site: Site) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64[0]}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), image]}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}]
    body = {"messages": [*turns, {"role": "user", "content": [result]}], "max_tokens": 1}
    job = await job_of(site, "/v1/messages", body)
    assert job.messages is not None
    assert job.messages[-1] == {"role": "tool", "tool_call_id": "t", "name": "f", "content": PARTS[:2]}
    assert job.pictures == PICTURES[:1]
    items = [
        {"type": "message", "role": "user", "content": "x"},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "t",
            "output": [{"type": "input_image", "image_url": DATA[1]}],
        },
    ]
    job = await job_of(site, "/v1/responses", {"input": items})
    assert job.messages is not None
    assert job.messages[-1]["content"] == PARTS[1:2]
    assert job.pictures == PICTURES[1:]


async def test_a_response_goes_on_from_pictures(site: Site) -> None:
    status, first = await site.post("/v1/responses", {"model": "fake", **CHATS["responses"][1]})
    assert status == 200
    job = await job_of(site, "/v1/responses", {"input": "d", "previous_response_id": first["id"]})
    assert job.messages is not None
    assert job.messages[0]["content"] == PARTS
    assert job.pictures == PICTURES


async def test_ollama(site: Site) -> None:
    job = await job_of(site, "/api/generate", {"prompt": "a", "images": BASE64, "stream": False})
    assert job.messages == [{"role": "user", "content": [PARTS[1], PARTS[3], PARTS[0]]}]
    assert job.pictures == PICTURES
    messages = [{"role": "user", "content": "a", "images": BASE64[:1]}, {"role": "user", "content": "c"}]
    job = await job_of(site, "/api/chat", {"messages": messages, "stream": False})
    assert job.messages is not None
    assert job.messages[0]["content"] == [PARTS[1], PARTS[0]]
    assert job.pictures == PICTURES[:1]


@pytest.mark.parametrize(
    ("prompt", "images", "expected"),
    [
        ("a", DATA[0], [[0]]),
        ("a", DATA, [[0, 1]]),
        ("a", [DATA], [[0, 1]]),
        (["a", "b"], DATA[0], [[0], [0]]),
        (["a", "b"], DATA, [[0], [1]]),
        (["a", "b"], [[BASE64[1], BASE64[0]], []], [[1, 0], []]),
        (["a", "b"], [None, BASE64[0]], [[], [0]]),
        (["a"], [], [[]]),
    ],
)
async def test_generate(site: Site, prompt: Any, images: Any, expected: list[list[int]]) -> None:
    body = {"text": prompt, "image_data": images, "sampling_params": {"max_new_tokens": 1}}
    status, answer = await site.post("/generate", body)
    assert status == 200, answer
    assert [job.pictures for job in site.ingress.jobs] == [[PICTURES[i] for i in each] for each in expected]


async def test_sources(site: Site, tmp_path: Path, serve_files: str) -> None:
    inside = tmp_path / "in" / "red.png"
    link = tmp_path / "in" / "link.png"
    link.symlink_to(inside)
    sources = {
        "data": DATA[0],
        "data without base64": f"data:image/png,{quote(RED)}",
        "base64": BASE64[0],
        "base64 for URLs": base64.urlsafe_b64encode(RED).decode(),
        "lines": "\n".join(BASE64[0][i : i + 40] for i in range(0, len(BASE64[0]), 40)),
        "file URL": f"file://{inside}",
        "file URL of this host": f"file://localhost{inside}",
        "path": str(inside),
        "path from the folder": "red.png",
        "link inside": str(link),
        "http": f"{serve_files}/red.png",
        "redirect": f"{serve_files}/redirect",
    }
    body = {"text": "a", "image_data": list(sources.values()), "sampling_params": {"max_new_tokens": 1}}
    status, answer = await site.post("/generate", body)
    assert status == 200, answer
    found = dict(zip(sources, site.ingress.jobs[-1].pictures))
    assert found == dict.fromkeys(sources, PICTURES[0])


@pytest.fixture
async def serve_files() -> Any:
    async with served({"red.png": RED, "redirect": "/red.png"}) as address:
        yield address


async def test_published_clients(site: Site) -> None:
    parts: Any = CHATS["image_url"][1]["messages"]
    await site.client.chat.completions.create(model="fake", messages=parts, max_tokens=1)
    items: Any = CHATS["responses"][1]["input"]
    await site.client.responses.create(model="fake", input=items, max_output_tokens=16)
    assert [job.pictures for job in site.ingress.jobs] == [PICTURES] * 2


async def test_the_client_of_anthropic(site: Site) -> None:
    import anthropic  # which takes longer than all else that is imported here

    messages: Any = CHATS["anthropic"][1]["messages"]
    async with anthropic.AsyncAnthropic(
        api_key="x", base_url=site.url, http_client=anthropic.DefaultAsyncHttpxClient(verify=False)
    ) as client:
        await client.messages.create(model="fake", messages=messages, max_tokens=1)
    assert site.ingress.jobs[-1].pictures == PICTURES


async def test_memory_is_given_back(site: Site) -> None:
    await job_of(site, *CHATS["image_url"])
    assert site.app[SERVER].memory.used == 0


async def test_pictures_of_conversations_and_realtime_sessions(site: Site) -> None:
    items = [{"type": "message", **CHATS["responses"][1]["input"][0]}]
    status, conversation = await site.post("/v1/conversations", {"items": items})
    assert status == 200
    job = await job_of(site, "/v1/responses", {"conversation": conversation["id"], "input": "d"})
    assert job.messages is not None
    assert job.messages[0]["content"] == PARTS
    assert job.pictures == PICTURES
    async with site.http.ws_connect("/v1/realtime") as socket:
        await socket.send_json({"type": "conversation.item.create", "item": items[0]})
        await socket.send_json({"type": "response.create"})
        while (await socket.receive_json())["type"] not in ("response.done", "error"):
            pass
    assert site.ingress.jobs[-1].pictures == PICTURES


async def test_pictures_in_a_batch(site: Site) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHATS["image_url"][0], "body": CHATS["image_url"][1]}
    data = json.dumps(line | {"body": {"model": "fake", **line["body"]}}).encode()
    sent = await site.client.files.create(file=("a.jsonl", data), purpose="batch")
    batch = await site.client.batches.create(
        input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        await asyncio.sleep(0.01)
        batch = await site.client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1
    assert site.ingress.jobs[-1].pictures == PICTURES


async def test_prompts_with_pictures_are_counted(site: Site) -> None:
    """The stand-in's template shows parts as Python does, and its model gives a picture no tokens."""
    counts = {
        "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
        "responses": ("/v1/responses/input_tokens", "input_tokens"),
    }
    expected = len(f"<user>{PARTS}<assistant>")
    for name, (path, field) in counts.items():
        status, answer = await site.post(path, {"model": "fake", **CHATS[name][1]})
        assert (status, answer.get(field)) == (200, expected), answer
    status, answer = await site.post("/v1/chat/completions/render", CHATS["image_url"][1])
    assert (status, len(answer["token_ids"])) == (200, expected), answer


async def test_fields_of_parts_that_nobody_knows_are_told(site: Site) -> None:
    """vLLM's ``uuid`` is a key for its cache; here that is what is in the picture."""
    part = {"type": "image_url", "uuid": "a", "cache_control": None, "image_url": {"url": DATA[0], "odd": 1}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [part]}]}),
    ):
        async with site.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            told = response.headers["x-ignored-fields"].split(", ")
        assert told == ["image_url.odd", "image_url.uuid"]

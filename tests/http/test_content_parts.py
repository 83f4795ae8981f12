"""A part of a message holds one thing. Of what holds two, nothing is dropped without a word."""

from __future__ import annotations

from typing import Any

import pytest
from http_site import Serve, Site
from test_pictures import DATA, chat, file_of, seeing

from sgla.engine.pictures import chat_given
from sgla.errors import InvalidField, UnsupportedField
from sgla.http.pooling.score import text_of

PICTURE = {"url": DATA[0]}
SOURCE = {"type": "url", "url": DATA[0]}
WORDS = {"type": "text", "text": "a"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


def answered(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}]}


@pytest.fixture
async def site(serve: Serve) -> Site:
    ingress = seeing()
    assert ingress.facts is not None
    ingress.facts.media |= {"audio": "<audio>", "video": "<video>"}
    return await serve(ingress)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (WORDS | {"image_url": PICTURE}, "image_url"),
        (WORDS | {"image": DATA[0]}, "image"),
        (WORDS | {"input_audio": {"data": "QQ==", "format": "wav"}}, "input_audio"),
        (WORDS | {"refusal": "no"}, "refusal"),
        (WORDS | {"file": {"file_id": "f"}}, "file"),
        ({"type": "refusal", "refusal": "no", "text": "a"}, "text"),
        ({"type": "image_url", "image_url": PICTURE, "text": "a"}, "text"),
        ({"type": "image_url", "image_url": PICTURE, "video_url": PICTURE}, "video_url"),
        ({"type": "image", "image": DATA[0], "url": DATA[1]}, "url"),
        ({"type": "video_url", "video_url": PICTURE, "image_url": PICTURE}, "image_url"),
        ({"type": "audio_url", "audio_url": PICTURE, "input_audio": {"data": "QQ=="}}, "input_audio"),
        ({"type": "input_audio", "input_audio": {"data": "QQ==", "url": "http://x"}}, "data"),
        ({"type": "image_url", "image_url": PICTURE | {"max_pixels": 4096}}, "max_pixels"),
        ({"type": "image_url", "image_url": PICTURE, "min_pixels": 4096}, "min_pixels"),
        ({"type": "video_url", "video_url": PICTURE, "fps": 1}, "fps"),
    ],
)
async def test_chats(site: Site, part: dict[str, Any], named: str) -> None:
    status, answer = await site.post("/v1/chat/completions", {"model": "fake", **chat(part)})
    assert (status, answer["error"]["param"].partition(".")[0]) == (400, "messages[0]"), answer
    assert named in answer["error"]["message"]
    with pytest.raises((InvalidField, UnsupportedField), match=named) as caught:
        chat_given([{"role": "user", "content": [WORDS, part]}])
    assert str(caught.value.param).startswith("messages[0].content[1]")
    assert site.ingress.jobs == []


async def test_fields_that_hold_nothing_may_be_there(site: Site) -> None:
    """Some clients write all fields of all types."""
    none: dict[str, Any] = {"image_url": None, "input_audio": None, "file": {}, "refusal": ""}
    noted = {"type": "image_url", "image_url": PICTURE, "text": None, "uuid": "1", "detail": "low"}
    body = chat(WORDS | none | {"cache_control": {"type": "ephemeral"}}, noted)
    assert (await site.post("/v1/chat/completions", {"model": "fake", **body}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{**WORDS, "type": "input_text", "image_url": DATA[0]}]}]},
            "image_url",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": DATA[0], "text": "a"}]}
                ]
            },
            "text",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "images": DATA}]}, "input[0].images"),
        ("/v1/messages", chat(WORDS | {"source": SOURCE}), "messages[0].content[0]: a block of type 'text'"),
        ("/v1/messages", chat({"type": "image", "source": SOURCE, "text": "a"}), "has no text; send that as"),
        ("/v1/messages", chat(DOCUMENT | {"content": [WORDS]}), "has no content"),
        (
            "/v1/messages",
            chat(RESULT | {"content": [DOCUMENT | {"text": "a"}]}),
            "messages[0].content[0].content[0]: a block of type 'document' has no text",
        ),
        ("/v1/messages", answered({"type": "thinking", "thinking": "a", "text": "b"}), "has no text"),
        ("/v1/messages", answered(CALL | {"content": "b"}), "has no content"),
        ("/v1/messages", chat({"type": "image", "source": SOURCE | {"data": "QQ=="}}), "data"),
        (
            "/v1/messages",
            chat({"type": "document", "source": {"type": "text", "data": "a", "content": "b"}}),
            "content",
        ),
        ("/v1/messages", chat(RESULT | {"text": "a"}), "has no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "images": DATA}]}, "images"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "audio_1"}}]},
            "audio",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]},
            "messages[0] may have content or refusal, not both",
        ),
    ],
)
async def test_other_apis(site: Site, path: str, body: dict[str, Any], named: str) -> None:
    body = {"model": "fake", **({"max_tokens": 1} if path == "/v1/messages" else {}), **body}
    status, answer = await site.post(path, body)
    assert status == 400, answer
    assert named in answer["error"]["message"]
    assert site.ingress.jobs == []


def test_pictures_that_are_objects_hold_something() -> None:
    part = {"type": "image_pil", "image_pil": file_of("red"), "text": "a"}
    with pytest.raises(InvalidField, match="text"):
        chat_given([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("strange", [{"text": "b"}, {"image_url": PICTURE}])
def test_texts_to_score_hold_one_thing(strange: dict[str, Any]) -> None:
    given = {"content": [{"type": "text", "text": "a"}]}
    assert text_of(given, "items") == text_of({"text": "a", "content": None}, "items") == "a"
    with pytest.raises(InvalidField, match=f"has no {next(iter(strange))}; send that as a part of its own"):
        text_of(given | strange, "items")

"""Videos of chats and /generate, from all sources, become the same videos of a job; what is none gets a
4xx."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site, served
from video_files import clip

from sgla.errors import InvalidField
from sgla.http.server import SERVER
from sgla.media.film import filmed
from sgla.media.video import Video, Watchable
from sgla.media.watch import video

FILE, OTHER = clip(), clip(seed=1)
VIDEOS = [Video.of(data, "mp4", 8, 4.0, 48, 64) for data in (FILE, OTHER)]
BASE64 = [base64.b64encode(data).decode() for data in (FILE, OTHER)]
DATA = [f"data:video/mp4;base64,{text}" for text in BASE64]
TEXT = {"type": "text", "text": "a"}
LIMITS = Watchable(1 << 24, 1 << 20, 60.0, 1000)


def watching() -> FakeIngress:
    """A model that takes videos."""
    ingress = FakeIngress()
    assert ingress.facts is not None
    ingress.facts.media = {"image": "<image>", "video": "<video>"}
    return ingress


@pytest.fixture
async def site(serve: Serve, tmp_path: Path) -> Site:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "clip.mp4").write_bytes(FILE)
    return await serve(
        watching(),
        allowed_media_path=str(tmp_path / "in"),
        allow_private_media=True,
        max_media_bytes=1 << 20,
        max_image_pixels=1 << 16,
        max_video_seconds=20.0,
        max_video_frames=100,
    )


PARTS: dict[str, list[dict[str, Any]]] = {
    "video_url": [{"type": "video_url", "video_url": {"url": url}} for url in DATA],
    "video_url as a text": [{"type": "video_url", "video_url": url} for url in DATA],
    "input_video": [{"type": "input_video", "video_url": url} for url in BASE64],
    "video": [{"type": "video", "video": DATA[0]}, {"type": "video", "url": DATA[1]}],
}


@pytest.mark.parametrize("name", PARTS)
async def test_parts_keep_their_order(site: Site, name: str) -> None:
    first, second = PARTS[name]
    messages: Any = [{"role": "user", "content": [first, TEXT, second]}]
    await site.client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    job = site.ingress.jobs[-1]
    assert job.messages is not None
    assert job.messages[0]["content"] == [{"type": "video"}, TEXT, {"type": "video"}]
    assert job.pictures == VIDEOS
    assert site.app[SERVER].memory.used == 0


async def test_generate_and_sources(site: Site, tmp_path: Path) -> None:
    async with served({"clip.mp4": FILE}) as address:
        sources = [
            *(DATA[0], BASE64[0], "clip.mp4", (tmp_path / "in" / "clip.mp4").as_uri()),
            f"{address}/clip.mp4",
        ]
        body = {
            "text": "a",
            "video_data": sources,
            "mm_processor_kwargs": {"fps": 1},
            "sampling_params": {"max_new_tokens": 1},
        }
        status, told = await site.post("/generate", body)
    assert status == 200, told
    assert site.ingress.jobs[-1].pictures == VIDEOS[:1] * len(sources)
    assert site.ingress.jobs[-1].media_kwargs == {"fps": 1}


@pytest.mark.parametrize(("codec", "format"), [("mpeg4", "avi"), ("libvpx", "webm"), ("h264", "mp4")])
def test_kinds_of_files(codec: str, format: str) -> None:
    found = video(clip(codec=codec, format=format), "file", LIMITS)
    assert (found.format, found.frames, found.rate, found.height, found.width) == (format, 8, 4.0, 48, 64)
    shape = filmed(found, "Qwen3VLVideoProcessor", "{}", {}, 1 << 26)["image_grid_thw"].tolist()
    assert shape == [[2, 10, 14]]


def hostile() -> Iterator[tuple[str, bytes]]:
    front = clip(format="avi")  # what tells of the frames comes first
    assert video(front, "file", LIMITS).frames == 8
    for cut in (0, 4, 11, 20, 100, len(FILE) // 2, len(FILE) - 400):
        yield f"cut at {cut}", FILE[:cut]
    for cut in (len(front) // 2, len(front) - 400):
        yield f"cut behind its head, at {cut}", front[:cut]
    yield "overwritten", FILE[:8] + b"\0" * 4000
    yield "10 hours", clip(3, 16, 16, rate=1, gap=18_000)
    yield "too many frames", clip(101, 16, 16, rate=100)
    yield "too long", clip(22, 16, 16, rate=1)
    yield "too many pixels", clip(1, 256, 264)
    yield "too large a file", FILE + bytes(1 << 20)
    yield "a picture", b"\x89PNG\r\n\x1a\n" + bytes(60)
    yield "a sound", b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(30)
    yield "a playlist", b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n"
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield "html", b"<!doctype html>"
    yield "zeros", bytes(5000)
    yield "an mp4 without video", struct.pack(">I", 16) + b"ftypisom" + bytes(4)


async def refused(site: Site, name: str, text: Any) -> str:
    status, answer = await site.post("/generate", {"text": "a", "video_data": [text]})
    assert 400 <= status < 500, (name, status, answer)
    assert answer["error"]["param"] == "video_data[0]", (name, answer)
    return str(answer["error"]["message"])


async def test_files_that_are_no_videos(site: Site) -> None:
    told = {}
    for name, data in hostile():
        told[name] = await refused(site, name, f"data:video/mp4;base64,{base64.b64encode(data).decode()}")
    for name in ("too many frames", "too long", "10 hours"):
        assert "100 frames (--max-video-frames), or than 20 s" in told[name], told[name]
    assert "264 x 256 pixels; 65536 (--max-image-pixels)" in told["too many pixels"]
    assert "(--max-media-bytes)" in told["too large a file"]
    assert site.app[SERVER].memory.used == 0
    assert not site.ingress.jobs
    await site.post(
        "/generate", {"text": "a", "video_data": DATA[0], "sampling_params": {"max_new_tokens": 1}}
    )
    assert site.ingress.jobs[-1].pictures == VIDEOS[:1]


def test_frames_that_cannot_be_decoded_or_are_too_many() -> None:
    whole = bytearray(FILE)
    at = FILE.index(b"mdat") + 4
    whole[at : at + 600] = bytes(600)
    found = video(bytes(whole), "file", LIMITS)
    with pytest.raises(InvalidField, match="video cannot be decoded|is cut"):
        filmed(found, "Qwen3VLVideoProcessor", "{}", {}, 1 << 26)
    with pytest.raises(InvalidField, match="ask for fewer or smaller ones"):
        filmed(found, "Qwen3VLVideoProcessor", "{}", {}, 1 << 16)
    thin = video(clip(2, 16, 3232), "file", LIMITS)
    with pytest.raises(InvalidField, match="200 times as long"):
        filmed(thin, "Qwen2VLVideoProcessor", "{}", {}, 1 << 26)


def test_settings_say_which_frames_and_how_large() -> None:
    found = video(clip(40, rate=8), "file", LIMITS)

    def made(settings: str) -> tuple[list[int], list[int]]:
        arrays = filmed(found, "Qwen3VLVideoProcessor", settings, {}, 1 << 26)
        assert np.abs(arrays["pixel_values"]).max() <= 1
        return arrays["image_grid_thw"][0].tolist(), arrays["tenths"].tolist()

    assert made("{}") == ([5, 8, 10], [2, 14, 24, 35, 46])
    assert made('{"fps": 1}') == ([3, 10, 12], [6, 31, 49])
    assert made('{"num_frames": 2}') == ([1, 14, 20], [24])
    small = '{"num_frames": 2, "size": {"shortest_edge": 1024, "longest_edge": 8192}}'
    assert made(small) == ([1, 4, 4], [24])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url"},
        {"type": "video_url", "video_url": {"url": ""}},
        {"type": "video_url", "video_url": ["x"]},
        {"type": "video", "file_id": "file-1"},
        {"type": "file", "file": {"file_data": DATA[0]}},
    ],
)
async def test_wrong_parts_are_refused_by_name(site: Site, part: dict[str, Any]) -> None:
    status, told = await site.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}
    )
    assert (status, told["error"]["param"]) == (400, "messages[0].content[0]"), told
    assert not site.ingress.jobs


async def test_who_takes_none_says_so(site: Site) -> None:
    assert site.ingress.facts is not None
    site.ingress.facts.media = {"image": "<image>"}
    assert "takes no videos" in await refused(site, "tower", BASE64[0])


async def test_counts(serve: Serve) -> None:
    site = await serve(watching(), limit_mm_per_prompt={"video": 1})
    body = {"messages": [{"role": "user", "content": PARTS["video_url"]}]}
    status, told = await site.post("/v1/chat/completions", body)
    assert (status, told["error"]["param"]) == (400, "messages[0].content[1]")
    assert "2 videos; 1 (--limit-mm-per-prompt)" in told["error"]["message"]

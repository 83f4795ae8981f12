"""What is sent in the place of pictures and is none: each gets a 4xx that names it, and leaves nothing."""

from __future__ import annotations

import asyncio
import base64
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from http_site import Serve, Site
from test_pictures import RED, seeing

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from media_attacks import ADDRESSES, files, let_through, png, sources, texts, write_folder

from sgla.config import Config
from sgla.http.bodies import RequestMemory, Share
from sgla.http.media import fetch
from sgla.http.server import SERVER
from sgla.media.pool import Pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path)


@pytest.fixture
async def files_at(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server with a name that is let through and has this host's address."""
    let_through(monkeypatch.setattr)
    async with sources() as address:
        yield address


@pytest.fixture
async def site(serve: Serve, folder: Path) -> Site:
    return await serve(
        seeing(),
        allowed_media_path=str(folder),
        media_timeout=60,
        max_media_bytes=1 << 16,
        max_image_pixels=1 << 20,
    )


async def refused(site: Site, name: str, image: Any) -> str:
    status, answer = await site.post("/generate", {"text": "a", "image_data": [image]})
    assert 400 <= status < 500, (name, status, answer)
    error = answer["error"]
    assert error["param"] == "image_data[0]", (name, error)
    assert error["message"].startswith("image_data[0]: "), (name, error)
    return str(error["message"])


async def test_files_that_are_no_pictures(site: Site) -> None:
    hostile = dict(files())
    told = {
        name: await refused(site, name, f"data:image/png;base64,{base64.b64encode(data).decode()}")
        for name, data in hostile.items()
    }
    assert len(told) > 120
    assert "1048576 (--max-image-pixels)" in told["a gigabyte of pixels"]
    assert "65536 (--max-media-bytes)" in told["too large a file"]
    assert "no picture of a kind" in told["svg bomb"]
    assert site.app[SERVER].memory.used == 0
    assert not site.ingress.jobs


async def test_sources_that_have_no_pictures(site: Site, files_at: str) -> None:
    hostile = dict(texts(files_at))
    told = dict(
        zip(
            hostile,
            await asyncio.gather(*(refused(site, *each) for each in hostile.items())),
        )
    )
    assert len(told) > 80
    for address in ADDRESSES:
        assert "is no public address" in told[f"at {address}"], told[f"at {address}"]
        assert "is no public address" in told[f"to {address}"], told[f"to {address}"]
    for name in ("endless", "claims"):
        assert "--max-media-bytes" in told[name]
    assert "--media-redirects" in told["circle"]
    for name in ("escape.png", "dir/escape.png", "missing.png", "../out.png", "loop.png"):
        assert "no such file inside of --allowed-media-path" in told[name]
    assert site.app[SERVER].memory.used == 0
    assert not site.ingress.jobs


async def test_slow_servers(serve: Serve, files_at: str) -> None:
    site = await serve(seeing(), media_timeout=0.1)
    for path in ("slow", "drip"):
        assert "0.1 s (--media-timeout)" in await refused(site, path, f"{files_at}/{path}")
    assert site.app[SERVER].memory.used == 0


@pytest.mark.parametrize(("count", "param"), [(10_000, "messages"), (65, "messages[0].content[64]")])
async def test_too_many_pictures(site: Site, count: int, param: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    body = {"messages": [{"role": "user", "content": [part] * count}]}
    status, answer = await site.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "http://x/y.wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": {"url": ["x"]}},
        {"type": "image_url", "image_url": {"url": "x", "detail": "most"}},
        {"type": "image"},
    ],
)
async def test_other_parts_are_refused_by_name(site: Site, part: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    status, answer = await site.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[1]"), answer
    assert not site.ingress.jobs


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "a", "image_data": ["x"], "session_params": {"id": "s"}}, "image_data"),
        ("/generate", {"text": ["a", "b"], "image_data": ["x"]}, "image_data"),
        ("/generate", {"text": "a", "image_data": [["x"], ["y"]]}, "image_data"),
        ("/generate", {"text": "a", "image_data": {"format": "processor_output"}}, "image_data"),
        ("/generate", {"text": "a", "image_data": "x", "video_data": "y"}, "video_data"),
        ("/api/generate", {"model": "fake", "prompt": "a", "raw": True, "images": ["x"]}, None),
        ("/api/chat", {"model": "fake", "messages": [{"role": "user", "images": [5]}]}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}, None),
    ],
)
async def test_what_has_no_place_for_pictures(site: Site, path: str, body: Any, param: str | None) -> None:
    status, answer = await site.post(path, body)
    assert status == 400, answer
    if param is not None:
        assert answer["error"]["param"] == param


@pytest.mark.parametrize("without", ["tower", "pillow"])
async def test_who_takes_none_says_so(site: Site, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    assert site.ingress.facts is not None
    if without == "tower":
        site.ingress.facts.media = {}
    else:
        monkeypatch.setattr("sgla.media.readers.find_spec", lambda name: None)
    told = await refused(site, without, "http://127.0.0.1/x.png")
    assert ("takes no images" if without == "tower" else "pip install 'sgla[mm]'") in told


async def test_a_client_that_goes_frees_what_it_held(serve: Serve, files_at: str) -> None:
    site = await serve(seeing(), max_media_bytes=1 << 40)
    memory: RequestMemory = site.app[SERVER].memory
    asking = asyncio.ensure_future(
        site.http.post("/generate", json={"text": "a", "image_data": f"{files_at}/endless"})
    )
    while memory.used < 1 << 20:
        await asyncio.sleep(0.01)
    asking.cancel()
    while memory.used:
        await asyncio.sleep(0.01)


async def test_pictures_have_a_part_of_the_memory_of_requests(serve: Serve, files_at: str) -> None:
    site = await serve(seeing(), request_memory_bytes=4 << 20)
    status, answer = await site.post("/generate", {"text": "a", "image_data": f"{files_at}/endless"})
    assert status in (413, 429), answer
    assert site.app[SERVER].memory.used == 0


async def test_a_stuck_source_holds_up_its_client_alone(files_at: str) -> None:
    """So many fetches of a client run that the next waits; that of another does not."""
    fetcher, memory = fetch.Fetcher(Config(media_timeout=60.0)), RequestMemory(1 << 20)
    stuck = [
        asyncio.ensure_future(fetcher.get(f"{files_at}/slow", Share(memory, "a")))
        for _ in range(fetch.AT_ONCE + 1)
    ]
    await asyncio.sleep(0)
    assert await fetcher.get(f"{files_at}/empty", Share(memory, "b")) == b""
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    await fetcher.close()


async def test_a_name_that_is_not_found_holds_up_its_client_alone(
    files_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many names of a client are looked up, also after it has gone; others have threads left."""
    look_up, over, asked = fetch.socket.getaddrinfo, threading.Event(), []

    def stuck(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "stuck.test" or "flags" in kwargs:
            return look_up(host, *args, **kwargs)
        asked.append(host)
        over.wait()
        raise OSError("not found")

    monkeypatch.setattr(fetch.socket, "getaddrinfo", stuck)
    fetcher, memory = fetch.Fetcher(Config(media_timeout=60.0)), RequestMemory(1 << 20)
    for _ in range(fetch.RESOLVING):
        waiting = asyncio.ensure_future(fetcher.get("http://stuck.test/", Share(memory, "a")))
        await asyncio.sleep(0.001)
        waiting.cancel()
    assert await fetcher.get(f"{files_at}/empty", Share(memory, "b")) == b""
    assert len(asked) <= fetch.OWN_NAMES
    over.set()
    await fetcher.close()


async def test_processes_outlive_bad_pictures_and_end_with_the_pool(serve: Serve) -> None:
    ingress = seeing()
    pool = ingress.media = Pool(processes=1, memory=1 << 30, modules=["sgla.media.decode"])
    site = await serve(ingress, max_image_pixels=1 << 20)
    for data in (png(1 << 15, 1 << 15), b"no"):
        await refused(site, "bad", base64.b64encode(data).decode())
    good = {
        "text": "a",
        "image_data": base64.b64encode(RED).decode(),
        "sampling_params": {"max_new_tokens": 1},
    }
    assert (await site.post("/generate", good))[0] == 200
    (process,) = pool._idle
    await pool.close()
    assert process._process is not None
    assert process._process.returncode is not None

"""What is sent in the place of pictures and is none: each gets a 4xx that names it, and leaves nothing."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web
from http_site import Serve, Site
from PIL import Image
from test_pictures import RED, seeing

from sgla.config import Config
from sgla.http.bodies import RequestMemory, Share
from sgla.http.media import fetch
from sgla.http.server import SERVER
from sgla.media.pool import Pool

NAME = "pictures.test"  # which the tests let through
NOISE = Image.frombytes("RGB", (24, 24), bytes((i * 7919 >> 3) % 256 for i in range(24 * 24 * 3)))
OVER = web.AppKey("over", asyncio.Event)  # the test
ADDRESSES = (
    *("127.0.0.1", "127.1", "2130706433", "0177.0.0.1", "0x7f000001", "0x7f.1", "0.0.0.0", "localhost"),
    *("169.254.169.254", "2852039166", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "224.0.0.1"),
    *(
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a9fe:a9fe]",
        "[fe80::1]",
        "[fc00::1]",
    ),
    *("[64:ff9b::7f00:1]", "[64:ff9b:1::a00:1]", "[2002:7f00:1::]", "[ff02::1]", "[fec0::1]", "[::7f00:1]"),
)


def encoded(kind: str) -> bytes:
    out = io.BytesIO()
    NOISE.save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes, color: int = 2) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(bytes(99)))


def files() -> Iterator[tuple[str, bytes]]:
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        whole = encoded(kind)
        for cut in range(16):
            yield f"{kind} cut {cut}", whole[: len(whole) * cut // 17]
        yield f"{kind} overwritten", whole[:20] + b"\0" * 40 + whole[60:80]
    yield "a gigabyte of pixels", png(1 << 15, 1 << 15)
    yield "a row of two billion", png((1 << 31) - 1, 1)
    yield "no width", png(0, 5)
    yield "no height", png(5, 0)
    yield "a text that inflates", png(9, 9, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(8 << 20))))
    yield "a profile that inflates", png(9, 9, chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(8 << 20))))
    yield "an unknown color", png(9, 9, color=5)
    yield "a large GIF", b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02\x44\x01\0;"
    yield "svg", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    bomb = "".join(f"<!ENTITY a{i} '{f'&a{i - 1};' * 9}'>" for i in range(1, 9))
    yield "svg bomb", f"<?xml version='1.0'?><!DOCTYPE svg [<!ENTITY a0 'x'>{bomb}]><svg>&a8;</svg>".encode()
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"
    yield "pdf", b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n"
    yield "html", b"<!doctype html><img src=x onerror=alert(1)>"
    yield "text", b"a picture of a cat"
    yield "zip", b"PK\x03\x04" + bytes(60)
    yield "gzip", zlib.compress(RED)
    yield "an icon", b"\0\0\x01\0\x01\0" + bytes(40)
    yield "zeros", bytes(5000)
    yield "ones", b"\xff" * 5000
    yield "nothing", b""
    yield "too large a file", RED + bytes(1 << 17)


def texts(files_at: str) -> Iterator[tuple[str, Any]]:
    for i, address in enumerate(ADDRESSES):
        yield f"at {address}", f"http://{address}:9/x.png"
        scheme = ("http", "https")[i % 2]
        yield f"to {address}", f"{files_at}/redirect?to={quote(f'{scheme}://{address}:9/x.png')}"
    for to in (
        "file:///etc/passwd",
        "ftp://a/b",
        "data:image/png;base64,x",
        "gopher://a",
        "http://",
        "//",
        "x" * 9999,
    ):
        yield f"to {to[:20]}", f"{files_at}/redirect?to={quote(to)}"
    for path in (
        "circle",
        "endless",
        "claims",
        "packed",
        "404",
        "500",
        "html",
        "empty",
        "reset",
    ):
        yield path, f"{files_at}/{path}"
    for text in (
        "ftp://a/b.png",
        "gopher://x",
        "http://",
        "https://[",
        "http://x:99999/",
        "http:///a",
        "unix://x",
    ):
        yield text, text
    yield "a long URL", "http://x/" + "y" * 9000
    for text in (
        "data:",
        "data:,",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,****",
    ):
        yield text, text
    for text in (
        "data:text/html,<b>",
        "data:text/plain;base64,AAAA",
        "data:image/png;base64,AAA",
        "data:image/png,%89PNG",
    ):
        yield text, text
    for text in (
        "file:///etc/passwd",
        "file://host/red.png",
        "/etc/passwd",
        "../out.png",
        "in/../../out.png",
        "file:red",
    ):
        yield text, text
    for name in (
        "escape.png",
        "loop.png",
        "folder.d",
        "pipe.png",
        "missing.png",
        "dir/escape.png",
        "red.png\0.png",
    ):
        yield name, name
    for text in ("A", "AAAAA", "=", "ä" * 8, " ", "~" * 99):
        yield f"base64 {text!a}", text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    (inside / "folder.d").mkdir(parents=True)
    outside.write_bytes(RED)
    (inside / "red.png").write_bytes(RED)
    (inside / "escape.png").symlink_to(outside)
    (inside / "loop.png").symlink_to(inside / "loop.png")
    (inside / "dir").symlink_to(tmp_path)
    (tmp_path / "escape.png").write_bytes(RED)
    os.mkfifo(inside / "pipe.png")
    return inside


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(bytes(1 << 14))
    return response


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.05)
    return response


async def served(request: web.Request) -> web.StreamResponse:
    path = request.path[1:]
    if path == "redirect":
        return web.Response(status=302, headers={"Location": request.query["to"]})
    if path == "circle":
        return web.Response(status=307, headers={"Location": "/circle"})
    if path == "slow":
        await request.app[OVER].wait()
    if path == "reset":
        assert request.transport is not None
        request.transport.abort()
    if path == "claims":
        return web.Response(body=RED, headers={"Content-Length": str(1 << 40)})
    if path == "packed":
        return web.Response(body=zlib.compress(RED), headers={"Content-Encoding": "deflate"})
    if path == "html":
        return web.Response(text="<p>", content_type="text/html")
    return web.Response(status=int(path) if path.isdigit() else 200)


@pytest.fixture
async def files_at(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server with a name that is let through and has this host's address."""
    look_up, check = fetch.socket.getaddrinfo, fetch.Resolver.check

    def found(host: str, *args: Any, **kwargs: Any) -> Any:
        numeric = kwargs.get("flags")
        return look_up("127.0.0.1" if host == NAME and not numeric else host, *args, **kwargs)

    monkeypatch.setattr(fetch.socket, "getaddrinfo", found)
    monkeypatch.setattr(fetch.Resolver, "check", lambda self, host, at: host == NAME or check(self, host, at))
    app = web.Application()
    app[OVER] = asyncio.Event()
    app.add_routes([web.get("/endless", endless), web.get("/drip", drip), web.get("/{path}", served)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://{NAME}:{runner.addresses[0][1]}"
    app[OVER].set()
    await runner.cleanup()


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
        monkeypatch.setattr("sgla.http.media.load.find_spec", lambda name: None)
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

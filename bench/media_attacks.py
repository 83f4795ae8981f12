"""What is sent in the place of pictures and is none: files, and what else a source may be, with a server that
has some of these."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web
from PIL import Image

from sgla.http.media import fetch

NAME = "pictures.test"  # which has this host's address, and is let through
NOISE = Image.frombytes("RGB", (24, 24), bytes((i * 7919 >> 3) % 256 for i in range(24 * 24 * 3)))
OVER = web.AppKey("over", asyncio.Event)  # whoever asks has gone
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


def png_of(color: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (3, 2), color).save(out, "PNG")
    return out.getvalue()


RED = png_of("red")


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


def write_folder(parent: Path) -> Path:
    """The one that files may be in."""
    inside, outside = parent / "in", parent / "out.png"
    (inside / "folder.d").mkdir(parents=True)
    outside.write_bytes(RED)
    (inside / "red.png").write_bytes(RED)
    (inside / "escape.png").symlink_to(outside)
    (inside / "loop.png").symlink_to(inside / "loop.png")
    (inside / "dir").symlink_to(parent)
    (parent / "escape.png").write_bytes(RED)
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


def let_through(put: Callable[[Any, str, Any], Any]) -> None:
    """Have fetches get at NAME. ``put``: sets an attribute."""
    look_up, check = socket.getaddrinfo, fetch.Resolver.check

    def found(host: str, *args: Any, **kwargs: Any) -> Any:
        numeric = kwargs.get("flags")
        return look_up("127.0.0.1" if host == NAME and not numeric else host, *args, **kwargs)

    put(fetch.socket, "getaddrinfo", found)
    put(fetch.Resolver, "check", lambda self, host, at: host == NAME or check(self, host, at))


@asynccontextmanager
async def sources() -> AsyncIterator[str]:
    """The address of a server at NAME."""
    app = web.Application()
    app[OVER] = asyncio.Event()
    app.add_routes([web.get("/endless", endless), web.get("/drip", drip), web.get("/{path}", served)])
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://{NAME}:{runner.addresses[0][1]}"
    app[OVER].set()
    await runner.cleanup()

"""GET /: a page to chat with the model and to watch the server. GET /docs: the API's reference.
GET /page/...: their files.

No build step, and nothing from elsewhere: other people's libraries are in vendor/, with their licences.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import threading
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

from sgla.errors import NotFound
from sgla.http.operation import BINARY, HTML, operation
from sgla.http.server import PATH_ID

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
PACKED = (".woff2",)  # compressed by themselves
VENDOR_AGE = 24 * 3600  # seconds for which a browser need not ask again for a library
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "data:",
    "media-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
# Only DOMPurify makes markup out of strings, where the browser knows trusted types.
CHAT_POLICY = POLICY | {"require-trusted-types-for": "'script'", "trusted-types": "dompurify"}
REFERENCE_POLICY = POLICY | {"style-src": "'self' 'unsafe-inline'"}  # the viewer writes style attributes


@functools.cache
def assets() -> dict[str, tuple[bytes, str]]:
    """Each file's content and ETag, by its path in this package."""
    found: dict[str, tuple[bytes, str]] = {}

    def gather(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                gather(entry, f"{prefix}{entry.name}/")
            elif suffix(entry.name) in TYPES:
                content = entry.read_bytes()
                found[prefix + entry.name] = content, hashlib.sha256(content).hexdigest()[:32]

    gather(files(__name__), "")
    return found


_packing = threading.Lock()


@functools.cache
def _packed(name: str) -> bytes:
    return gzip.compress(assets()[name][0], mtime=0)


def packed(name: str) -> bytes:
    """The file compressed by gzip, once in the life of the process, which takes up to 50 ms.
    Blocks; safe in any thread."""
    with _packing:
        return _packed(name)


def suffix(name: str) -> str:
    return name[name.rfind(".") :]


@operation("A page to chat with the model and to watch the server", media=HTML)
async def page(request: web.Request) -> web.Response:
    return await answer(request, "index.html", CHAT_POLICY)


@operation("A page that shows this description", media=HTML)
async def reference(request: web.Request) -> web.Response:
    slashes = len(request.path) - len(request.path.rstrip("/"))
    if slashes:  # the page names its files from where it should be
        return web.Response(status=308, headers={"Location": "../" * slashes + "docs"})
    return await answer(request, "reference.html", REFERENCE_POLICY)


@operation("A file of these pages", media=BINARY)
async def asset(request: web.Request) -> web.Response:
    return await answer(request, request[PATH_ID], POLICY)


async def answer(request: web.Request, name: str, policy: dict[str, str]) -> web.Response:
    """The file, compressed for browsers that take that, or 304 for one that has it. Raises NotFound."""
    if name not in assets():
        raise NotFound(f"the page has no file {name[:200]}")
    content, etag = assets()[name]
    age = f"max-age={VENDOR_AGE}" if name.startswith("vendor/") else "no-cache"
    headers = {
        "Content-Security-Policy": "; ".join(f"{part} {value}" for part, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": age,
        "ETag": f'W/"{etag}"',  # of the file, compressed or not
        "Vary": "Accept-Encoding",
    }
    if any(known.value in (etag, "*") for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    if suffix(name) not in PACKED and takes_gzip(request):
        headers["Content-Encoding"] = "gzip"
        content = await asyncio.to_thread(packed, name)
    return web.Response(body=content, content_type=TYPES[suffix(name)], charset="utf-8", headers=headers)


def takes_gzip(request: web.Request) -> bool:
    """RFC 9110, 12.5.3, but for ``*``, which browsers do not send."""
    wishes = (wish.partition(";") for wish in request.headers.get("Accept-Encoding", "").split(","))
    refused = ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return any(
        name.strip().lower() in ("gzip", "x-gzip") and weight.strip() not in refused
        for name, _, weight in wishes
    )

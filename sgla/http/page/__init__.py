"""GET /: a page to chat with the model and to watch the server. GET /docs: the API's reference. GET /page/...: their files.

No build step, and nothing from elsewhere: other people's libraries are in vendor/, with their licences.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

from sgla.errors import NotFound
from sgla.http.server import PATH_ID

TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
VENDOR_AGE = 24 * 3600  # seconds for which a browser need not ask again for a library
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "data:",
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


def suffix(name: str) -> str:
    return name[name.rfind(".") :]


async def page(request: web.Request) -> web.Response:
    return answer(request, "index.html", CHAT_POLICY)


async def reference(request: web.Request) -> web.Response:
    return answer(request, "reference.html", REFERENCE_POLICY)


async def asset(request: web.Request) -> web.Response:
    return answer(request, request[PATH_ID], POLICY)


def answer(request: web.Request, name: str, policy: dict[str, str]) -> web.Response:
    """The file, or 304 if the browser has it. Raises NotFound."""
    if name not in assets():
        raise NotFound(f"the page has no file {name[:200]}")
    content, etag = assets()[name]
    age = f"max-age={VENDOR_AGE}" if name.startswith("vendor/") else "no-cache"
    headers = {
        "Content-Security-Policy": "; ".join(f"{part} {value}" for part, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": age,
        "ETag": f'"{etag}"',
    }
    if any(known.value in (etag, "*") for known in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, content_type=TYPES[suffix(name)], charset="utf-8", headers=headers)

"""GET /: a page to chat with the model and to watch the server. One file, no build step, nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from aiohttp import web


@functools.cache
def document() -> tuple[bytes, str]:
    """The page, and a content security policy that lets it load nothing but itself and talk to this server only."""
    body = files(__name__).joinpath("index.html").read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _hash(body, "script"),
        "style-src": _hash(body, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return body, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(body: bytes, tag: str) -> str:
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), body, re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


async def page(request: web.Request) -> web.Response:
    body, policy = document()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

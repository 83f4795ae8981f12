"""What a text that stands for a picture is."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from sgla.errors import InvalidField

MAX_PATH = 4096  # characters
SHORT = 1 << 18  # bytes that the loop hashes itself, in a quarter of a millisecond


def form_of(text: str) -> str:
    """url, data, path or base64, which has neither a colon nor a dot."""
    head = text[:5].lower()
    if head == "data:":
        return "data"
    if head == "file:":
        return "path"
    if "://" in text[:64]:
        return "url"
    return "path" if len(text) <= MAX_PATH and "." in text else "base64"


def path_of(text: str) -> bytes:
    """Raises InvalidField for a file of another host."""
    if text[:5].lower() != "file:":
        return text.encode("utf-8", "surrogatepass")
    rest = text[5:]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise InvalidField("a file: URL is of this host, as file:///path")
        rest = slash + path
    return unquote_to_bytes(rest)


async def digest_of(kind: str, data: bytes, form: str) -> bytes:
    """Of a file that shows something of a ``kind``: sha256. ``form``: what the bytes are; see
    ``media/decode.py``."""
    digest = sha256(f"{kind} {form} ".encode())
    if len(data) > SHORT:
        await asyncio.to_thread(digest.update, data)
    else:
        digest.update(data)
    return digest.digest()

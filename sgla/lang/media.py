"""Pictures and videos of programs, as addresses that any backend takes."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from sgla.errors import InvalidField

URLS = ("http://", "https://", "data:")
# First bytes of a file -> its type; what a backend makes of a file follows from these, too.
TYPES = {
    "image": ((b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"), (b"BM", "bmp")),
    "video": ((b"\x1aE\xdf\xa3", "webm"), (b"RIFF", "x-msvideo")),
}
OTHER = {"image": "image/png", "video": "video/mp4"}


def address(source: Any, kind: str) -> str:
    """A URL, or a data URL with the file. Raises InvalidField."""
    if isinstance(source, str) and source.startswith(URLS):
        return source
    if isinstance(source, str | Path):
        try:
            source = Path(str(source).removeprefix("file://")).read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidField(f"{kind}(): the file cannot be read: {error}", param=kind) from error
    elif kind == "image" and hasattr(source, "save"):
        source = png_of(source)
    if not isinstance(source, bytes | bytearray | memoryview) or not len(source):
        what = "a path, a URL, bytes" + (" or an image of PIL's" if kind == "image" else "")
        raise InvalidField(f"{kind}() takes {what}, not a value of type {type(source).__name__}", param=kind)
    data = bytes(source)
    found = (f"{kind}/{name}" for head, name in TYPES[kind] if data.startswith(head))
    return f"data:{next(found, OTHER[kind])};base64,{base64.b64encode(data).decode()}"


def png_of(image: Any) -> bytes:
    """Of PIL's: upright as its EXIF says, RGB without alpha, as a server reads a file."""
    from PIL import ImageOps

    out = io.BytesIO()
    ImageOps.exif_transpose(image).convert("RGB").save(out, "PNG")
    return out.getvalue()

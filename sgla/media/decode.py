"""Files of pictures -> pixels, in a process of the pool: whatever a file is, it costs that alone."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import warnings
from pathlib import Path
from urllib.parse import unquote_to_bytes

from PIL import Image, ImageOps, UnidentifiedImageError

from sgla.errors import BadRequest, InvalidField
from sgla.media.picture import Limits, Picture

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")  # of PIL's; others run programs
SPACE = b" \t\r\n"
ANYTHING = b"application/octet-stream"  # what a file is shows in the file
Image.MAX_IMAGE_PIXELS = None  # ``decoded`` looks at it


def picture(source: bytes, form: str, limits: Limits) -> Picture:
    """``form``: what ``source`` is: a file's bytes ("file"), these in "base64", a "data" URL, or a "path".
    Raises BadRequest."""
    return decoded(
        source_bytes(source, form, limits.bytes, limits.folder, (b"image/",), "picture"), limits.pixels
    )


def source_bytes(
    source: bytes, form: str, most: int, folder: str, types: tuple[bytes, ...], kind: str
) -> bytes:
    """Those of the file that a ``source`` stands for, ``most`` of them. ``types``: how those of data URLs
    begin. Raises InvalidField."""
    if form == "path":
        source = read_inside(source, most, folder, kind)
    elif form == "data":
        source = of_data_url(source, types, kind)
    elif form == "base64":
        source = of_base64(source)
    check_size(len(source), most, kind)
    return source


def check_size(size: int, most: int, kind: str) -> None:
    if size > most:
        raise InvalidField(f"the {kind}'s file has {size} bytes; {most} (--max-media-bytes) may be")


def decoded(data: bytes, most: int) -> Picture:
    """As transformers' ``load_image``: upright as its EXIF says, the first frame, RGB without alpha."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > most:
                raise InvalidField(
                    f"the picture has {width} x {height} pixels; {most} (--max-image-pixels) may be"
                )
            ImageOps.exif_transpose(image, in_place=True)
            upright = image if image.mode == "RGB" else image.convert("RGB")
            pixels = upright.tobytes()
        return Picture.of(upright.height, upright.width, pixels)
    except UnidentifiedImageError:
        raise InvalidField(f"it is no picture of a kind that is read: {', '.join(FORMATS)}") from None
    except (BadRequest, MemoryError):
        raise
    except Exception as error:  # what PIL raises for a broken file depends on its kind
        raise InvalidField(f"the picture cannot be decoded: {type(error).__name__}: {error}") from error


def of_data_url(url: bytes, types: tuple[bytes, ...], noun: str) -> bytes:
    """Of RFC 2397."""
    head, comma, data = url.partition(b",")
    kind, *parameters = head.lower().removeprefix(b"data:").split(b";")
    if not comma:
        raise InvalidField("a data URL needs a comma before its data")
    if kind and not kind.startswith((*types, ANYTHING)):
        raise InvalidField(f"a data URL of type {kind[:40].decode('utf-8', 'replace')!r} is no {noun}")
    return of_base64(data) if b"base64" in parameters else unquote_to_bytes(data)


def of_base64(text: bytes) -> bytes:
    """Of either alphabet."""
    text = text.translate(bytes.maketrans(b"-_", b"+/"), SPACE)
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InvalidField(f"it is no URL, and no base64: {error}") from error


def read_inside(path: bytes, most: int, within: str, kind: str) -> bytes:
    """A regular file that is in the folder when all links have been followed."""
    if not within:
        raise InvalidField("this server reads no files; --allowed-media-path names a folder")
    folder = Path(within).resolve()
    try:
        found = Path(folder, os.fsdecode(path)).resolve(strict=True)
        _check_inside(found, folder)
        status = found.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidField("the path is of no regular file")
        check_size(status.st_size, most, kind)
        descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError):
        raise _outside() from None
    with os.fdopen(descriptor, "rb") as file:
        if os.path.exists(opened := f"/proc/self/fd/{descriptor}"):  # it may have become a link meanwhile
            _check_inside(Path(os.readlink(opened)), folder)
        return file.read(most + 1)


def _check_inside(found: Path, folder: Path) -> None:
    if not found.is_relative_to(folder):
        raise _outside()


def _outside() -> InvalidField:
    """The same for what is elsewhere and what is not there."""
    return InvalidField("there is no such file inside of --allowed-media-path")

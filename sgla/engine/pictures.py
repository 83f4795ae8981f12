"""Pictures that callers of ``Engine`` and ``LLM`` give: PIL's images, files, what is in them, base64 and
URLs."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sgla.config import Config
from sgla.engine.inputs import Messages, conversation_fields, kind, prompt_fields
from sgla.errors import BadRequest, InvalidField, UnsupportedField
from sgla.media.picture import Limits, Picture
from sgla.media.pool import Pool
from sgla.media.source import form_of, path_of
from sgla.messages import Facts

DECODE = "sgla.media.decode:picture"
MOST = 64  # pictures of a prompt, where the settings do not say
AT_ONCE = 8
# Types of parts of a message -> where the picture is.
PARTS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "image_url"),
    "image_pil": ("image_pil",),
}


class Given(NamedTuple):
    """Fields of a job without its pictures; ``images``: these, as the caller has them; ``param``: where they
    were given."""

    fields: dict[str, Any]
    images: list[Any]
    param: str


def prompt_given(prompt: Any, image_data: Any = None, sizes: dict[str, Any] | None = None) -> Given:
    """``sizes``: see ``model/vision/sizes.py``. Raises InvalidField."""
    fields = prompt_fields(prompt) | {"media_kwargs": sizes or {}}
    return Given(fields, images_of(image_data), "image_data")


def chat_given(messages: Messages, image_data: Any = None, sizes: dict[str, Any] | None = None) -> Given:
    """As ``prompt_given``."""
    if image_data is not None:
        raise InvalidField("the pictures of a chat are parts of its messages", param="image_data")
    made, images = taken(conversation_fields(messages)["messages"])
    return Given({"messages": made, "media_kwargs": sizes or {}}, images, "messages")


def images_of(given: Any) -> list[Any]:
    """Of one prompt: None, one picture, or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def taken(messages: Messages) -> tuple[Messages, list[Any]]:
    """The messages with ``{"type": "image"}`` where they had pictures, and these, in order."""
    found: list[Any] = []
    made = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(is_picture, content)):
            if message["role"] == "assistant":
                raise InvalidField(f"messages[{i}]: an assistant sends no pictures", param="messages")
            found += [source_of(part) for part in content if is_picture(part)]
            parts = [{"type": "image"} if is_picture(part) else part for part in content]
            message = {**message, "content": parts}
        made.append(message)
    return made, found


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def source_of(part: Mapping[str, Any]) -> Any:
    """Raises InvalidField."""
    value: Any = next((part[name] for name in PARTS[part["type"]] if part.get(name) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise InvalidField(f"a part of type {part['type']!r} has no picture", param="messages")
    return value


class Loader:
    """``pool``: processes that decode files."""

    def __init__(self, config: Config, facts: Facts | None, pool: Pool) -> None:
        self._pool, self._facts = pool, facts
        self._most = config.limit_mm_per_prompt.get("image", MOST)
        self._limits = Limits(config.max_media_bytes, config.max_image_pixels)
        self._timeout = config.media_timeout
        self._room = asyncio.Semaphore(AT_ONCE)

    async def load(self, images: Sequence[Any], param: str) -> list[Picture]:
        """Of one prompt. Raises BadRequests that name ``param``."""
        if not images:
            return []
        if self._facts is None or "image" not in self._facts.media:
            raise UnsupportedField(f"{param}: this model takes no images; leave it out", param=param)
        if find_spec("PIL") is None:
            message = f"{param}: pictures need Pillow (pip install 'sgla[mm]')"
            raise UnsupportedField(message, param=param)
        if len(images) > self._most:
            raise InvalidField(
                f"{param}: a prompt has {len(images)} pictures; {self._most} (limit_mm_per_prompt) may be",
                param=param,
            )
        try:
            return await asyncio.gather(*map(self._one, images))
        except BadRequest as error:
            raise type(error)(f"{param}: {error.message}", param=param) from error

    async def _one(self, image: Any) -> Picture:
        async with self._room:
            if hasattr(image, "convert") and hasattr(image, "tobytes"):
                return await asyncio.to_thread(picture_of, image)
            data, form = await self._file(image)
            return await self._pool.run(DECODE, data, form, self._limits, result=Picture)

    async def _file(self, image: Any) -> tuple[bytes, str]:
        """And what the bytes are: a file, or a text of some form."""
        if isinstance(image, (bytes, bytearray, memoryview)):
            return bytes(image), "file"
        if isinstance(image, str):
            form = form_of(image)
            if form == "url":
                return await asyncio.to_thread(self._fetched, image), "file"
            if form != "path":
                return image.encode("utf-8", "surrogatepass"), form
            image = os.fsdecode(path_of(image))
        elif not isinstance(image, Path):
            raise InvalidField(
                f"a picture is an image of PIL's, a path, a URL, base64 or bytes, got {kind(image)}"
            )
        try:
            return await asyncio.to_thread(Path(image).read_bytes), "file"
        except OSError as error:
            raise InvalidField(f"the picture cannot be read: {error}") from error

    def _fetched(self, url: str) -> bytes:
        if not url.startswith(("http://", "https://")):
            raise InvalidField("a picture's URL begins with http://, https://, file: or data:")
        try:
            with urllib.request.urlopen(url, timeout=self._timeout) as answer:
                data: bytes = answer.read(self._limits.bytes + 1)
        except (OSError, ValueError) as error:
            raise InvalidField(f"the picture cannot be fetched: {error}") from error
        return data


def picture_of(image: Any) -> Picture:
    """Of PIL's: upright as its EXIF says, RGB without alpha."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image).convert("RGB")
    return Picture.of(upright.height, upright.width, upright.tobytes())

"""Pictures, videos and sounds that callers of ``Engine`` and ``LLM`` give: files, what is in them, base64 and
URLs, PIL's images, and arrays of samples."""

from __future__ import annotations

import asyncio
import os
import struct
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgla.config import Config
from sgla.engine.inputs import Messages, conversation_fields, prompt_fields
from sgla.engine.inputs import kind as told
from sgla.errors import BadRequest, InvalidField
from sgla.media.picture import Picture
from sgla.media.pool import Pool
from sgla.media.readers import NEEDS, READERS, Medium, check_taken, limits_of, most_of
from sgla.media.sound import RATE
from sgla.media.source import digest_of, form_of, path_of
from sgla.messages import Facts, Prepared
from sgla.text.parts import PICTURES, SOUNDS, TEXTS, VIDEOS, check_one, held

if TYPE_CHECKING:
    from sgla.actors.pictures import PictureRoom

AT_ONCE = 8
# Types of parts of a message -> what it is, and where that is.
PARTS = {
    name: (kind, names)
    for kind, types in (("image", PICTURES), ("video", VIDEOS), ("audio", SOUNDS))
    for name, names in types.items()
} | {"image_pil": ("image", ("image_pil",))}
THINGS = {"image": "picture", "video": "video", "audio": "sound"}


class Shown(NamedTuple):
    """What a prompt shows, of each kind None, one or several; ``sizes``: see ``model/vision/sizes.py``."""

    image: Any = None
    video: Any = None
    audio: Any = None
    sizes: dict[str, Any] | None = None

    def each(self, count: int) -> list[Shown]:
        """Of each of ``count`` prompts, whose media come as lists. Raises ValueError."""
        kinds = zip(self, ("lists of pictures", "lists of videos", "lists of sounds", "mm_processor_kwargs"))
        return [Shown(*own) for own in zip(*(each(values, count, name) for values, name in kinds))]


NOTHING = Shown()


class Given(NamedTuple):
    """Fields of a job without its media; ``media``: these, by kind and as the caller has them; ``param``:
    where they were given, if not in a field for each kind."""

    fields: dict[str, Any]
    media: list[tuple[str, Any]]
    param: str = ""


def each(values: Any, count: int, name: str) -> list[Any]:
    """One of ``values`` for each of ``count`` inputs. Raises ValueError."""
    apart = isinstance(values, (list, tuple)) and not is_recorded(values)
    found = list(values) if apart else [values] * count
    if len(found) != count:
        raise ValueError(f"{count} inputs but {len(found)} {name}")
    return found


def prompt_given(prompt: Any, shown: Shown = NOTHING) -> Given:
    """Raises InvalidField."""
    media = [(kind, one) for kind in THINGS for one in several(getattr(shown, kind))]
    return Given(prompt_fields(prompt) | {"media_kwargs": shown.sizes or {}}, media)


def chat_given(messages: Messages, shown: Shown = NOTHING) -> Given:
    """As ``prompt_given``."""
    for kind in THINGS:
        if getattr(shown, kind) is not None:
            param = f"{kind}_data"
            raise InvalidField(f"the {THINGS[kind]}s of a chat are parts of its messages", param=param)
    made, media = taken(conversation_fields(messages)["messages"])
    return Given({"messages": made, "media_kwargs": shown.sizes or {}}, media, "messages")


def several(given: Any) -> list[Any]:
    """Of one prompt: None, one, or several."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) and not is_recorded(given) else [given]


def is_recorded(value: Any) -> bool:
    """Whether it is a sound's samples, with how many there are a second (as vLLM has it)."""
    return isinstance(value, tuple) and len(value) == 2 and is_array(value[0]) and not is_array(value[1])


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def taken(messages: Messages) -> tuple[Messages, list[tuple[str, Any]]]:
    """The messages with ``{"type": "image"}`` and the like where they had media, and these, in order."""
    found: list[tuple[str, Any]] = []
    made = []
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and (kind := part.get("type")) in TEXTS:
                check_one(part, (TEXTS[kind],), f"messages[{i}].content[{j}]")
        if isinstance(content, list) and any(map(is_medium, content)):
            if message["role"] == "assistant":
                raise InvalidField(
                    f"messages[{i}]: an assistant sends no pictures, sounds or videos", param="messages"
                )
            found += [
                source_of(part, f"messages[{i}].content[{j}]")
                for j, part in enumerate(content)
                if is_medium(part)
            ]
            parts = [{"type": PARTS[part["type"]][0]} if is_medium(part) else part for part in content]
            message = {**message, "content": parts}
        made.append(message)
    return made, found


def is_medium(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def source_of(part: Mapping[str, Any], place: str) -> tuple[str, Any]:
    """Kind and value. Raises InvalidField."""
    kind, names = PARTS[part["type"]]
    value, _ = held(part, names, place)
    if value is None:
        raise InvalidField(f"{place}: a part of type {part['type']!r} has no {THINGS[kind]}", param=place)
    return kind, value


class Loader:
    """``pool``: processes that decode files; ``room``: what knows what was made of earlier ones, of a model
    that takes any."""

    def __init__(self, config: Config, facts: Facts | None, pool: Pool, room: PictureRoom | None) -> None:
        self._pool, self._facts, self._known = pool, facts, room
        self._most, self._limits, self._bytes = most_of(config), limits_of(config), config.max_media_bytes
        self._timeout = config.media_timeout
        self._room = asyncio.Semaphore(AT_ONCE)

    async def load(self, given: Given) -> list[Medium | Prepared]:
        """Of one prompt. Raises BadRequests that name where each was given."""
        for kind in dict.fromkeys(kind for kind, _ in given.media):
            count = sum(one == kind for one, _ in given.media)
            self._check(kind, count, given.param or f"{kind}_data")
        return await asyncio.gather(*(self._placed(kind, value, given) for kind, value in given.media))

    def _check(self, kind: str, count: int, param: str) -> None:
        check_taken(kind, self._facts, param)
        if count > (most := self._most[kind]):
            raise InvalidField(
                f"{param}: a prompt has {count} {NEEDS[kind].things}; {most} (limit_mm_per_prompt) may be",
                param=param,
            )

    async def _placed(self, kind: str, value: Any, given: Given) -> Medium | Prepared:
        param = given.param or f"{kind}_data"
        try:
            return await self._one(kind, value, given)
        except BadRequest as error:
            raise type(error)(f"{param}: {error.message}", param=param) from error

    async def _one(self, kind: str, value: Any, given: Given) -> Medium | Prepared:
        async with self._room:
            if kind == "image" and hasattr(value, "convert") and hasattr(value, "tobytes"):
                return await asyncio.to_thread(picture_of, value)
            data, form = await self._file(kind, value)
            digest = await digest_of(kind, data, form)
            if self._known is not None:
                sizes, several = given.fields["media_kwargs"], len(given.media) > 1
                if (known := self._known.known(digest, sizes, several)) is not None:
                    return known
            function, kind_of = READERS[kind]
            made = await self._pool.run(function, data, form, self._limits[kind], result=kind_of)
            if self._known is not None:
                self._known.came(digest, made)
            return made

    async def _file(self, kind: str, value: Any) -> tuple[bytes, str]:
        """And what the bytes are: a file, or a text of some form."""
        thing = THINGS[kind]
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value), "file"
        if isinstance(value, str):
            form = form_of(value)
            if form == "url":
                return await asyncio.to_thread(self._fetched, thing, value), "file"
            if form != "path":
                return value.encode("utf-8", "surrogatepass"), form
            value = os.fsdecode(path_of(value))
        elif kind == "audio" and (is_recorded(value) or is_array(value)):
            samples, rate = value if is_recorded(value) else (value, RATE)
            return await asyncio.to_thread(wave, samples, rate), "file"
        elif not isinstance(value, Path):
            others = {"image": "an image of PIL's, ", "audio": "samples with their rate, "}
            raise InvalidField(
                f"a {thing} is {others.get(kind, '')}a path, a URL, base64 or bytes, got {told(value)}"
            )
        try:
            return await asyncio.to_thread(Path(value).read_bytes), "file"
        except OSError as error:
            raise InvalidField(f"the {thing} cannot be read: {error}") from error

    def _fetched(self, thing: str, url: str) -> bytes:
        if not url.startswith(("http://", "https://")):
            raise InvalidField(f"a {thing}'s URL begins with http://, https://, file: or data:")
        try:
            with urllib.request.urlopen(url, timeout=self._timeout) as answer:
                data: bytes = answer.read(self._bytes + 1)
        except (OSError, ValueError) as error:
            raise InvalidField(f"the {thing} cannot be fetched: {error}") from error
        return data


def wave(samples: Any, rate: Any) -> bytes:
    """A file of a sound: float32[n], or [channels, n], whose mean counts; whole numbers are of their type's
    range. Raises InvalidField."""
    values = np.asarray(samples)
    if type(rate) is not int and not (isinstance(rate, float | np.number) and rate == int(rate)):
        raise InvalidField(f"a sound's samples come with how many there are a second, got {told(rate)}")
    if values.dtype.kind == "i":
        values = values / (np.iinfo(values.dtype).max + 1)
    if values.dtype.kind != "f" or values.ndim not in (1, 2):
        raise InvalidField(f"a sound is an array [n] or [channels, n], got {values.dtype}{values.shape}")
    if values.ndim == 2:
        values = values.mean(int(np.argmin(values.shape)))
    data = values.astype("<f4").tobytes()
    head = struct.pack("<HHIIHH", 3, 1, int(rate), 4 * int(rate), 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def picture_of(image: Any) -> Picture:
    """Of PIL's: upright as its EXIF says, RGB without alpha."""
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image).convert("RGB")
    return Picture.of(upright.height, upright.width, upright.tobytes())

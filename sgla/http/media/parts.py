"""Where pictures, sounds and videos stand in requests: content parts of all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sgla.errors import InvalidField, UnsupportedField
from sgla.text.parts import HOLDERS, PICTURES, SOUNDS, VIDEOS, held
from sgla.text.template import SHOWN

Message = dict[str, Any]

MEDIA = PICTURES | SOUNDS | VIDEOS
SHOWN_AS = ((PICTURES, "image", "picture"), (SOUNDS, "audio", "sound"), (VIDEOS, "video", "video"))
OTHERS = (
    *("file", "input_file"),
    *("image_embeds", "audio_embeds", "image_pil", "vision_chunk"),
)
# OpenAI's, and others that are read. What a file is follows from the file.
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "webm", "aac", "mpeg", "mpga")
DETAILS = ("auto", "low", "high", "original")
KNOWN = {"type", "url", "data", "detail", "format"}
READ = ("user", "tool", "system", "developer", "function")  # roles whose messages may have pictures


class Source(NamedTuple):
    """Where a picture, a sound or a video (``kind``: "image", "audio", "video") comes from: a URL, base64, or
    a path; ``place``: of it in the request. Stands for it among a message's parts."""

    text: str
    place: str
    kind: str = "image"
    ignored: tuple[str, ...] = ()  # fields beside it that nobody knows, for the header of the answer

    @property
    def part(self) -> Message:
        """What stands for it in a chat template."""
        return {"type": self.kind}


def source_of(part: dict[str, Any], place: str) -> Source | None:
    """None for a part that is none. Raises InvalidField, and UnsupportedField for other media."""
    kind = part.get("type")
    if kind in OTHERS:
        raise UnsupportedField(
            f"{place}: parts of type {kind!r} are not supported by this server, which reads texts, "
            "pictures, sounds and videos; leave it out",
            param=place,
        )
    if not isinstance(kind, str) or kind not in MEDIA:
        return None
    if part.get("file_id") is not None:
        raise UnsupportedField(f"{place}.file_id is not supported by this server; send a URL", param=place)
    value, beside = held(part, MEDIA[kind], place)
    medium, named = next(entry for kinds, *entry in SHOWN_AS if kind in kinds)
    if medium == "image" and beside.get("detail") not in (None, *DETAILS):
        raise InvalidField(f"{place}: detail must be one of {', '.join(DETAILS)}", param=place)
    if medium == "audio" and beside.get("format") not in (None, *AUDIO_FORMATS):
        raise InvalidField(f"{place}: format must be one of {', '.join(AUDIO_FORMATS)}", param=place)
    if not isinstance(value, str) or not value:
        raise InvalidField(f"{place}: a {named} needs a URL, or base64", param=place)
    strange = sorted(name for name in beside.keys() - HOLDERS - KNOWN if beside[name] is not None)
    return Source(value, place, medium, tuple(f"{kind}.{name}" for name in strange))


def taken(messages: list[Message]) -> tuple[list[Message], list[Source]]:
    """``messages`` with parts that stand for their pictures, sounds and videos, and these, in order.
    Raises InvalidField for one that the assistant says, UnsupportedField."""
    sources: list[Source] = []
    result = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(may_be, content)):
            parts = list(_looked_at(content, f"messages[{i}].content", sources))
            if len(sources) and message.get("role") not in READ and any(part in SHOWN for part in parts):
                raise InvalidField(
                    f"messages[{i}]: an assistant sends no pictures, sounds or videos",
                    param=f"messages[{i}].content",
                )
            message = {**message, "content": parts}
        result.append(message)
    return result, sources


def has_pictures(messages: list[Message]) -> bool:
    """Whether ``taken`` would find something."""
    contents = (message.get("content") for message in messages)
    return any(may_be(part) for content in contents if isinstance(content, list) for part in content)


def may_be(part: Any) -> bool:
    """Whether a part is a picture, a sound, a video, or another medium."""
    if not isinstance(part, dict):
        return isinstance(part, Source)
    kind = part.get("type")
    return isinstance(kind, str) and (kind in MEDIA or kind in OTHERS)


def _looked_at(content: list[Any], place: str, sources: list[Source]) -> Iterator[Any]:
    for i, part in enumerate(content):
        found = (
            part if isinstance(part, Source) else source_of(part, f"{place}[{i}]") if may_be(part) else None
        )
        if found is not None:
            sources.append(found)
        yield part if found is None else found.part

"""Content parts of messages: in which of its fields a part holds what it is, by its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgla.errors import InvalidField, UnsupportedField

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# As clients of OpenAI's, vLLM's and transformers' send them.
PICTURES = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "image_url"),
}
SOUNDS = {
    "input_audio": ("input_audio",),
    "audio_url": ("audio_url",),
    "audio": ("audio", "url", "audio_url"),
}
VIDEOS = {
    "video_url": ("video_url",),
    "input_video": ("video_url", "input_video"),
    "video": ("video", "url", "video_url"),
}
HOLDERS = frozenset(
    {
        *TEXTS.values(),
        *(name for kinds in (PICTURES, SOUNDS, VIDEOS) for names in kinds.values() for name in names),
        *("source", "file", "file_id", "file_url", "file_data", "image_pil", "image_embeds", "audio_embeds"),
    }
)
# What some clients write beside a picture or a video, and a request says of all of its media here.
SIZES = frozenset(
    {
        *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
        *("fps", "nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end"),
        *("min_dynamic_patch", "max_dynamic_patch"),
    }
)


def held(part: Mapping[str, Any], own: Sequence[str], place: str) -> tuple[Any, Mapping[str, Any]]:
    """What a picture, a sound or a video is in one of its ``own`` fields: what stands there, or the ``url``
    or ``data`` of an object; and what is said beside it. Raises InvalidField, UnsupportedField."""
    check_one(part, own, place)
    value = next((part[name] for name in own if not is_empty(part.get(name))), None)
    beside = part
    if isinstance(value, Mapping):
        beside = {**part, **value}
        check_apart([name for name in ("url", "data") if value.get(name)], place)
        value = value.get("url") or value.get("data")
    for name in beside.keys() & SIZES:
        if beside[name] is not None:
            raise UnsupportedField(
                f"{place}.{name} is not supported in a part; the request's mm_processor_kwargs say it of all",
                param=place,
            )
    return value, beside


def check_one(part: Mapping[str, Any], own: Sequence[str], place: str) -> None:
    """That a part holds one thing, in one of its ``own`` fields: of two, one would be dropped without a word.
    Raises InvalidField."""
    if len(part) <= 1 + ("type" in part):
        return
    there = sorted(name for name in part.keys() & HOLDERS if not is_empty(part[name]))
    if strange := [name for name in there if name not in own]:
        kind = f"of type {str(part['type'])[:40]!r}" if "type" in part else f"with {' or '.join(own)}"
        raise InvalidField(
            f"{place}: a part {kind} has no {strange[0]}; send that as a part of its own", param=place
        )
    check_apart(there, place)


def check_apart(there: Sequence[str], place: str) -> None:
    """Raise InvalidField for a thing that is in more than one field."""
    if len(there) > 1:
        raise InvalidField(f"{place} may have {there[0]} or {there[1]}, not both", param=place)


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)

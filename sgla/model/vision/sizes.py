"""What users may ask of a family's processors (vLLM's ``mm_processor_kwargs``): how large pictures and frames
of videos become, how many of these are seen, and so how many tokens they have. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.errors import InvalidField, UnsupportedField
from sgla.model.vision.spec import Vision

PARAM = "mm_processor_kwargs"
EDGES = ("shortest_edge", "longest_edge", "height", "width")
MOST = 1 << 30
FASTEST = 240  # frames a second
INSIDE = ("image", "images_kwargs", "video", "videos_kwargs")  # as SGLang and transformers have it
OF_VIDEOS = ("fps", "num_frames")


def checked_sizes(vision: Vision, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``vision.sizes``. Raises UnsupportedField for others, and InvalidField."""
    if len(given) == 1 and (inside := next(iter(given))) in INSIDE:
        given = given[inside]
        if not isinstance(given, Mapping):
            raise InvalidField(f"{PARAM}: {inside!r} must be an object", param=PARAM)
    if "fps" in given and "num_frames" in given:
        raise InvalidField(f"{PARAM} has fps and num_frames; leave one of the two out", param=PARAM)
    for name, value in given.items():
        if name not in vision.sizes:
            takes = ", ".join(vision.sizes) or "none"
            raise UnsupportedField(
                f"{PARAM} with {str(name)[:40]!r} is not supported for this model, which takes {takes}; "
                "leave it out",
                param=PARAM,
            )
        _check(name, value)
    return dict(given)


def _check(name: str, value: Any) -> None:
    if name == "size":
        if not isinstance(value, Mapping) or not value or set(value) - set(EDGES):
            raise InvalidField(f"{PARAM}: size must have some of {', '.join(EDGES)}", param=PARAM)
        for edge, pixels in value.items():
            _check_number(f"size.{edge}", pixels)
    elif name == "fps":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= FASTEST:
            raise InvalidField(f"{PARAM}: fps must be above 0, and at most {FASTEST}", param=PARAM)
    else:
        _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    if type(value) is not int or not 0 < value <= MOST:
        raise InvalidField(
            f"{PARAM}: {name} must be a whole number from 1 to {MOST}, got {str(value)[:40]!r}", param=PARAM
        )

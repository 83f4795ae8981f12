"""What looks at a file of each kind of media, and what files may be."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from sgla.config import MediaSettings
from sgla.errors import UnsupportedField
from sgla.media.picture import Limits, Picture
from sgla.media.sound import Hearable, Sound
from sgla.media.video import Video, Watchable
from sgla.messages import Facts

Medium = Picture | Sound | Video


class Need(NamedTuple):
    """``module`` of a ``library`` reads files of a kind. Models take ``taken``; prompts have ``things``."""

    module: str
    library: str
    taken: str
    things: str


MOST = 64  # of a kind in a prompt, where --limit-mm-per-prompt does not say
NEEDS = {
    "image": Need("PIL", "Pillow", "images", "pictures"),
    "audio": Need("av", "PyAV", "sounds", "sounds"),
    "video": Need("av", "PyAV", "videos", "videos"),
}
# What looks at a file in a process of the pool, and what that gives.
READERS: dict[str, tuple[str, type[Medium]]] = {
    "image": ("sgla.media.decode:picture", Picture),
    "audio": ("sgla.media.listen:sound", Sound),
    "video": ("sgla.media.watch:video", Video),
}


def limits_of(settings: MediaSettings, folder: str = "") -> dict[str, Limits | Hearable | Watchable]:
    """``folder``: where files may be, "" nowhere."""
    size, pixels = settings.max_media_bytes, settings.max_image_pixels
    return {
        "image": Limits(size, pixels, folder),
        "audio": Hearable(size, settings.max_audio_seconds, folder),
        "video": Watchable(size, pixels, settings.max_video_seconds, settings.max_video_frames, folder),
    }


def most_of(settings: MediaSettings) -> dict[str, int]:
    """How many a prompt may have."""
    return {kind: settings.limit_mm_per_prompt.get(kind, MOST) for kind in NEEDS}


def check_taken(kind: str, facts: Facts | None, place: str) -> None:
    """Raise UnsupportedField for what the model or this installation does not take, with what would help."""
    module, library, taken, things = NEEDS[kind]
    if facts is None or kind not in facts.media:
        why = facts.untaken.get(kind) if facts is not None else None
        raise UnsupportedField(f"{place}: {why or f'this model takes no {taken}; leave it out'}", param=place)
    if find_spec(module) is None:
        raise UnsupportedField(
            f"{place}: no {things} are taken: this server lacks {library} (pip install 'sgla[mm]')",
            param=place,
        )

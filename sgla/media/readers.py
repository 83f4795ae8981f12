"""What looks at a file of each kind of media, and what files may be."""

from __future__ import annotations

from sgla.config import MediaSettings
from sgla.media.picture import Limits, Picture
from sgla.media.sound import Hearable, Sound
from sgla.media.video import Video, Watchable

Medium = Picture | Sound | Video
MOST = 64  # of a kind in a prompt, where --limit-mm-per-prompt does not say
# What reads them, and what they are called.
NEEDS = {
    "image": ("PIL", "Pillow", "images", "pictures"),
    "audio": ("av", "PyAV", "sounds", "sounds"),
    "video": ("av", "PyAV", "videos", "videos"),
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

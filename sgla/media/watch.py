"""Files of videos, in processes of the pool: what one has, and some of its frames, by FFmpeg's decoders
(PyAV)."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sgla.errors import BadRequest, InvalidField
from sgla.media.decode import source_bytes
from sgla.media.video import Video, Watchable

FORMATS = ("mp4", "webm", "avi")  # the second for Matroska, too
TYPES = (b"video/", b"image/gif")  # of data URLs
GUESS = 24.0  # frames a second of a file that does not say


def video(source: bytes, form: str, limits: Watchable) -> Video:
    """``form``: as of ``decode.picture``. Raises BadRequest."""
    data = source_bytes(source, form, limits.bytes, limits.folder, TYPES, "video")
    if not (kind := format_of(data)):
        raise InvalidField(f"it is no video of a kind that is read: {', '.join(FORMATS)}")
    with opened(data, kind) as (file, stream):
        height, width = stream.height, stream.width
        if not 0 < width * height <= limits.pixels:
            raise InvalidField(
                f"the video has {width} x {height} pixels; {limits.pixels} (--max-image-pixels) may be"
            )
        rate = float(stream.average_rate or stream.guessed_rate or GUESS)
        most = min(limits.frames, int(limits.seconds * rate))
        told = max(stream.frames, counted(file, stream, most))
        if told > most:
            raise InvalidField(
                f"the video has more than {limits.frames} frames (--max-video-frames), or than "
                f"{limits.seconds:g} s (--max-video-seconds)"
            )
    return Video.of(data, kind, told, rate, height, width)


def format_of(data: bytes) -> str:
    """By its first bytes, "" for another one: see ``listen.format_of``."""
    head = data[:12]
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "webm"
    return "avi" if head[:4] == b"RIFF" and head[8:] == b"AVI " else ""


@contextmanager
def opened(data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """The file and its first track of frames. Raises InvalidField, also for what goes wrong inside."""
    import av

    av.logging.set_level(None)
    try:
        with av.open(io.BytesIO(data), format=kind, options={"protocol_whitelist": ""}) as file:
            if not file.streams.video:
                raise InvalidField("the file has no video")
            stream = file.streams.video[0]
            stream.codec_context.thread_count = 1
            yield file, stream
    except (BadRequest, MemoryError):
        raise
    except Exception as error:  # what FFmpeg says of a broken file depends on its kind
        raise InvalidField(f"the video cannot be decoded: {type(error).__name__}: {error}"[:300]) from error


def counted(file: Any, stream: Any, most: int) -> int:
    """Frames that the file has; no more than ``most`` and one are looked for. Raises InvalidField for a file
    that is cut."""
    found = 0
    for packet in file.demux(stream):
        found += packet.size > 0
        if found > most:
            return found
    if not found or found < stream.frames:
        raise InvalidField(f"the video is cut: its head tells of {stream.frames} frames, and {found} come")
    return found


def frames(video: Video, numbers: Sequence[int]) -> Iterator[Any]:
    """Those of the ``numbers``, which rise: uint8[height, width, 3]. Raises InvalidField."""
    wanted = iter(numbers)
    number = next(wanted, None)
    with opened(video.data, video.format) as (file, stream):
        for i, frame in enumerate(file.decode(stream)):
            if i != number:
                continue
            if (frame.height, frame.width) != (video.height, video.width):
                raise InvalidField("the video has frames of several sizes")
            yield frame.to_ndarray(format="rgb24")
            if (number := next(wanted, None)) is None:
                return
    raise InvalidField(f"the video is cut: its frame {number} cannot be decoded")

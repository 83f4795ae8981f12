"""A video as it comes, and what one may be."""

from __future__ import annotations

import hashlib

import msgspec


class Watchable(msgspec.Struct, frozen=True, array_like=True):
    """``bytes`` of a file, ``pixels`` of a frame, ``seconds`` and ``frames`` of a video; ``folder``: where
    files may be, "" nowhere."""

    bytes: int
    pixels: int
    seconds: float
    frames: int
    folder: str = ""


class Video(msgspec.Struct, frozen=True, array_like=True):
    """``data``: the file, of which few frames are decoded, once it is known which. ``digest``: its sha256.
    ``format``: of FFmpeg's demuxers. ``frames``: of the whole video, ``rate`` a second."""

    digest: bytes
    data: bytes
    format: str
    frames: int
    rate: float
    height: int
    width: int

    @classmethod
    def of(cls, data: bytes, format: str, frames: int, rate: float, height: int, width: int) -> Video:
        digest = hashlib.sha256(b"video" + data).digest()
        return cls(digest, data, format, frames, rate, height, width)

    @property
    def size(self) -> int:
        return len(self.data)

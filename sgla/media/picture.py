"""A decoded picture, and what one may be."""

from __future__ import annotations

import hashlib
import struct

import msgspec


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """``bytes`` of a file, ``pixels`` of a picture; ``folder``: where files may be, "" nowhere."""

    bytes: int
    pixels: int
    folder: str = ""


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """``pixels``: uint8[height, width, 3], RGB, row by row. ``digest``: sha256 of the size and the pixels,
    so two files with equal pixels are one picture."""

    digest: bytes
    height: int
    width: int
    pixels: bytes

    @classmethod
    def of(cls, height: int, width: int, pixels: bytes) -> Picture:
        digest = hashlib.sha256(struct.pack("<II", height, width))
        digest.update(pixels)
        return cls(digest.digest(), height, width, pixels)

    @property
    def size(self) -> int:
        return len(self.pixels)

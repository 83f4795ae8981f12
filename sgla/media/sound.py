"""A decoded sound, and what one may be."""

from __future__ import annotations

import hashlib

import msgspec

RATE = 16_000  # samples a second: of all models that hear
SHORTEST = 0.1  # seconds


class Hearable(msgspec.Struct, frozen=True, array_like=True):
    """``bytes`` of a file, ``seconds`` of a sound; ``folder``: where files may be, "" nowhere."""

    bytes: int
    seconds: float
    folder: str = ""


class Sound(msgspec.Struct, frozen=True, array_like=True):
    """``samples``: float32[n], mono, RATE a second, full scale 1. ``digest``: their sha256, so two files with
    equal samples are one sound."""

    digest: bytes
    samples: bytes

    @classmethod
    def of(cls, samples: bytes) -> Sound:
        return cls(hashlib.sha256(b"sound" + samples).digest(), samples)

    @property
    def size(self) -> int:
        return len(self.samples)

    @property
    def seconds(self) -> float:
        return len(self.samples) / 4 / RATE

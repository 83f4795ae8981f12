"""Arrays of numbers as bytes behind each other, which servers send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = bytes | memoryview
Told = tuple[str, str, list[int], int]
"""Of an array: its name, numpy's name of its dtype, its shape, and where it begins."""

ALIGNED = 64  # bytes
FEATURES = "features."  # begins the names of a picture's features, the first of which take its tokens' places
# Of a picture that the tower cuts into patches: see ``media/pixels.py``.
PIXELS, LEVELS, BLOCK = "pixels", "levels", "block"
PATCHED = 8  # bytes of a byte of PIXELS as patches: in float32, and in each of two frames


def joined(arrays: Mapping[str, NDArray[Any]]) -> tuple[list[Told], bytes]:
    told, data = list[Told](), bytearray()
    for name, values in arrays.items():
        data += bytes(-len(data) % ALIGNED)
        told.append((name, str(values.dtype), list(values.shape), len(data)))
        data += np.ascontiguousarray(values).tobytes()
    return told, bytes(data)


def parted(told: Sequence[Told], data: Bytes) -> dict[str, NDArray[Any]]:
    """Views of the ``data``. Raises ValueError and TypeError for what is not in it."""
    return {
        name: np.frombuffer(data, np.dtype(kind), prod(shape), first).reshape(shape)
        for name, kind, shape, first in told
    }


def size_as_patches(name: str, shape: Sequence[int], dtype: str) -> int:
    """Bytes that a processor of transformers makes of an array."""
    return prod(shape) * np.dtype(dtype).itemsize * (PATCHED if name == PIXELS else 1)


def checked(data: Bytes) -> bytes:
    """A checksum."""
    return blake2b(data, digest_size=16).digest()

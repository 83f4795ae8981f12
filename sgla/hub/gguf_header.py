"""The header of a GGUF file: metadata and the table of tensors, within bounds whatever the file says.

Parsed here, because the ``gguf`` package's reader makes numpy views of every token string (seconds for a
large vocabulary, against a tenth of one). Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from sgla.errors import WeightError

MOST_BYTES = 1 << 28  # of a header; the largest vocabularies take 16 MiB
MOST_ENTRIES = 1 << 16  # keys, and tensors
MOST_ITEMS = 1 << 22  # of all arrays together; the largest vocabularies have 1.3 million
MOST_DIMS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor in the file.
    ``shape`` is row-major as in torch; ``type`` a GGML type number; ``offset`` in bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """``data``: where the tensors' data begins, in bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: int


class _Cursor:
    """Reads GGUF values from a buffer; ``at`` is the offset of the next byte.
    Raises ValueError for what cannot be."""

    def __init__(self, buffer: mmap.mmap, at: int) -> None:
        self.buffer = buffer
        self.at = at
        self.end = min(len(buffer), MOST_BYTES)
        self.items = MOST_ITEMS

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._require(size)
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += size
        return value

    def _require(self, size: int) -> None:
        if self.at + size <= self.end:
            return
        if self.end == MOST_BYTES:
            raise ValueError(f"its header has more than {MOST_BYTES >> 20} MiB")
        raise ValueError("it ends within its header; is the download complete?")

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """``count`` length-prefixed strings; the hot loop of the parse (10^5 tokens)."""
        unpack, buffer, at, end = struct.Struct("<Q").unpack_from, self.buffer, self.at, self.end
        found = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(buffer, at)[0] if start <= end else start
            if at > end:
                self._require(at - self.at)
            found.append(buffer[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        item, count = self.scalar("I"), self.scalar("Q")
        if item != _STRING and item not in _SCALARS:
            raise ValueError(f"an array has items of type {item}")
        if count > self.items:
            raise ValueError(f"its arrays have more than {MOST_ITEMS} items")
        self.items -= count
        if item == _STRING:
            self._require(8 * count)
            return self.strings(count)
        kind = np.dtype("<" + _SCALARS[item])
        self._require(kind.itemsize * count)
        values: list[Any] = np.frombuffer(self.buffer, kind, count, self.at).tolist()
        self.at += kind.itemsize * count
        return values


def parse(buffer: mmap.mmap) -> Header:
    """Raises ValueError, saying what is wrong,
    for anything but a whole header with keys and tensors of different names."""
    if buffer[:4] != b"GGUF":
        raise ValueError("it does not start with the bytes GGUF")
    cursor = _Cursor(buffer, 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        order = " in big-endian order" if version & 0xFFFF == 0 else ""
        raise ValueError(f"version {version}{order} is not supported (2 and 3, little-endian, are)")
    counts = cursor.scalar("Q"), cursor.scalar("Q")
    for count, what in zip(counts, ("tensors", "keys")):
        if count > MOST_ENTRIES:
            raise ValueError(f"it counts {count} {what}; at most {MOST_ENTRIES} are read")
    metadata: dict[str, Any] = {}
    for _ in range(counts[1]):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the key {key!r} is there twice")
        try:
            metadata[key] = cursor.value(cursor.scalar("I"))
        except ValueError as error:
            raise ValueError(f"{error} (at the key {key[:100]!r})") from error
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(counts[0]):
        tensor = _tensor(cursor)
        if tensor.name in tensors:
            raise ValueError(f"the tensor {tensor.name!r} is there twice")
        tensors[tensor.name] = tensor
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or align < 1 or align & (align - 1):
        raise ValueError(f"general.alignment is {align!r}, not a power of two")
    return Header(metadata, tensors, -(-cursor.at // align) * align)


def _tensor(cursor: _Cursor) -> GGUFTensor:
    name, dims = cursor.string(), cursor.scalar("I")
    if not 1 <= dims <= MOST_DIMS:
        raise ValueError(f"the tensor {name[:100]!r} has {dims} dims; 1 to {MOST_DIMS} are possible")
    shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]
    if 0 in shape:
        raise ValueError(f"the tensor {name[:100]!r} has no values")
    return GGUFTensor(name, cursor.scalar("I"), shape, cursor.scalar("Q"))


def check_places(header: Header, size: int) -> None:
    """Raises WeightError for a tensor of a type that cannot be decoded, or whose data is not all its own part
    of a file of ``size`` bytes."""
    from gguf.constants import GGML_QUANT_SIZES

    names, end, before = decodable(), header.data, ""
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.type not in names:
            raise WeightError(
                f"tensor {tensor.name} has type {type_name(tensor.type)}, which cannot be decoded; "
                f"these can: {', '.join(names.values())}"
            )
        block, bytes_of_block = GGML_QUANT_SIZES[tensor.type]  # type: ignore[index]
        if tensor.shape[-1] % block:
            raise WeightError(
                f"tensor {tensor.name}: rows of {tensor.shape[-1]} values are "
                f"not whole blocks of {names[tensor.type]}"
            )
        start = header.data + tensor.offset
        if start < end:
            raise WeightError(f"tensor {tensor.name} lies in the data of tensor {before}")
        end, before = start + prod(tensor.shape) // block * bytes_of_block, tensor.name
        if end > size:
            raise WeightError(f"the file ends before tensor {tensor.name} does; is the download complete?")


@cache
def decodable() -> dict[int, str]:
    """Number -> name of the types that the ``gguf`` package decodes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    names = {}
    for kind in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        names[int(kind)] = kind.name
    return names


def type_name(number: int) -> str:
    """As ``Q4_1``, or the number of an unknown type."""
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return str(number)

"""How values cross to a process of the pool and back: as msgpack on a pipe, but large bytes by memory that
both sides have open, which a thread copies while others go on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

LARGE = 64 << 10
BYTES = (bytes, bytearray, memoryview)

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class Record(msgspec.Struct, array_like=True):
    """What the pipe carries of a value: msgpack with an Ext in place of each large part, and their sizes."""

    sizes: list[int]
    rest: msgspec.Raw


class Memory:
    """A file without a name, which is gone when nobody refers to it: a thread may still be at work on it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous() if descriptor is None else descriptor

    def write(self, parts: Sequence[Buffer]) -> None:
        """Blocks."""
        at = 0
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                written = os.pwrite(self.descriptor, view, at)
                view, at = view[written:], at + written

    def read(self, sizes: Sequence[int]) -> list[bytes]:
        """What ``write`` wrote, which is then forgotten. Blocks. Raises EOFError if there is less."""
        if os.fstat(self.descriptor).st_size < sum(sizes):
            raise EOFError("a part of a task or an answer is missing")
        found, at = [], 0
        for size in sizes:
            found.append(os.pread(self.descriptor, size, at))
            at += size
        os.ftruncate(self.descriptor, 0)
        return found

    def __del__(self) -> None:
        os.close(self.descriptor)


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("media")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def packed(value: Any) -> tuple[bytes, list[Buffer]]:
    """A Record, and the parts for ``Memory.write``."""
    parts: list[Buffer] = []

    def small(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: small(each) for key, each in item.items()}
        if isinstance(item, list | tuple):
            return [small(each) for each in item]
        if isinstance(item, BYTES) and memoryview(item).nbytes >= LARGE:
            parts.append(item)
            return msgspec.msgpack.Ext(0, b"")
        return item

    rest = msgspec.msgpack.encode(small(msgspec.to_builtins(value, builtin_types=BYTES)))
    sizes = [memoryview(part).nbytes for part in parts]
    return msgspec.msgpack.encode(Record(sizes, msgspec.Raw(rest))), parts


def unpacked(record: Record, parts: Sequence[bytes], kind: type[T]) -> T:
    """The value. Raises msgspec.ValidationError if it is no ``kind``."""
    left = iter(parts)
    tree = msgspec.msgpack.decode(record.rest, ext_hook=lambda code, data: next(left))
    return msgspec.convert(tree, kind, builtin_types=BYTES)

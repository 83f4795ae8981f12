"""Weights on their way from files to a GPU: several threads read, each into pinned buffers of its own."""

from __future__ import annotations

import json
import os
import threading
from io import FileIO
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8}
DTYPES |= {"I16": torch.int16, "I64": torch.int64, "F8_E8M0": torch.float8_e8m0fnu}
BUFFERS = 2  # one is filled while the other one is copied


class Upload(threading.local):
    """Brings parts of files to the current GPU of the calling thread, in the order of its current stream."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn = 0

    def __call__(self, file: int, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor whose bytes begin at ``at`` of the descriptor ``file``.
        Raises ValueError if they end too early."""
        turn = self._turn = (self._turn + 1) % BUFFERS
        size = prod(shape) * dtype.itemsize
        self._copied[turn].synchronize()
        if self._buffers[turn].nbytes < size:
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        pinned = self._buffers[turn][:size]
        read(file, at, pinned.numpy().data)
        uploaded = pinned.view(dtype).view(shape).to("cuda", non_blocking=True)
        self._copied[turn].record()
        return uploaded


class Stored(NamedTuple):
    """Where a file has the rows of a tensor, and how they get to the GPU."""

    file: FileIO
    at: int
    dtype: torch.dtype
    upload: Upload

    def rows(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """``shape[0]`` rows from ``first`` on."""
        at = self.at + first * prod(shape[1:]) * self.dtype.itemsize
        return self.upload(self.file.fileno(), at, self.dtype, shape)


def places(path: Path, upload: Upload) -> dict[str, Stored]:
    """The tensors of a safetensors file whose types torch has."""
    file = open(path, "rb", buffering=0)  # closed with the last place in it  # noqa: SIM115
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    return {
        name: Stored(file, 8 + size + entry["data_offsets"][0], DTYPES[entry["dtype"]], upload)
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in DTYPES
    }


def read(file: int, at: int, buffer: memoryview) -> None:
    while buffer:
        count = os.preadv(file, [buffer], at)
        if count == 0:
            raise ValueError("the file ends too early")
        buffer, at = buffer[count:], at + count


def threads_for(device: torch.device) -> int:
    return min(8 if device.type == "cuda" else 4, os.cpu_count() or 1)


def begin_thread(device: torch.device) -> None:
    """Threads inherit neither the device nor a stream."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def synchronize(device: torch.device) -> None:
    """Wait for all streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Weights on their way from files to a GPU: several threads read, each through pinned buffers of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

BUFFERS = 2  # one is filled while the other one is copied


class Upload(threading.local):
    """Brings values to the current GPU of the calling thread, in the order of its current stream."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn = 0

    def __call__(self, values: Tensor) -> Tensor:
        """``values`` may be any view of a mapped file. The result is contiguous."""
        turn = self._turn = (self._turn + 1) % BUFFERS
        self._copied[turn].synchronize()
        if self._buffers[turn].nbytes < values.nbytes:
            self._buffers[turn] = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned = self._buffers[turn][: values.nbytes].view(values.dtype).view(values.shape)
        pinned.copy_(values)
        uploaded = pinned.to("cuda", non_blocking=True)
        self._copied[turn].record()
        return uploaded


def upload_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """How values get to ``device``."""
    return Upload() if device.type == "cuda" else lambda values: values


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

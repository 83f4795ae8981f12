"""A tier in the host's memory, for what the prefix tree loses on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sgla.messages import Copy, Moved
from sgla.worker.device_state import upload
from sgla.worker.pinned import Pinned
from sgla.worker.state import Int32s, column

STAGED = 32 << 20  # bytes that are gathered on the GPU and cross in one piece a unit


class HostTier:
    """Copies on a stream of their own. ``memory``: of each cache group, on the device (``kv.memory_of``);
    ``units``: how many of each the host has. What a unit holds in all layers lies together there."""

    def __init__(self, memory: Sequence[Sequence[Tensor]], units: Sequence[int], staging: Tensor) -> None:
        """``staging``: uint8[STAGED]"""
        self._memory = [_wide(tensors) for tensors in memory]
        widths = [sum(tensor.shape[1] for tensor in tensors) for tensors in memory]
        self._pinned = [Pinned(max(1, (count + 1) * width)) for count, width in zip(units, widths)]
        self._host = [
            pinned.bytes[: (count + 1) * width].view(count + 1, width)
            for pinned, count, width in zip(self._pinned, units, widths)
        ]
        self._staging = staging
        self._stream = torch.cuda.Stream()
        self._under_way: list[tuple[int, torch.cuda.Event]] = []

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def begin(self, copy: Copy) -> None:
        """Behind the steps that have been launched, beside those to come."""
        inward = copy.target == "device"
        units, places = (copy.targets, copy.sources) if inward else (copy.sources, copy.targets)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for g, tensors in enumerate(self._memory):
                if not tensors or not units[g]:
                    continue
                if self._host[g].shape[1] > len(self._staging):
                    self._direct(g, column(units[g]).tolist(), column(places[g]).tolist(), inward)
                else:
                    self._staged(g, column(units[g]), column(places[g]), inward)
            end = torch.cuda.Event()
            end.record()
        self._under_way.append((copy.transfer, end))

    def _direct(self, g: int, units: list[int], places: list[int], inward: bool) -> None:
        """Units that are large: each part crosses by itself."""
        for unit, place in zip(units, places):
            for tensor, part in zip(self._memory[g], self._parts(g, self._host[g][place : place + 1])):
                ends = (tensor[unit], part[0]) if inward else (part[0], tensor[unit])
                ends[0].copy_(ends[1], non_blocking=True)

    def _staged(self, g: int, units: Int32s, places: Int32s, inward: bool) -> None:
        host = self._host[g]
        width = host.shape[1]
        most = len(self._staging) // width
        for at in range(0, len(units), most):
            index, there = upload(units[at : at + most]).long(), places[at : at + most].tolist()
            rows = self._staging[: len(there) * width].view(len(there), width)
            if inward:
                for first, count, place in _runs(there):
                    rows[first : first + count].copy_(host[place : place + count], non_blocking=True)
                for tensor, part in zip(self._memory[g], self._parts(g, rows)):
                    tensor.index_copy_(0, index, part)
            else:
                for tensor, part in zip(self._memory[g], self._parts(g, rows)):
                    torch.index_select(tensor, 0, index, out=part)
                for first, count, place in _runs(there):
                    host[place : place + count].copy_(rows[first : first + count], non_blocking=True)

    def _parts(self, g: int, rows: Tensor) -> list[Tensor]:
        """Views of uint8[n, bytes of a unit]: those of each tensor."""
        parts, at = [], 0
        for tensor in self._memory[g]:
            width = tensor.shape[1] * tensor.itemsize
            parts.append(rows[:, at : at + width].view(tensor.dtype))
            at += width
        return parts

    def ended(self) -> list[Moved]:
        """The copies that have ended since the last call."""
        done = [entry for entry in self._under_way if entry[1].query()]
        self._under_way = [entry for entry in self._under_way if entry not in done]
        return [Moved(transfer, ok=True) for transfer, _ in done]


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """Places that follow each other cross together: the first of them, their count, and where they begin."""
    begun = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield begun, i - begun, places[begun]
            begun = i


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Eight bytes at a time, which GPUs copy faster than single ones, where all widths allow it."""
    wide = all(tensor.shape[1] % 8 == 0 for tensor in tensors)
    return [tensor.view(torch.int64) if wide else tensor for tensor in tensors]

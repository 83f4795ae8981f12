"""A tier in the host's memory, for what the prefix tree loses on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgla.messages import Copy, Moved
from sgla.worker.device_state import upload
from sgla.worker.state import Int32s, column

STAGED = 32 << 20  # bytes that are gathered on the GPU and cross in one piece a unit


class HostTier:
    """Copies on a stream of their own. ``memory``: of each cache group, on the device (``kv.memory_of``);
    ``units``: how many of each the host has. What a unit holds in all layers lies together there."""

    def __init__(self, memory: Sequence[Sequence[Tensor]], units: Sequence[int], staging: Tensor) -> None:
        """``staging``: uint8[STAGED]"""
        self._memory = [_wide(tensors) for tensors in memory]
        self._host = [
            torch.empty(
                count + 1, sum(tensor.shape[1] for tensor in tensors), dtype=torch.uint8, pin_memory=True
            )
            for count, tensors in zip(units, memory)
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
                for row, place in zip(rows, there):
                    row.copy_(host[place], non_blocking=True)
                for tensor, part in zip(self._memory[g], self._parts(g, rows)):
                    tensor.index_copy_(0, index, part)
            else:
                for tensor, part in zip(self._memory[g], self._parts(g, rows)):
                    torch.index_select(tensor, 0, index, out=part)
                for row, place in zip(rows, there):
                    host[place].copy_(row, non_blocking=True)

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


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Eight bytes at a time, which GPUs copy faster than single ones, where all widths allow it."""
    wide = all(tensor.shape[1] % 8 == 0 for tensor in tensors)
    return [tensor.view(torch.int64) if wide else tensor for tensor in tensors]

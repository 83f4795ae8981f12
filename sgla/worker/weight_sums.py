"""Sums over all that a model computes with, which tell whether its weights are what they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22  # words at a time
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15  # by which the sum of a chunk is multiplied for each behind it
KEPT = "sgla.layers", "sgla.model", "sgla.quant", "sgla.kernels.cpu.panels"  # modules of what has weights
# Attributes that are no weights, or are the same ones again.
APART = "declared", "counts", "mixtures", "_views"


def weight_sums(model: object) -> dict[str, int]:
    """Of each tensor, by where it is found in the model. What differs in a bit or in its place has another
    sum."""
    return {name: total(tensor) for name, tensor in tensors_in("", model, set())}


def tensors_in(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """All that are reached from there, each once."""
    if isinstance(value, str | int | float | range) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
        return
    for part, each in _parts(value):
        yield from tensors_in(f"{name}.{part}" if name else part, each, seen)


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(i), each) for i, each in enumerate(value))
    elif isinstance(value, torch.nn.Module):
        yield from value.state_dict(keep_vars=True).items()
    elif type(value).__module__.startswith(KEPT):
        slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
        found = {slot: getattr(value, slot, None) for slot in slots} | getattr(value, "__dict__", {})
        yield from ((part, each) for part, each in found.items() if part not in APART)


def total(tensor: Tensor) -> int:
    """A sum of its words, each times an odd number that its place gives."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = data[: len(data) // 8 * 8].view(torch.int64)
    rest = bytes(data[len(words) * 8 :].tolist())
    made = int.from_bytes(rest, "little") + len(data)
    for chunk in words.split(CHUNK):
        odd = torch.arange(len(chunk), device=chunk.device, dtype=torch.int64).mul_(2).add_(1)
        made = (made * STEP + int((chunk * odd).sum())) & MASK
    return made

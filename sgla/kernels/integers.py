"""Weights of 4 or 8 bits in groups with a scale and a zero, as kernels see them; ``quant/integers.py`` has
them."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

from torch import Tensor

BLOCK = 128  # channels of k that lie together
GROUPS = 32, 64, 128  # channels with one scale
# Bits and group of each storage; "m": zeros are any numbers, which gives a group a minimum.
KINDS = {f"int{bits}{of}{group}": (bits, group) for bits in (4, 8) for of in "gm" for group in GROUPS}


class Integers(Protocol):
    """``[n, k]``. ``tensors``: words and constants, int32 ``[n, blocks * 4 bits]`` and ``[n, blocks * BLOCK /
    group]``. ``whole``: zeros are whole numbers."""

    n: int
    k: int
    bits: int
    group: int
    whole: bool
    tensors: tuple[Tensor, ...]


def are_integers(weight: Any) -> TypeGuard[Integers]:
    return weight.kind in KINDS

"""How often each expert of a mixture was chosen, while somebody wants to know."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertCounts:
    """Of one layer: ``numbers`` int64[E], of the tokens that it has computed while ``active``."""

    def __init__(self, experts: int) -> None:
        self.active = False
        self.numbers = torch.zeros(experts, dtype=torch.int64, device="cpu")

    def add(self, ids: Tensor) -> None:
        """ids int64[T, top_k]"""
        self.numbers += torch.bincount(ids.flatten(), minlength=len(self.numbers))

    def taken(self) -> list[int]:
        """The numbers; from now on they count from 0."""
        numbers: list[int] = self.numbers.tolist()
        self.numbers.zero_()
        return numbers

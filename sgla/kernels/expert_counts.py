"""How often each expert of a mixture was chosen, and which ones, while somebody wants to know."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class ExpertCounts:
    """Of one layer: ``numbers`` int64[E], of the tokens that it has computed while ``active``; ``chosen``:
    None, or the experts of the latest of them, int[T, top_k or more]."""

    def __init__(self, experts: int) -> None:
        self.active = False
        self.chosen: list[Tensor] | None = None
        self.numbers = torch.zeros(experts, dtype=torch.int64, device="cpu")

    def add(self, ids: Tensor) -> None:
        """ids int64[T, top_k]"""
        if self.chosen is not None:
            self.chosen.append(ids)
        if self.active:
            self.count(ids)

    def count(self, ids: Tensor) -> None:
        self.numbers += torch.bincount(ids.flatten(), minlength=len(self.numbers))

    def taken(self) -> list[int]:
        """The numbers; from now on they count from 0."""
        numbers: list[int] = self.numbers.tolist()
        self.numbers.zero_()
        return numbers


def keep_chosen(counts: Mapping[str, ExpertCounts]) -> None:
    """From now on, until they are ``chosen``."""
    for each in counts.values():
        each.chosen = []


def chosen(counts: Mapping[int, ExpertCounts], layers: int, top_k: int, rows: Tensor) -> Tensor:
    """int32[S, layers, top_k]: the experts of the tokens ``rows`` int64[S] of the latest step. ``counts``: of
    the layers that have any; the last layer may have seen no tokens but these."""
    found = torch.zeros(len(rows), layers, top_k, dtype=torch.int32, device=rows.device)
    for layer, each in counts.items():
        assert each.chosen is not None
        [ids] = each.chosen
        found[:, layer] = (ids if len(ids) == len(rows) else ids[rows])[:, :top_k].int()
        each.chosen = None
    return found

"""How often each expert of a mixture was chosen, and which ones, while somebody wants to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class ExpertCounts:
    """Of one layer with ``experts``, of the tokens it has computed while ``active``; ``chosen``: None, or the
    experts of the latest, int[T, top_k or more]. ``held``: None, or those whose places the ids are, which are
    -1 for others."""

    def __init__(self, experts: int, held: Sequence[int] | None = None) -> None:
        self.active, self.held, self._experts = False, held, experts
        self.chosen: list[Tensor] | None = None
        self._numbers: Tensor | None = None  # int64[experts + 1], where the ids are; the first are of nobody

    def add(self, ids: Tensor) -> None:
        """ids int[T, top_k or more]; those beyond the experts are of shared ones, which are not counted."""
        if self.chosen is not None:
            self.chosen.append(ids)
        if self.active:
            self.count(ids)

    def count(self, ids: Tensor) -> None:
        if self._numbers is None:
            self._numbers = torch.zeros(self._experts + 1, dtype=torch.int64, device=ids.device)
        places = ids.flatten().long() + 1
        own = places <= self._experts
        self._numbers.scatter_add_(0, places.where(own, 0), own.long())

    def taken(self) -> list[int]:
        """The numbers; from now on they count from 0."""
        if self._numbers is None:
            return [0] * self._experts
        numbers: list[int] = self._numbers[1:].tolist()
        self._numbers = None
        if self.held is None:
            return numbers
        found = [0] * self._experts
        for expert, number in zip(self.held, numbers):
            found[expert] = number
        return found


@contextmanager
def uncounted(counts: Mapping[str, ExpertCounts], others: bool) -> Iterator[None]:
    """If ``others`` count the same tokens, these are left to them meanwhile."""
    active = [each for each in counts.values() if each.active and others]
    for each in active:
        each.active = False
    try:
        yield
    finally:
        for each in active:
            each.active = True


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

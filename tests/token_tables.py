"""Token tables for kernels that are tested alone."""

from __future__ import annotations

import torch

from sgla.kernels.triton.tokens import TokenTable


def in_rows(ids: torch.Tensor) -> TokenTable:
    """The ids are those in ``ids`` int32[slots, *], where they are written, too: a page of each slot."""
    slots, width = ids.shape
    pages = torch.arange(slots, dtype=torch.int32, device=ids.device)[:, None]
    table = TokenTable(pages, torch.full_like(pages[:, 0], width), width)
    table.ids, table.base = ids.view(-1), 0
    return table


def row(table: TokenTable, slot: int, count: int) -> list[int]:
    """The first ids of a slot."""
    found: list[int] = table.read(torch.tensor([slot]), torch.arange(count)[None])[0].tolist()
    return found

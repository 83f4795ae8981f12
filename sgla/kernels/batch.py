"""What one forward step computes: the tensors every layer and kernel may look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray


@dataclass(slots=True)
class StateRows:
    """What the layers that keep a state do with it, for R rows. Unit 0 is a dummy: nobody reads it, and
    padding may write to it. No row reads a unit that another one writes."""

    reads: torch.Tensor  # int32[R], the unit that a row begins with; 0: it begins without a state
    writes: torch.Tensor  # int32[R], where its last state is left
    marks: torch.Tensor  # int32[M, 3], row, tokens of it in this step, unit: states to leave on the way


@dataclass(slots=True)
class Media:
    """What pictures change in a step with T tokens, M of which stand for parts of pictures.

    ``grid``: positions of all tokens by time, row and column, where three axes turn keys and queries; each
    frequency is turned by the position of its axis in ``axes`` int64[rot / 2]. ``until``: the first place
    that a token does not see, where those of a picture see each other; ``windowed``: in layers with windows
    alone."""

    tokens: torch.Tensor  # int64[M], which ones
    values: torch.Tensor  # [M, d], in place of their embeddings
    grid: torch.Tensor | None = None  # int64[3, T]
    axes: torch.Tensor | None = None
    until: torch.Tensor | None = None  # int64[T]
    windowed: bool = False
    deep: list[torch.Tensor] = field(default_factory=list)  # [M, d], added behind each of the first layers
    _turns: dict[int, torch.Tensor] = field(default_factory=dict)  # of tables that have been asked for

    def turns(self, positions: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places int32[T] in a table ``[*, rot]`` as ``cos_sin`` is one, and that table."""
        if self.grid is None or self.axes is None:
            return positions, cos_sin
        table = self._turns.get(id(cos_sin))
        if table is None:
            by_axis = cos_sin[self.grid]  # [3, T, rot]
            axes = self.axes.repeat(2).expand(1, by_axis.shape[1], -1)
            table = self._turns[id(cos_sin)] = by_axis.gather(0, axes)[0]
        return torch.arange(len(table), dtype=torch.int32, device=table.device), table


@dataclass(slots=True)
class Canvas:
    """The tokens of a step with T tokens that are parts of blocks, which come out of noise. Those of a block
    see each other, and as much before it as its first one does."""

    tokens: torch.Tensor  # int64[M], which ones
    predicted: torch.Tensor  # float32[M, d], the embeddings that were predicted for them before
    until: torch.Tensor  # int64[T], the first place that a token does not see
    origin: torch.Tensor  # int64[T], the place from which windows are counted back


@dataclass(slots=True)
class Divided:
    """What ranks know of a step whose tokens they share out: ``places`` [G, T] of each rank's tokens, as in
    ``out_loc``; which of the step's ``tokens`` int64[T] are this rank's, and which ``rows`` int64 of the
    ``count`` that need logits."""

    places: list[torch.Tensor]
    tokens: torch.Tensor
    rows: torch.Tensor
    count: int

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(places.shape[-1] for places in self.places)


@dataclass(slots=True)
class ForwardBatch:
    """R rows with T tokens in all, S of which need logits.
    Tensors are int32; on CPU they may share numpy memory.

    Row ``r`` owns tokens ``q_start[r]:q_start[r + 1]``, the last tokens of its ``kv_len[r]``; its pages in
    cache group ``g`` are ``page_table[g, slots[r]]``. Token ``t`` stands at ``positions[t]`` and its KV goes
    to place ``out_loc[g, t]`` (= page * page_size + offset). On a GPU these two have no such dimension if
    there is one group.
    """

    rows: int
    tokens: int
    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [R]
    q_start: torch.Tensor  # [R + 1]
    kv_len: torch.Tensor  # [R], after this step
    out_loc: torch.Tensor  # [G, T]
    page_table: torch.Tensor  # [G, slots, max_pages], the whole tables
    page_size: int
    sample_rows: torch.Tensor  # [S], index of the token whose successor is wanted
    draws: NDArray[Any] | None = None  # ``native.DRAW`` [at most S]: a native program fills in their tokens
    states: StateRows | None = None  # for layers that keep one
    media: Media | None = None  # where the step has tokens of pictures
    canvas: Canvas | None = None  # where the step has blocks that come out of noise
    divided: Divided | None = None  # where this is one rank's part of the step
    live: torch.Tensor | None = None  # int32[T], 0 for padding, where there may be some

    def turns(self, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By what each token's keys and queries are turned: places int32[T] in a table, and the table."""
        return (self.positions, cos_sin) if self.media is None else self.media.turns(self.positions, cos_sin)

    def pages(self, group: int) -> torch.Tensor:
        """The page table of a cache group: int32[slots, max_pages]."""
        return self.page_table[group] if self.page_table.dim() > 2 else self.page_table


def out_loc_of(out_loc: torch.Tensor, group: int) -> torch.Tensor:
    """The part of a batch's ``out_loc`` that is for a cache group: int32[T]."""
    return out_loc[group] if out_loc.dim() > 1 else out_loc

"""Pictures of the requests in slots: their features, which a tower makes once, and what these change in a
step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.batch import ForwardBatch, Media
from sgla.loading.tower import Features, Tower
from sgla.messages import NewRow, Placed, Prepared
from sgla.worker.batch import Columns
from sgla.worker.state import column

CACHED = 128 << 20  # bytes of features that are kept for requests to come

Places = NDArray[np.int64]


@dataclass
class Shown:
    """The pictures of a slot. ``parts``: the tokens of its prompt that stand for parts of each. ``grid``
    int64[3, end]: positions of its tokens up to the ``end`` of its last picture, behind which they are
    ``shift`` more than the numbers of tokens."""

    placed: list[Placed]
    parts: list[Places]
    end: int
    grid: Places | None = None
    shift: int = 0
    features: dict[int, Features] = field(default_factory=dict)  # of pictures that are being read


class Pictures:
    """``token`` stands for a part of a picture; ``width``: of embeddings. ``merged``: see ``Vision``, with
    ``axes`` int64[rot / 2]; ``together``, too."""

    def __init__(
        self,
        tower: Tower,
        token: int,
        width: int,
        together: bool,
        merged: int = 0,
        axes: Tensor | None = None,
        cached: int = CACHED,
    ) -> None:
        self._tower, self._token, self._width, self._together = tower, token, width, together
        self._merged, self._axes = merged, axes
        self._shown: dict[int, Shown] = {}  # by slot
        self._cache: OrderedDict[bytes, Features] = OrderedDict()  # by digest, the latest used one last
        self._cached, self._bytes = cached, 0
        self.computed = 0  # pictures that the tower has seen

    def admit(self, new: NewRow) -> None:
        """The slot has another request."""
        self._shown.pop(new.slot, None)
        if not new.pictures:
            return
        tokens = column(new.tokens)
        parts = [
            placed.first + np.flatnonzero(tokens[placed.first : placed.end] == self._token)
            for placed in new.pictures
        ]
        shown = Shown(new.pictures, parts, max(placed.end for placed in new.pictures))
        if self._merged:
            shown.grid, shown.shift = grid_of(new.pictures, parts, shown.end, self._merged)
        self._shown[new.slot] = shown

    def show(self, batch: ForwardBatch, columns: Columns) -> None:
        """Put what pictures change in the step into the ``batch``."""
        if not self._shown:
            return
        rows = [
            (self._shown[slot], start, first, first + count)
            for slot, start, first, count in zip(
                columns.slots.tolist(),
                columns.starts.tolist(),
                (np.cumsum(columns.q_lens) - columns.q_lens).tolist(),
                columns.q_lens.tolist(),
            )
            if slot in self._shown
        ]
        for shown, start, first, end in rows:
            if shown.shift and start >= shown.end:
                batch.positions[first:end] += shown.shift
        reading = [row for row in rows if row[1] < row[0].end]
        if reading:
            batch.media = self._media(batch, reading)

    def _media(self, batch: ForwardBatch, rows: list[tuple[Shown, int, int, int]]) -> Media | None:
        """``rows``: what each shows, its first token in its prompt and in the step, and the end in this."""
        found: list[tuple[Tensor, Features, Tensor]] = []  # tokens of the step, and which features they have
        positions = batch.positions.numpy().astype(np.int64)
        until, grid = positions + 1, np.repeat(positions[None], 3, 0)
        for shown, start, first, end in rows:
            stop = start + end - first
            for i, parts in enumerate(shown.parts):
                own = np.flatnonzero((parts >= start) & (parts < stop))
                if own.size:
                    at = torch.from_numpy(parts[own] - start + first)
                    found.append((at, self._of(shown, i), torch.from_numpy(own)))
                    until[parts[own] - start + first] = parts[-1] + 1
                if stop >= shown.placed[i].end:
                    shown.features.pop(i, None)
            if shown.grid is not None:
                known = min(stop, shown.end)
                grid[:, first : first + known - start] = shown.grid[:, start:known]
                grid[:, first + known - start : end] += shown.shift
        if not (found or self._merged):
            return None
        depth = max((len(seen.deep) for _, seen, _ in found), default=0)
        return Media(
            tokens=torch.cat([torch.empty(0, dtype=torch.int64), *(at for at, _, _ in found)]),
            values=torch.cat([torch.empty(0, self._width), *(seen.values[own] for _, seen, own in found)]),
            grid=torch.from_numpy(grid) if self._merged else None,
            axes=self._axes,
            until=torch.from_numpy(until) if self._together else None,
            deep=[torch.cat([seen.layer(i)[own] for _, seen, own in found]) for i in range(depth)],
        )

    def _of(self, shown: Shown, i: int) -> Features:
        if i not in shown.features:
            shown.features[i] = self._features(shown.placed[i].picture, len(shown.parts[i]))
        return shown.features[i]

    def _features(self, picture: Prepared, count: int) -> Features:
        """What cannot be had is no number, so that its request fails alone."""
        known = self._cache.get(picture.digest)
        if known is not None:
            self._cache.move_to_end(picture.digest)
            return known
        self.computed += 1
        try:
            made = self._tower(arrays_of(picture))
        except (OSError, ValueError, RuntimeError, IndexError):
            made = None
        if made is None or len(made.values) != count:
            return Features(torch.full((count, self._width), torch.nan), [])
        self._cache[picture.digest] = made
        self._bytes += made.nbytes
        while self._bytes > self._cached:
            self._bytes -= self._cache.popitem(last=False)[1].nbytes
        return made


def arrays_of(picture: Prepared) -> dict[str, Tensor]:
    """Raises OSError."""
    data = Path(picture.file).read_bytes()
    return {
        array.name: torch.from_numpy(
            np.frombuffer(data, array.dtype, prod(array.shape), array.first).reshape(array.shape).copy()
        )
        for array in picture.arrays
    }


def grid_of(placed: list[Placed], parts: list[Places], end: int, merged: int) -> tuple[Places, int]:
    """Positions int64[3, end] by time, row and column of tokens among pictures, and by how much those behind
    are more than the numbers of the tokens: see ``get_rope_index`` of Qwen2VLModel."""
    grid, at, position = np.zeros((3, end), np.int64), 0, 0
    for entry, tokens in zip(placed, parts):
        shape = next(array.values for array in entry.picture.arrays if array.name == "image_grid_thw")
        times, rows, columns = shape[0], shape[1] // merged, shape[2] // merged
        first, stop = int(tokens[0]), int(tokens[-1]) + 1
        grid[:, at:first] = position + np.arange(first - at)
        position += first - at
        places = np.indices((times, rows, columns)).reshape(3, -1)
        grid[:, first:stop] = position + places[:, : stop - first]
        position, at = position + max(rows, columns), stop
    grid[:, at:end] = position + np.arange(end - at)
    return grid, position - at


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PicturedForward:
    """A forward pass that is ``plain`` for steps without tokens of pictures, which go op by op."""

    def __init__(
        self,
        plain: Callable[[ForwardBatch], Tensor],
        eager: Callable[[ForwardBatch], Tensor],
        count: int,
    ) -> None:
        self._plain, self._eager, self._count = plain, eager, count

    def __call__(self, batch: ForwardBatch) -> Tensor:
        if batch.media is None:
            return self._plain(batch)
        with threads(self._count):
            return self._eager(batch)

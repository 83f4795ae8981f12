"""Pictures and videos of the requests in slots: their features, which a tower makes once, and what these
change in a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.batch import ForwardBatch, Media
from sgla.loading.tower import Elsewhere, Features, Tower
from sgla.media.arrays import size_as_patches
from sgla.messages import NewRow, Placed, Prepared
from sgla.worker.batch import Columns
from sgla.worker.features import FeatureCache, threads
from sgla.worker.state import Int32s, column

CACHED = 128 << 20  # bytes of features that are kept for requests to come
SHARE = 128  # of a GPU's memory one part in so many, if that is more

log = logging.getLogger(__name__)

Places = NDArray[np.int64]


def kept_on(device: torch.device) -> int:
    """Bytes of features that are kept there."""
    return CACHED if device.type == "cpu" else max(CACHED, torch.cuda.mem_get_info(device)[1] // SHARE)


@dataclass
class Shown:
    """The pictures of a slot. ``parts``: the tokens of its prompt that stand for parts of each, or see each
    other. ``grid`` int64[3, end]: positions of its tokens up to the ``end`` of its last picture, behind which
    they are ``shift`` more than the numbers of tokens."""

    placed: list[Placed]
    parts: list[Places]
    end: int
    grid: Places | None = None
    shift: int = 0
    features: dict[int, Features] = field(default_factory=dict)  # of pictures that are being read


# What it shows, its first token in its prompt and in the step, and the end in this.
Row = tuple[Shown, int, int, int]


class Pictures:
    """``tokens`` stand for a part of a picture or a video; ``width``: of embeddings. ``merged``: see
    ``Vision``, with ``axes`` int64[rot / 2]; ``together``, too. ``abreast``: bytes of what a processor made
    of pictures that the tower sees at a time, where they may lie behind each other."""

    def __init__(
        self,
        tower: Tower | Elsewhere,
        tokens: tuple[int, ...],
        width: int,
        together: bool,
        merged: int = 0,
        axes: Tensor | None = None,
        cached: int = CACHED,
        abreast: int = 0,
        windowed: bool = False,
    ) -> None:
        self._tower, self._tokens, self._width, self._together = tower, tokens, width, together
        self._merged, self._axes, self._windowed = merged, axes, windowed
        self._shown: dict[int, Shown] = {}  # by slot
        self._cache, self._abreast = FeatureCache(tower, width, cached), abreast
        self.example: dict[str, Tensor] | None = None  # what a processor makes of a large one
        if axes is not None:
            self._axes = axes.to(tower.device)

    @property
    def computed(self) -> int:
        """Pictures that the tower has seen."""
        return self._cache.computed

    @property
    def turns(self) -> bool:
        """Positions of tokens behind pictures are not their numbers."""
        return bool(self._merged)

    def delta(self, slot: int) -> int:
        """By how much positions behind the pictures of a slot are more than the numbers of the tokens."""
        return self._shown[slot].shift if slot in self._shown else 0

    def admit(self, new: NewRow) -> None:
        """The slot has another request."""
        self._shown.pop(new.slot, None)
        if not new.pictures:
            return
        tokens = column(new.tokens)
        parts = [self._parts(placed, tokens) for placed in new.pictures]
        shown = Shown(new.pictures, parts, max(placed.end for placed in new.pictures))
        if self._merged:
            shown.grid, shown.shift = grid_of(new.pictures, parts, shown.end, self._merged)
        self._shown[new.slot] = shown

    def _parts(self, placed: Placed, tokens: NDArray[np.int32]) -> Places:
        if not placed.picture.arrays:
            return np.arange(placed.first, placed.end)
        return placed.first + np.flatnonzero(np.isin(tokens[placed.first : placed.end], self._tokens))

    def show(self, batch: ForwardBatch, columns: Columns) -> None:
        """Put what pictures change in the step into the ``batch``, which is on the host."""
        if not self._shown:
            return
        for shown, start, first, end in self._rows(*columns[:3]):
            if shown.shift and start >= shown.end:
                batch.positions[first:end] += shown.shift
        batch.media = self.media(*columns[:3])

    def reads(self, slots: Sequence[int], starts: Sequence[int]) -> bool:
        """Whether one of the rows has tokens before the end of its last picture."""
        shown = self._shown
        if not shown:
            return False
        return any(slot in shown and start < shown[slot].end for slot, start in zip(slots, starts))

    def _rows(self, slots: Int32s, starts: Int32s, q_lens: Int32s) -> list[Row]:
        """Those with pictures."""
        first = np.cumsum(q_lens) - q_lens
        columns = (column.tolist() for column in (slots, starts, first, first + q_lens))
        return [
            (self._shown[slot], start, at, end)
            for slot, start, at, end in zip(*columns)
            if slot in self._shown
        ]

    def media(self, slots: Int32s, starts: Int32s, q_lens: Int32s) -> Media | None:
        """What pictures change in a step with these rows, on the tower's device."""
        if not self.reads(slots.tolist(), starts.tolist()):
            return None
        rows = self._rows(slots, starts, q_lens)
        numbers = np.arange(q_lens.sum()) - np.repeat(np.cumsum(q_lens) - q_lens - starts, q_lens)
        grid, until = np.repeat(numbers[None], 3, 0), numbers + 1
        for shown, start, first, end in rows:
            if start >= shown.end:
                grid[:, first:end] += shown.shift
        return self._media(grid, until, [row for row in rows if row[1] < row[0].end])

    def _media(self, grid: Places, until: Places, rows: list[Row]) -> Media | None:
        """Of the ``rows`` that read pictures. ``grid`` int64[3, T] and ``until`` int64[T]: see ``Media``; of
        tokens that have nothing to do with any."""
        if self._abreast:
            self._see(rows)
        found: list[tuple[Places, Features, Places]] = []  # tokens of the step, and which features they have
        for shown, start, first, end in rows:
            stop = start + end - first
            for i, parts in enumerate(shown.parts):
                own = np.flatnonzero((parts >= start) & (parts < stop))
                at = parts[own] - start + first
                if own.size and shown.placed[i].picture.arrays:
                    found.append((at, self._of(shown, i), own))
                if shown.placed[i].whole:
                    ends = ends_of(parts)
                    until[at] = ends[np.searchsorted(ends, parts[own])] + 1
                if stop >= shown.placed[i].end:
                    shown.features.pop(i, None)
            if shown.grid is not None:
                known = min(stop, shown.end)
                grid[:, first : first + known - start] = shown.grid[:, start:known]
                grid[:, first + known - start : end] += shown.shift
        if not (found or self._merged or self._together):
            return None
        depth = max((len(seen.deep) for _, seen, _ in found), default=0)
        none = torch.empty(0, self._width, dtype=self._tower.dtype, device=self._tower.device)
        taken = [(seen, self._put(own)) for _, seen, own in found]
        return Media(
            tokens=self._put(np.concatenate([np.zeros(0, np.int64), *(at for at, _, _ in found)])),
            values=torch.cat([none, *(seen.values[own] for seen, own in taken)]),
            grid=self._put(grid) if self._merged else None,
            axes=self._axes,
            until=self._put(until) if self._together else None,
            windowed=self._windowed,
            deep=[torch.cat([seen.layer(i)[own] for seen, own in taken]) for i in range(depth)],
        )

    def look(self) -> None:
        """Have the tower look at the example, if there is one, to see what that takes: more than once, since
        copies of the next pictures lie beside the last ones."""
        if self.example is not None:
            pinned = {name: values.pin_memory() for name, values in self.example.items()}
            for _ in range(3):
                self._tower(pinned)

    def stand_in(self, tokens: int) -> Media:
        """Of a step of so many tokens, all of which stand for parts of pictures."""
        numbers = self._put(np.arange(tokens))
        return Media(
            tokens=numbers,
            values=torch.zeros(tokens, self._width, dtype=self._tower.dtype, device=self._tower.device),
            grid=torch.zeros_like(numbers).expand(3, -1) if self._merged else None,
            axes=self._axes,
            until=numbers + 1 if self._together else None,
        )

    def _put(self, values: Places) -> Tensor:
        """On the tower's device, without waiting."""
        device, made = self._tower.device, torch.from_numpy(values)
        return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)

    def _of(self, shown: Shown, i: int) -> Features:
        if i not in shown.features:
            shown.features[i] = self._cache.of(shown.placed[i].picture, len(shown.parts[i]))
        return shown.features[i]

    def _see(self, rows: list[Row]) -> None:
        """Have the tower look at pictures together that the rows read now and whose features are not there.
        What cannot be had is left to the cache."""
        missing: dict[bytes, tuple[Prepared, int]] = {}
        for shown, start, first, end in rows:
            for i, (placed, parts) in enumerate(zip(shown.placed, shown.parts)):
                read = len(parts) and parts[0] < start + end - first and parts[-1] >= start
                if (
                    read
                    and placed.picture.arrays
                    and placed.picture.kind != "audio"
                    and i not in shown.features
                    and placed.picture.digest not in self._cache
                ):
                    missing[placed.picture.digest] = placed.picture, len(parts)
        for group in groups_of(list(missing.values()), self._abreast):
            with suppress(OSError, ValueError, RuntimeError, IndexError):
                pictures, counts = zip(*group)
                read = [self._cache.read(picture) for picture in pictures]
                made = self._tower.several(read, list(counts))
                for picture, features in zip(pictures, made):
                    self._cache.keep(picture, features)
                self._cache.computed += len(group)


def groups_of(pictures: list[tuple[Prepared, int]], most: int) -> Iterator[list[tuple[Prepared, int]]]:
    """Those of at most so many bytes together, without ones that would be alone."""
    group: list[tuple[Prepared, int]] = []
    total = 0
    for one in pictures:
        size = sum(size_as_patches(array.name, array.shape, array.dtype) for array in one[0].arrays)
        if group and total + size > most:
            if len(group) > 1:
                yield group
            group, total = [], 0
        group.append(one)
        total += size
    if len(group) > 1:
        yield group


def ends_of(parts: Places) -> Places:
    """The last one of each run of numbers that follow each other: a picture, or a frame of a video, whose
    tokens see each other, but none of a later frame's."""
    return parts[np.append(np.diff(parts) > 1, True)]


def grid_of(placed: list[Placed], parts: list[Places], end: int, merged: int) -> tuple[Places, int]:
    """Positions int64[3, end] by time, row and column of tokens among pictures, and by how much those behind
    are more than the numbers of the tokens: see ``get_rope_index`` of Qwen2VLModel."""
    grid, at, position = np.zeros((3, end), np.int64), 0, 0
    for entry, tokens in zip(placed, parts):
        told = {array.name: array.values for array in entry.picture.arrays}
        if "image_grid_thw" not in told:  # tokens of a sound come one behind the other, as texts do
            continue
        _, rows, columns = (length // merged for length in told["image_grid_thw"])
        # The frames of a video may have texts between them; then each has a grid of its own.
        for run in np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1):
            first, stop = int(run[0]), int(run[-1]) + 1
            grid[:, at:first] = position + np.arange(first - at)
            position += first - at
            places = np.indices((len(run) // (rows * columns), rows, columns)).reshape(3, -1)
            if "steps" in told:
                places[0] = np.asarray(told["steps"])[places[0]]
            grid[:, first:stop] = position + places
            position, at = int(grid[:, first:stop].max()) + 1, stop
    grid[:, at:end] = position + np.arange(end - at)
    return grid, position - at


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

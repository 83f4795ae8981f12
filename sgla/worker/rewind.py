"""What layers keep behind a guess: how those with one state of all tokens go back behind a wrong one, and
where those that keep tokens have one that stood elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.ops import Layer, StateLayer
from sgla.worker.batch import Columns, StateColumns, Wanted
from sgla.worker.kv import state_of_layer, tokens_of
from sgla.worker.state import Int32s


class Rewind:
    """A row with guesses leaves its state behind each of its tokens in a spare unit, of which there are
    enough for a step from ``first`` on. The one behind the last right guess becomes the row's own."""

    def __init__(self, kv: Sequence[Layer], first: int) -> None:
        self._layers, self._first = _layers(kv), first

    def mark(self, columns: Columns, wanted: Wanted) -> Columns:
        """``columns`` with those places."""
        assert columns.states is not None
        runs = wanted.runs[wanted.runs > 1]
        if not len(runs):
            return columns
        rows = np.repeat(wanted.rows[wanted.first][wanted.runs > 1], runs - 1)
        lengths = np.concatenate([np.arange(1, run) for run in runs])
        units = self._first + np.arange(len(rows))
        marks = np.concatenate([columns.states.marks, np.stack([rows, lengths, units], 1)])
        reads, writes, _ = columns.states
        return columns._replace(states=StateColumns(reads, writes, marks.astype(np.int32)))

    def go_back(self, columns: Columns, wanted: Wanted, counts: Int32s) -> None:
        """So many tokens of each row that is sampled have come."""
        assert columns.states is not None
        first = self._first + np.cumsum(wanted.runs - 1) - (wanted.runs - 1)
        wrong = (counts < wanted.runs) & (counts > 0)
        sources = torch.from_numpy((first + counts - 1)[wrong])
        targets = torch.from_numpy(columns.states.writes[wanted.rows[wanted.first]][wrong]).long()
        for layer in self._layers if len(targets) else []:
            layer.conv[targets], layer.memory[targets] = layer.conv[sources], layer.memory[sources]


class Units:
    """The units of all layers on a GPU, of which the last ``spare`` ones, from ``first`` on, are for states
    behind guesses, as in ``Rewind``. ``memory``: integers, among which all units are; ``places`` int64[N, 2]:
    of each of N tensors, where in there it begins, and how many of them a unit takes."""

    def __init__(self, kv: Sequence[Layer], spare: int) -> None:
        tensors = [x for layer in _layers(kv) for x in (layer.conv, layer.memory) if x.numel()]
        storage = tensors[0].untyped_storage()
        assert all(x.untyped_storage().data_ptr() == storage.data_ptr() for x in tensors), (
            "one piece of memory"
        )
        self.first = max(0, len(tensors[0]) - spare)
        places = [(x.storage_offset() * x.itemsize, x.stride(0) * x.itemsize) for x in tensors]
        size = math.gcd(4, *itertools.chain(*places))
        dtype = {4: torch.int32, 2: torch.int16, 1: torch.int8}[size]
        self.memory = torch.empty(0, dtype=dtype, device=tensors[0].device).set_(storage)  # type: ignore[call-overload]
        self.places = torch.tensor(places, device=tensors[0].device) // size


class Pages:
    """What layers on a GPU keep of tokens, in pages of one cache group that ``table`` int32[slots, *] names,
    of ``size`` tokens each; ``memory`` and ``places``: see ``kernels/triton/drafts.py: move``."""

    def __init__(self, kv: Sequence[Layer], table: Tensor, size: int) -> None:
        self.table, self.size = table, size
        tensors = [x for layer in kv if (kept := tokens_of(layer)) is not None for x in (kept.k, kept.v)]
        storage = tensors[0].untyped_storage()
        assert all(x.untyped_storage().data_ptr() == storage.data_ptr() for x in tensors), (
            "one piece of memory"
        )
        sizes = [[n * x.itemsize for n in (x.storage_offset(), *x.stride()[:3], x.shape[3])] for x in tensors]
        assert not any(n % 4 for row in sizes for n in row)
        places = [[*(n // 4 for n in row[:4]), x.shape[2], row[4] // 4] for x, row in zip(tensors, sizes)]
        device = tensors[0].device
        self.memory = torch.empty(0, dtype=torch.int32, device=device).set_(storage)  # type: ignore[call-overload]
        self.places = torch.tensor(places, device=device)


def _layers(kv: Sequence[Layer]) -> list[StateLayer]:
    return [state for layer in kv if (state := state_of_layer(layer)) is not None]

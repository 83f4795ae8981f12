"""How layers that keep one state of all tokens go back behind a wrong guess."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgla.kernels.ops import BothLayer, Layer, StateLayer
from sgla.worker.batch import Columns, StateColumns, Wanted
from sgla.worker.state import Int32s


class Rewind:
    """A row with guesses leaves its state behind each of its tokens in a spare unit, of which there are
    enough for a step from ``first`` on. The one behind the last right guess becomes the row's own."""

    def __init__(self, kv: Sequence[Layer], first: int) -> None:
        self._layers = [layer.state if isinstance(layer, BothLayer) else layer for layer in kv]
        self._first = first

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
            if isinstance(layer, StateLayer):
                layer.conv[targets], layer.memory[targets] = layer.conv[sources], layer.memory[sources]
